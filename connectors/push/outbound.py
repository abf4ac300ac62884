"""The prefill end of one worker's KV transfers: which computed blocks go to whom, and when they may be freed.

Each method reports an event at time `now` (monotonic seconds) and returns the actions that follow, in order. There is
no NIXL, no thread and no clock here. The promises: decode hears `Landed` only after every WRITE of the last epoch is
done, and `Gone` only when none is in flight, with the connection on which one failed; the scheduler gets its blocks
back exactly once.
"""

from __future__ import annotations

from typing import Any, Union

from connectors.push.actions import Chunk, Connect, Ended, Post, Release, Renew, Tell
from connectors.push.blocks.room import YIELD_S, in_the_way
from connectors.push.records import EndedStream, EndedStreams, Links, PushStream
from connectors.push.states import STREAM, STREAM_ENDS, Stream, StreamEvent
from connectors.push.wire import Computing, Gone, Hello, Landed, Message, Register, Unregister

_RENEW_AGAIN_S = 1.0  # while no answer comes
_RUN_OUT = "decode has given up by now"
_LENT_S = 5.0  # for a prefix that is lent: who asked for it has given up by then (`policy/decode_choice.py`)
_HURRY_S = 5.0  # a WRITE that lasts longer after its stream was given up may never end

Action = Union[Connect, Renew, Post, Tell, Release, Ended]


