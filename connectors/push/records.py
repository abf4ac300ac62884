"""What both ends know of a transfer: a request's state, how much of it was shipped, the connections that it uses, and
whether the other end answers over them.

`outbound.py` and `inbound.py` move requests from state to state.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from connectors.push.actions import Chunk, Ended, Renew, Send, Tell
from connectors.push.states import Inbox, Stream
from connectors.push.wire import Endpoint, Hello, Ping, Pong, Register

_RENEW_AFTER = 1 / 3  # of a registration's time
# Between two repeats of what is not answered, at first and at most: a link may have lost it, or the answer.
RESEND_S, _RESEND_MAX_S = 0.5, 4.0
_SPREAD = 0.25  # of that time, more or less: the repeats to a silent peer do not all come in one turn
_UNWRITABLE_S = 30.0
_REMEMBERED = 2048
_REMEMBERED_PEERS = 4096
_PING_EVERY_S = 0.5
_SILENT = 4  # pings in a row without an answer


@dataclass(frozen=True)
class Link:
    """A connection to a decode engine."""

    hello: Hello  # has its number
    chunkwise: bool  # WRITEs go out chunk by chunk
    peers: frozenset[str]

    @property
    def epoch(self) -> int:
        return self.hello.epoch


class Unwritable(NamedTuple):
    """Why an engine is connected for messages only. What looked like another memory layout may have been a passing
    error: the first WRITE after some time has the connection made anew, for all."""

    why: str
    since: float

    def is_over(self, now: float) -> bool:
        return now >= self.since + _UNWRITABLE_S


class Links(dict[str, Link]):
    """By decode engine."""

    def __init__(self, hello: Hello) -> None:
        super().__init__()
        self._hello = hello  # said of the last one

    def made(self, engine: str, chunkwise: bool, peers: Iterable[str]) -> Link:
        """It is connected, anew or still."""
        if (link := self.get(engine)) is None:
            self._hello = msgspec.structs.replace(self._hello, epoch=self._hello.epoch + 1)
        self[engine] = made = Link(link.hello if link else self._hello, chunkwise, frozenset(peers))
        return made


@dataclass
class PushStream:
    """A prefill request whose KV is pushed. Times are monotonic seconds."""

    key: str
    state: Stream
    deadline: float | None = None  # of the state
    lease_s: float = 0.0  # its blocks are kept so long for a decode engine that has not registered
    valid_until: float | None = None  # of the registration
    registered_at: float = 0.0
    renew_at: float = 0.0  # then decode gets `Computing`, and registers again
    order: Register | None = None
    registered: dict[str, int] = field(default_factory=dict)  # peer -> the connection that it has registered for
    epoch: int = 0
    pending: deque[Chunk] = field(default_factory=deque)
    inflight: dict[Any, int] = field(default_factory=dict)  # handle -> epoch
    posted_over: int = 0  # the connection of the last WRITE
    failed_epoch: int = 0  # the connection on which a WRITE failed, of which parts may still land
    total_blocks: int = 0
    prompt_tokens: int = 0
    held: bool = False  # the scheduler waits for Release
    computing: bool = False  # the scheduler will still say how the prefill ended
    lent: bool = False  # it is no prefill, but a prefix from the cache
    covered: int = 0  # blocks shipped in all regions, from the first on
    covered_regions: dict[int, int] = field(default_factory=dict)  # region -> blocks shipped in it, where they are more
    why: str = ""
    first_post_at: float | None = None
    closed_at: float | None = None
    lost_at: float | None = None  # preempted, and not computed again since

    def restart(self, epoch: int, now: float) -> None:
        """The prefill was preempted: nothing that was shipped counts."""
        self.epoch, self.lost_at = epoch, now
        self.pending.clear()
        self.covered = 0
        self.covered_regions.clear()

    def add(self, chunk: Chunk) -> None:
        """Queues `chunk` for shipping."""
        self.pending.append(chunk)
        self.lost_at = None
        if chunk.whole:
            self.covered = self.total_blocks
        elif chunk.start <= self.covered:
            end = chunk.start + len(chunk.blocks[0])
            if chunk.regions is None:
                self.covered = max(self.covered, end)
            else:
                self.covered_regions |= dict.fromkeys(chunk.regions, end)

    @property
    def misfit(self) -> str:
        """Why the blocks of the two ends do not match: their prompts have different lengths. Empty if they do."""
        if self.order is None or not self.prompt_tokens or self.order.prompt_tokens in (0, self.prompt_tokens):
            return ""
        return f"decode has {self.order.prompt_tokens} prompt tokens, prefill {self.prompt_tokens}"

    @property
    def may_never_end(self) -> bool:
        """It was given up so long ago that its WRITEs in flight may last until the kernel gives up their connection."""
        return self.state is Stream.DRAINING and self.deadline is None

    @property
    def awaits_device(self) -> bool:
        """The device has not computed the last of the chunks yet."""
        return bool(self.pending) and not _is_computed(self.pending[-1])

    def take_ready(self, all_or_none: bool, one_by_one: bool) -> tuple[Chunk, ...]:
        """Dequeues the chunks that may be shipped: in order, up to the first that the device has not computed yet.
        `one_by_one`: only the first, once the one before has been written."""
        ready = tuple(itertools.takewhile(_is_computed, self.pending))
        if all_or_none and len(ready) < len(self.pending):
            return ()
        if one_by_one:
            ready = () if self.inflight else ready[:1]
        for _ in ready:
            self.pending.popleft()
        return ready

    def is_covered(self, regions: int) -> bool:
        """Whether every block was shipped in every region, in whatever order the engine's hooks came."""
        if self.covered >= self.total_blocks:
            return True
        ends = self.covered_regions.values()
        return len(ends) == regions > 0 and min(ends) >= self.total_blocks

    def has_expired(self, now: float) -> bool:
        """Its registration has: decode counts on nothing being posted any more."""
        return self.valid_until is not None and now >= self.valid_until

    def validate(self, order: Register, since: float) -> None:
        """`order` is valid for `valid_s` from then. A late one does not shorten the validity of a newer one."""
        if self.valid_until is None and self.order is not order:
            return  # it expired, and the stream was given up for that
        self.valid_until = max(self.valid_until or 0.0, since + order.valid_s)
        if self.order is None or order.valid_s >= self.order.valid_s:  # a repeat postpones nothing
            self.registered_at, self.renew_at = since, since + _RENEW_AFTER * order.valid_s

    def note_registration(self, order: Register, peer: str, link: Link | None) -> bool:
        """A registration counts for the connection that it names. False: it names another than the one that is."""
        self.registered[peer] = max(order.epoch, self.registered.get(peer, 0))
        return link is None or self.registered[peer] == link.epoch

    def may_write(self, link: Link) -> bool:
        """Every peer has registered since this connection was made."""
        return bool(link.peers) and all(self.registered.get(peer) == link.epoch for peer in link.peers)

    def ended(self) -> EndedStream:
        """What is remembered of it."""
        receiver = self.order.receiver if self.order is not None else None
        return EndedStream(self.state, self.why, receiver, self.failed_epoch)

    def account(self, ok: bool, now: float) -> Ended:
        """What the statistics record at its end."""
        since = self.first_post_at if self.first_post_at is not None else now
        exposed = now - self.closed_at if self.closed_at is not None else 0.0
        return Ended(self.key, ok, now - since, exposed, self.why)


