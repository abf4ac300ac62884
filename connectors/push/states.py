"""The states of both ends of a KV transfer, with one table of legal transitions each. No data and no I/O.

An event that the table does not have for a state is late or a duplicate, and has no effect.
"""

from __future__ import annotations

import enum


class Inbox(enum.Enum):
    """A decode request whose blocks wait for KV."""

    CONNECTING = "connecting"  # the prefill engine does not know the blocks: no WRITE can come
    REGISTERED = "registered"  # WRITEs may land at any time
    WITHDRAWING = "withdrawing"  # peers are asked to stop; WRITEs may land until all have answered or are cut off
    RECEIVED = "received"  # end: all KV has arrived
    FAILED = "failed"  # end: no WRITE can land any more, the KV is incomplete


class InboxEvent(enum.Enum):
    SENT = "sent"  # the registration was sent
    UNSENT = "unsent"  # sending it failed for every peer: the link is cut
    UNREACHABLE = "unreachable"  # it cannot be sent
    ALL_LANDED = "all_landed"  # every peer has answered `Landed`
    ALL_ANSWERED = "all_answered"  # every peer has answered, some with `Gone`
    REFUSED = "refused"  # one peer has answered `Gone`, others have not answered
    WITHDRAW = "withdraw"  # aborted by the scheduler, or timed out
    CUT_OFF = "cut_off"  # no peer can write here any more: it is dead, or its connections were closed here


INBOX: dict[tuple[Inbox, InboxEvent], Inbox] = {
    (Inbox.CONNECTING, InboxEvent.SENT): Inbox.REGISTERED,
    (Inbox.CONNECTING, InboxEvent.UNREACHABLE): Inbox.FAILED,
    (Inbox.CONNECTING, InboxEvent.WITHDRAW): Inbox.FAILED,
    (Inbox.REGISTERED, InboxEvent.UNSENT): Inbox.CONNECTING,
    (Inbox.REGISTERED, InboxEvent.ALL_LANDED): Inbox.RECEIVED,
    (Inbox.REGISTERED, InboxEvent.ALL_ANSWERED): Inbox.FAILED,
    (Inbox.REGISTERED, InboxEvent.REFUSED): Inbox.WITHDRAWING,
    (Inbox.REGISTERED, InboxEvent.WITHDRAW): Inbox.WITHDRAWING,
    (Inbox.WITHDRAWING, InboxEvent.ALL_LANDED): Inbox.RECEIVED,  # sent before the withdrawal arrived
    (Inbox.WITHDRAWING, InboxEvent.ALL_ANSWERED): Inbox.FAILED,
    (Inbox.WITHDRAWING, InboxEvent.CUT_OFF): Inbox.FAILED,
}


class Stream(enum.Enum):
    """A prefill request whose KV is to be pushed."""

    EXPECTED = "expected"  # decode has registered, prefill has not been scheduled yet
    COMPUTING = "computing"  # prefill runs, decode has not registered
    STREAMING = "streaming"  # prefill runs and decode has registered: computed blocks are posted
    LEASED = "leased"  # prefill is done, decode has not registered: blocks are kept for a while
    FLUSHING = "flushing"  # prefill is done and decode has registered: the last WRITEs are in flight
    DRAINING = "draining"  # given up: no WRITE is posted any more, those in flight end first
    LANDED = "landed"  # end: decode has all KV, and `Landed` was sent
    DROPPED = "dropped"  # end: given up, and `Gone` was sent


class StreamEvent(enum.Enum):
    REGISTER = "register"
    START = "start"  # the first chunk was scheduled
    CLOSE = "close"  # the last chunk is computed
    PREEMPTED = "preempted"  # all computed blocks are void
    FLUSHED = "flushed"  # no chunk is pending and no WRITE is in flight
    GIVE_UP = "give_up"  # withdrawn, aborted, a WRITE failed, or the lease expired
    DRAINED = "drained"  # given up, and no WRITE is in flight


STREAM: dict[tuple[Stream, StreamEvent], Stream] = {
    (Stream.EXPECTED, StreamEvent.START): Stream.STREAMING,
    (Stream.EXPECTED, StreamEvent.GIVE_UP): Stream.DRAINING,
    (Stream.COMPUTING, StreamEvent.REGISTER): Stream.STREAMING,
    (Stream.COMPUTING, StreamEvent.CLOSE): Stream.LEASED,
    (Stream.COMPUTING, StreamEvent.GIVE_UP): Stream.DRAINING,
    (Stream.STREAMING, StreamEvent.CLOSE): Stream.FLUSHING,
    (Stream.STREAMING, StreamEvent.GIVE_UP): Stream.DRAINING,
    (Stream.LEASED, StreamEvent.REGISTER): Stream.FLUSHING,
    (Stream.LEASED, StreamEvent.PREEMPTED): Stream.COMPUTING,
    (Stream.LEASED, StreamEvent.GIVE_UP): Stream.DRAINING,
    (Stream.FLUSHING, StreamEvent.FLUSHED): Stream.LANDED,
    (Stream.FLUSHING, StreamEvent.PREEMPTED): Stream.STREAMING,
    (Stream.FLUSHING, StreamEvent.GIVE_UP): Stream.DRAINING,
    (Stream.DRAINING, StreamEvent.DRAINED): Stream.DROPPED,
}

INBOX_ENDS = frozenset({Inbox.RECEIVED, Inbox.FAILED})
STREAM_ENDS = frozenset({Stream.LANDED, Stream.DROPPED})