class Outbound:
    """Streams of one prefill worker rank, by request id."""

    def __init__(self, timeout_s: float, hello: Hello = Hello(0)) -> None:
        """`timeout_s`: for which either end waits for the other, and keeps its blocks. `hello`: what decode engines are
        told with the number of each connection."""
        self.regions = 0  # of NIXL, in which a block has its layers
        self._timeout_s = timeout_s
        self._stepped_at = self._yield_at = 0.0
        self._unbegun: set[str] = set()  # prefills that the engine has, and has not scheduled yet
        self._streams: dict[str, PushStream] = {}
        self._links = Links(hello)
        self._ended = EndedStreams()

    @property
    def busy(self) -> bool:
        return bool(self._streams)

    @property
    def awaits_writes(self) -> bool:
        """Whether a stream waits for WRITEs in flight to end."""
        waits = (Stream.FLUSHING, Stream.DRAINING)
        return any(stream.state in waits and not stream.may_never_end for stream in self._streams.values())

    @property
    def is_writing(self) -> bool:
        """Whether WRITEs are in flight that will end soon."""
        return any(stream.inflight and not stream.may_never_end for stream in self._streams.values())

    @property
    def awaits_device(self) -> bool:
        """Whether chunks wait until the device has computed them."""
        return any(stream.awaits_device for stream in self._streams.values())

    def engines(self) -> set[str]:
        return {stream.order.decode.engine_id for stream in self._streams.values() if stream.order is not None}

    # ---- from the scheduler ------------------------------------------------------------------------------------

    def arrived(self, key: str, now: float) -> list[Action]:
        """The engine has a prefill, which it has not scheduled yet."""
        self._unbegun.add(key)
        return []

    def start(self, key: str, total_blocks: int, prompt_tokens: int, now: float, lent: bool = False) -> list[Action]:
        """The prefill was scheduled for the first time. `lent`: there is none, it is a prefix from the cache."""
        stream = self._streams.get(key)
        if stream is None:
            ended = self._ended.pop(key, None)
            state = ended.state if ended else Stream.COMPUTING  # withdrawn before it began
            stream = self._streams[key] = PushStream(key, state, why=ended.why if ended else "")
        self._unbegun.discard(key)
        stream.total_blocks, stream.prompt_tokens, stream.computing = total_blocks, prompt_tokens, True
        stream.lent, stream.lease_s = lent, min(self._timeout_s, _LENT_S) if lent else self._timeout_s
        actions = self._apply(stream, StreamEvent.START, now, "")
        return actions + self._check(stream, now)

    def computed(self, key: str, chunks: list[Chunk], epoch: int, closed: bool, now: float) -> list[Action]:
        """More blocks hold KV. A new epoch means that the prefill was preempted and started again."""
        stream = self._streams.get(key)
        if stream is None or stream.state in STREAM_ENDS or stream.state is Stream.DRAINING or epoch < stream.epoch:
            return []
        if epoch > stream.epoch:
            self.preempted(key, epoch, now)
        for chunk in chunks:
            stream.add(chunk)
        if not closed:
            return self._pump(stream, now)
        stream.closed_at = now
        if not stream.is_covered(self.regions):
            why = f"only {stream.covered} of {stream.total_blocks} blocks were shipped"
            return self._apply(stream, StreamEvent.GIVE_UP, now, why)
        return self._apply(stream, StreamEvent.CLOSE, now, "") + self._pump(stream, now)

    def preempted(self, key: str, epoch: int, now: float) -> list[Action]:
        """The prefill lost its blocks and starts again. WRITEs in flight may read blocks of other requests."""
        if (stream := self._streams.get(key)) is None or epoch <= stream.epoch:
            return []
        stream.restart(epoch, now)
        return self._apply(stream, StreamEvent.PREEMPTED, now, "")

    def stepped(self, now: float) -> list[Action]:
        """The engine has taken a step, so its prefills are still running."""
        self._stepped_at = now
        return []

    def device_worked(self, now: float) -> list[Action]:
        """The device may have computed chunks that were not ready. Call it often while `awaits_device`."""
        streams = [stream for stream in self._streams.values() if stream.pending]
        return [action for stream in streams for action in self._pump(stream, now)]

    def finish(self, key: str, now: float) -> list[Action]:
        """The prefill ended well and the scheduler holds its blocks until `Release`."""
        if (stream := self._streams.get(key)) is None:
            return [Release(key)]
        stream.held, stream.computing = True, False
        if stream.state in STREAM_ENDS:
            return self._end(stream)
        return self._release_early(stream)

    def abort(self, key: str, held: bool, why: str, now: float) -> list[Action]:
        """The prefill failed or was aborted. `held`: the scheduler keeps its blocks until `Release`."""
        self._unbegun.discard(key)
        if (stream := self._streams.get(key)) is None:
            self._ended.add(key, EndedStream(Stream.DROPPED, why))
            return [Release(key)] if held else []
        stream.held, stream.computing = held, False
        if stream.state in STREAM_ENDS:
            return self._end(stream)
        return self._apply(stream, StreamEvent.GIVE_UP, now, why) + self._release_early(stream)

    # ---- from the network --------------------------------------------------------------------------------------

    def register(self, order: Register, peer: str, now: float, since: float | None = None) -> list[Action]:
        """`since`: when it may have come, which its validity counts from; by default now."""
        key, since = order.stream, now if since is None else since
        stream = self._streams.get(key)
        if (ended := self._ended_as(key)) is not None:
            return self._answer_late(order, peer, ended)
        if stream is None:
            deadline = now + min(self._timeout_s, order.valid_s)
            stream = self._streams[key] = PushStream(key, Stream.EXPECTED, deadline=deadline, order=order)
            stream.validate(order, since)
            return self._check_link(stream, order, peer)
        if stream.order is not None:
            if stream.order.receiver == order.receiver:  # again, or from the other ranks of the same decode engine
                stream.validate(order, since)
                return self._check_link(stream, order, peer) + self._pump(stream, now)
            return self._refuse(order, peer, "another decode engine has registered")
        if stream.state is Stream.DRAINING:
            return self._refuse(order, peer, stream.why or "the prefill has ended")
        stream.order = order
        stream.validate(order, since)
        actions = self._check_link(stream, order, peer) + self._apply(stream, StreamEvent.REGISTER, now, "")
        return actions + self._check(stream, now) + self._pump(stream, now)

    def unregister(self, order: Unregister, peer: str, now: float) -> list[Action]:
        """Decode withdraws. It is answered in any case, once no WRITE is in flight or to come."""
        key = order.stream
        stream = self._streams.get(key)
        answer = Register(key, order.request, order.decode, [], 0)
        if stream is None and key not in self._ended:
            # Remembered for a registration that arrives after this message, and for a prefill that has not begun.
            self._ended.add(key, EndedStream(Stream.DROPPED, "withdrawn by decode"))
        if (ended := self._ended_as(key)) is not None:
            return self._answer_late(answer, peer, ended)
        assert stream is not None
        if stream.order is not None and stream.order.receiver != answer.receiver:
            return self._refuse(answer, peer, "withdrawn")
        stream.order = stream.order or answer
        actions = self._connect(answer)
        return actions + self._apply(stream, StreamEvent.GIVE_UP, now, "withdrawn by decode")

    def connected(self, engine: str, chunkwise: bool, peers: tuple[str, ...], now: float) -> list[Action]:
        hello = self._links.made(engine, chunkwise, peers).hello
        return [Tell(engine, hello), *(action for stream in self._to(engine) for action in self._pump(stream, now))]

    def unreachable(self, engine: str, why: str, now: float) -> list[Action]:
        return self._give_up_all(engine, f"decode engine {engine} is unreachable: {why}", now)

    def writes_to(self, engine: str) -> bool:
        return any(stream.inflight for stream in self._to(engine))

    def forget(self, engine: str) -> None:
        """The connection was dropped: it was unused, or the link is cut. The next stream connects again."""
        self._links.pop(engine, None)

    def posted(self, key: str, handle: Any, now: float) -> None:
        stream = self._streams[key]
        stream.inflight[handle] = stream.epoch
        stream.first_post_at = now if stream.first_post_at is None else stream.first_post_at

    def written(self, key: str, handle: Any, ok: bool, now: float) -> list[Action]:
        """A WRITE has ended and its handle is released."""
        if (stream := self._streams.get(key)) is None or stream.inflight.pop(handle, None) is None:
            return []
        if not ok:
            stream.failed_epoch = stream.posted_over
            return self._apply(stream, StreamEvent.GIVE_UP, now, "a WRITE failed") + self._pump(stream, now)
        return self._pump(stream, now)

    def failed(self, key: str, why: str, now: float) -> list[Action]:
        """Give this stream up: a WRITE could not be posted, or no decode engine wants it."""
        stream = self._streams.get(key)
        return self._apply(stream, StreamEvent.GIVE_UP, now, why) if stream is not None else []

    def declared_dead(self, engine: str, now: float) -> list[Action]:
        """The fleet says so. `Gone` still waits until the WRITEs in flight have ended, in case the engine lives after
        all: it may be cut off from here only, and they land once it is not. Meanwhile they hold no blocks."""
        return self._give_up_all(engine, f"decode engine {engine} is dead", now)

    def tick(self, now: float) -> list[Action]:
        """Enforces leases and deadlines. Call it at least every second while `busy`."""
        actions: list[Action] = []
        for stream in list(self._streams.values()):
            if stream.deadline is not None and now >= stream.deadline:
                leased = stream.state is Stream.LEASED  # a draining stream stays as it is
                why = f"decode did not register within {stream.lease_s:g} s" if leased else "the prefill never came"
                stream.deadline = None
                actions += self._apply(stream, StreamEvent.GIVE_UP, now, why)
            if stream.has_expired(now):
                stream.valid_until = None
                actions += self._apply(stream, StreamEvent.GIVE_UP, now, _RUN_OUT)
            if stream.computing and stream.state is Stream.STREAMING and now >= stream.renew_at:
                actions += self._renew(stream, now)
        kept = in_the_way(self._streams.values(), self._unbegun, self._stepped_at, now)
        if kept is not None and now >= self._yield_at:
            self._yield_at = now + YIELD_S
            actions += self._apply(kept, StreamEvent.GIVE_UP, now, "a prompt that decode waits for needs its room")
            actions.append(kept.account(False, now))  # so that the other ranks give it up too
        return actions

    # ---- inside ------------------------------------------------------------------------------------------------

    def _to(self, engine: str) -> list[PushStream]:
        return [s for s in self._streams.values() if s.order is not None and s.order.decode.engine_id == engine]

    def _give_up_all(self, engine: str, why: str, now: float) -> list[Action]:
        self._links.pop(engine, None)
        return [action for stream in self._to(engine) for action in self._apply(stream, StreamEvent.GIVE_UP, now, why)]

    def _renew(self, stream: PushStream, now: float) -> list[Action]:
        if self._stepped_at <= stream.registered_at:
            return []  # no step since then: the engine may hang, so the registration is not renewed
        assert stream.order is not None
        stream.renew_at = now + _RENEW_AGAIN_S
        return [Tell(stream.order.decode.engine_id, Computing(stream.order.request))]

    def _connect(self, order: Register) -> list[Action]:
        return [] if order.decode.engine_id in self._links else [Connect(order.decode)]

    def _check_link(self, stream: PushStream, order: Register, peer: str) -> list[Action]:
        """Ask again for a registration that names another connection than the present one. If decode has cut that one,
        another is made, for which it registers again."""
        link = self._links.get(order.decode.engine_id)
        names_it = stream.note_registration(order, peer, link)
        if link is not None and link.epoch <= order.cut:
            del self._links[order.decode.engine_id]
            return [Renew(order.decode.engine_id, "decode has cut it")]
        if names_it or link is None:
            return self._connect(order)
        return [Tell(order.decode.engine_id, link.hello, peer)]

    def _refuse(self, order: Register, peer: str, why: str, failed_epoch: int = 0) -> list[Action]:
        return [*self._connect(order), Tell(order.decode.engine_id, Gone(order.request, why, failed_epoch), peer)]

    def _check(self, stream: PushStream, now: float) -> list[Action]:
        """Give up if the blocks of the two ends would not match."""
        return self._apply(stream, StreamEvent.GIVE_UP, now, why) if (why := stream.misfit) else []

    def _pump(self, stream: PushStream, now: float) -> list[Action]:
        """Post the chunks that may be posted, and end the stream when everything is done."""
        if stream.state is Stream.DRAINING:
            return [] if stream.inflight else self._apply(stream, StreamEvent.DRAINED, now, "")
        order = stream.order
        link = self._links.get(order.decode.engine_id) if order is not None else None
        if stream.state not in (Stream.STREAMING, Stream.FLUSHING) or order is None or link is None:
            return []
        if stream.pending and (link.chunkwise or stream.state is Stream.FLUSHING):
            if not stream.may_write(link):
                return []
            # The epoch fence: a WRITE posted before the preemption must not land on top of a newer one.
            if any(epoch < stream.epoch for epoch in stream.inflight.values()):
                return []
            if stream.has_expired(now):
                return self._apply(stream, StreamEvent.GIVE_UP, now, _RUN_OUT)
            beside_pushes = stream.lent and not all(other.lent for other in self._streams.values())
            if not (chunks := stream.take_ready(not link.chunkwise, one_by_one=beside_pushes and link.chunkwise)):
                return []
            stream.posted_over = link.epoch
            return [Post(stream.key, order, chunks, stream.total_blocks)]
        if stream.state is Stream.FLUSHING and not stream.pending and not stream.inflight:
            return self._apply(stream, StreamEvent.FLUSHED, now, "")
        return []

    def settle(self, key: str, now: float) -> list[Action]:
        """A `Post` needed no WRITE, so the stream may be complete."""
        stream = self._streams.get(key)
        return self._pump(stream, now) if stream is not None else []

    def _apply(self, stream: PushStream, event: StreamEvent, now: float, why: str) -> list[Action]:
        after = STREAM.get((stream.state, event))
        if after is None:
            return []
        stream.state = after
        stream.why = stream.why or why
        stream.deadline = now + stream.lease_s if after is Stream.LEASED else None
        if after is Stream.DRAINING:
            stream.pending.clear()
            stream.deadline = now + _HURRY_S
            return self._release_early(stream) + self._pump(stream, now)
        if after not in STREAM_ENDS:
            return []
        ok = after is Stream.LANDED
        actions: list[Action] = []
        if (order := stream.order) is not None:
            message: Message = Landed(order.request) if ok else Gone(order.request, stream.why, stream.failed_epoch)
            actions += [Tell(order.decode.engine_id, message), stream.account(ok, now)]
        return actions + ([] if stream.computing else self._end(stream))

    def _release_early(self, stream: PushStream) -> list[Action]:
        """The blocks of a stream given up: its WRITEs in flight, which may never end, only read them."""
        if stream.state is not Stream.DRAINING or not stream.held:
            return []
        stream.held = False
        return [Release(stream.key)]

    def _end(self, stream: PushStream) -> list[Action]:
        del self._streams[stream.key]
        self._ended.add(stream.key, stream.ended())
        return [Release(stream.key)] if stream.held else []

    def _ended_as(self, key: str) -> EndedStream | None:
        """How a stream has ended, also if its prefill still runs."""
        if (stream := self._streams.get(key)) is None:
            return self._ended.get(key)
        return stream.ended() if stream.state in STREAM_ENDS else None

    def _answer_late(self, order: Register, peer: str, ended: EndedStream) -> list[Action]:
        """Answer a message about an ended stream: `Landed` again if the KV landed for this receiver, else `Gone`."""
        mine = ended.receiver == order.receiver
        if mine and ended.state is Stream.LANDED:
            return [*self._connect(order), Tell(order.decode.engine_id, Landed(order.request), peer)]
        return self._refuse(order, peer, ended.why or "the prefill has ended", ended.failed_epoch if mine else 0)