def _is_computed(chunk: Chunk) -> bool:
    return chunk.ready is None or bool(chunk.ready.query())


@dataclass(frozen=True)
class EndedStream:
    """Thousands are remembered: nothing here grows with the prompt."""

    state: Stream
    why: str
    receiver: tuple[str, str] | None = None  # of its registration
    failed_epoch: int = 0


class EndedStreams(OrderedDict[str, EndedStream]):
    """The last ones, by key, to answer what comes late."""

    def add(self, key: str, ended: EndedStream) -> None:
        self[key] = ended
        while len(self) > _REMEMBERED:
            self.popitem(last=False)


@dataclass
class Waiting:
    """A decode request whose blocks wait for KV. Times are monotonic seconds."""

    order: Register
    source: Endpoint
    deadline: float
    state: Inbox = Inbox.CONNECTING
    silent: bool = False  # it holds no blocks here, so the scheduler is not told how it ends
    why: str = ""
    unanswered: set[str] = field(default_factory=set)  # peers that may still WRITE
    failed: dict[str, int] = field(default_factory=dict)  # those that only failed WRITEs may come from -> connection
    registered: Counter[str] = field(default_factory=Counter)  # registrations that were sent, by peer
    refused: bool = False
    resend_s: float = RESEND_S  # doubles with each repeat
    resend_at: float = 0.0
    settled_at: float = 0.0  # posted WRITEs have ended by then, unless the peer was stopped or the link was cut
    give_up_at: float = 0.0  # without an answer by then, its peers are cut off

    def repeat_later(self, now: float) -> None:
        """After twice as long each time, a part more or less by request."""
        spread = 1 + _SPREAD * (zlib.crc32(self.order.request.encode()) / 0x7FFFFFFF - 1)
        self.resend_at = now + spread * self.resend_s
        self.resend_s = min(2 * self.resend_s, _RESEND_MAX_S)

    @property
    def awaits_failed_only(self) -> bool:
        """Nobody posts WRITEs for it any more, but parts of some that failed may land."""
        return self.state is Inbox.WITHDRAWING and self.unanswered <= self.failed.keys()


class PeerConnections:
    """Numbers of connections from peers to this process, as peers count them; 0 where none is known."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()
        self._cut: dict[str, int] = {}  # the last that is known to be cut

    def __getitem__(self, peer: str) -> int:
        return self._last.get(peer, 0)

    def made(self, peer: str, epoch: int) -> None:
        self._last[peer] = max(epoch, self._last.pop(peer, 0))
        while len(self._last) > _REMEMBERED_PEERS:  # a forgotten peer answers the next registration with `Hello`
            self._cut.pop(self._last.popitem(last=False)[0], None)

    def of(self, peers: Iterable[str]) -> frozenset[tuple[str, int]]:
        return frozenset((peer, self._last[peer]) for peer in peers if peer in self._last)

    def name_in(self, order: Register, peer: str) -> Register:
        """The registration as it goes to `peer`."""
        return msgspec.structs.replace(order, epoch=self[peer], cut=self.last_cut(peer))

    def were_cut(self, epochs: Iterable[tuple[str, int]]) -> None:
        self._cut |= {peer: epoch for peer, epoch in epochs if peer in self._last}

    def last_cut(self, peer: str) -> int:
        """Nothing that `peer` has sent over this connection and earlier ones can land any more."""
        return self._cut.get(peer, 0)


class Awaited(NamedTuple):
    """A peer (an agent name) of `engine` that the engine `here` waits for."""

    engine: str
    peer: str
    here: str


class Pings:
    """Signs of life that decode asks for while it waits. A message over a connection that has just broken is lost, and
    only the next one raises an error. Should none ever do, the end that is not heard makes its connection anew."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._unanswered: dict[tuple[str, str], int] = {}  # by engine and peer that was awaited the last time

    def due(self, awaited: Iterable[Awaited], engines: Container[str], now: float) -> list[Send | Renew]:
        """What to do for those that are awaited now. `engines`: all that requests here wait for, those included that
        are being connected, whose counts are kept."""
        if now < self._next_at:
            return []
        self._next_at = now + _PING_EVERY_S
        before = self._unanswered
        self._unanswered = {key: count for key, count in before.items() if key[0] in engines}
        actions: list[Send | Renew] = []
        for engine, peer, here in sorted(set(awaited)):
            if (count := before.get((engine, peer))) is not None:
                actions.append(Send(engine, peer, Ping(here, count)))
                # Then after twice as many: a handshake with an engine that is stopped takes seconds.
                if count >= _SILENT and count.bit_count() == 1:
                    actions.append(Renew(engine, f"no answer to {count} pings"))
            self._unanswered[engine, peer] = 0 if count is None else count + 1
        return actions

    def answered(self, peer: str) -> None:
        """It has sent something."""
        self._unanswered |= {key: 0 for key in self._unanswered if key[1] == peer}


class Pongs:
    """Prefill's answers."""

    def __init__(self) -> None:
        # How many in a row without a sign that they arrive, and when the last one was counted, by decode engine and
        # peer, over the present connection.
        self._sent: dict[str, dict[str, tuple[int, float]]] = {}

    def made(self, engine: str) -> None:
        """It is connected anew."""
        self._sent[engine] = {}

    def forget(self, engine: str) -> None:
        self._sent.pop(engine, None)

    def answer(self, ping: Ping, peer: str, now: float, writes: bool) -> list[Tell | Renew]:
        """Nothing without a connection: the registration that decode repeats makes one. `writes`: WRITEs to that engine
        are under way, behind which answers wait. Answers to pings that came together count as one."""
        if (sent := self._sent.get(ping.engine)) is None:
            return []
        count, counted_at = sent.get(peer, (0, -_PING_EVERY_S))
        if not writes and min(count, ping.unanswered) >= _SILENT:
            return [Renew(ping.engine, f"the last {count} answers did not arrive")]
        if writes or not ping.unanswered:
            count = 0
        if not writes and now - counted_at >= _PING_EVERY_S / 2:
            count, counted_at = count + 1, now
        sent[peer] = (count, counted_at)
        return [Tell(ping.engine, Pong(), peer)]
