"""KV transfer of the simulated engine: carries out the actions of the real engine's state machines.

These are `Inbound` and `Outbound`; for vLLM `PushScheduler` and `PushWorker` do the same. Only the WRITEs are modelled:
they take as long as their bytes take over a link that carries one WRITE after another. `scheduler.py` owns the blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from connectors.push import actions as do
from connectors.push import inbound, outbound, wire
from orchestrator.config.settings import KVConfig
from orchestrator.policy.predict.estimates import LINK_AGE_S, RecentMaximum
from orchestrator.types import KVCounters, KVEndpoint, KVSource
from workers.engine import Phase, link_rate
from workers.sim.connections import SimConnections
from workers.sim.request import SimRequest
from workers.sim.scheduler import SimScheduler

log = logging.getLogger("pd.sim")

_TICK_S = 0.1
_TICKS_PER_TIMEOUT = 10  # at least: decode must hear of a long prefill before its registration expires


class SimTransfers:
    def __init__(self, scheduler: SimScheduler, kv: KVConfig, engine_id: str, wake: Callable[[], None]) -> None:
        """`wake` is called whenever blocks or requests have become available to the scheduler."""
        self._scheduler, self._kv, self._wake = scheduler, kv, wake
        self._connections = SimConnections(engine_id, self)
        self._inbound = inbound.Inbound(kv.transfer_timeout_s)
        self._outbound = outbound.Outbound(kv.transfer_timeout_s)
        self._here = wire.Endpoint(engine_id, "", 0)
        self._tick_s = min(_TICK_S, kv.transfer_timeout_s / _TICKS_PER_TIMEOUT)
        self._tick_timer: asyncio.TimerHandle | None = None
        self._handles = itertools.count(1)
        self._writes: dict[int, asyncio.TimerHandle] = {}  # timers of the WRITEs in flight, by handle
        self._link_free_at = 0.0
        self._bytes_sent = self._transfers = self._failures = self._bad_messages = 0
        self._transfer_s = 0.0
        self._link_bytes_per_s = RecentMaximum(LINK_AGE_S)

    async def listen(self, host: str, port: int, advertise: str) -> int:
        """Listen for peers, which connect to `advertise`. Returns the port. Raises OSError."""
        port = await self._connections.listen(host, port)
        self._here = wire.Endpoint(self._here.engine_id, advertise, port)
        return port

    async def close(self) -> None:
        for timer in [*self._writes.values(), self._tick_timer]:
            if timer is not None:
                timer.cancel()
        await self._connections.close()

    def counters(self) -> KVCounters:
        return KVCounters(
            bytes_sent=self._bytes_sent,
            transfers=self._transfers,
            transfer_s=self._transfer_s,
            failures=self._failures,
            bad_messages=self._bad_messages,
            withdrawing_blocks=self._inbound.withdrawing_blocks,
            link_bytes_per_s=self._link_bytes_per_s.at(time.monotonic()),
        )

    # ---- from the engine ---------------------------------------------------------------------------------------

    def receive(self, request: SimRequest) -> None:
        """Ask for the KV of a request whose blocks are reserved."""
        source = request.kv_source
        if source is None:
            raise RuntimeError(f"simulated request {request.key} awaits KV from nowhere")
        # The simulated engine counts blocks and has no block ids: positions serve as ids.
        blocks = list(range(self._scheduler.blocks_for(len(request.prompt))))
        order = wire.Register(source.key, request.key, self._here, [blocks], len(request.prompt))
        self._carry_out(self._inbound.register(order, _endpoint(source), time.monotonic()))

    def start(self, request: SimRequest) -> None:
        """Called when a prefill is scheduled for the first time."""
        tokens = len(request.prompt)
        now = time.monotonic()
        self._carry_out(self._outbound.start(request.key, self._scheduler.blocks_for(tokens), tokens, now))

    def lend(self, key: str, tokens: int) -> None:
        """Push so many cached tokens to whoever asks for `key`; 0: they are not cached. The cache has keys only, so
        nothing is kept from eviction."""
        now = time.monotonic()
        if not tokens:
            self._carry_out(self._outbound.abort(key, False, "the prefix is not cached", now))
            return
        blocks = self._scheduler.blocks_for(tokens)
        self._carry_out(self._outbound.start(key, blocks, tokens, now, lent=True))
        self._carry_out(self._outbound.finish(key, now))
        self._carry_out(self._outbound.computed(key, [do.Chunk(0, (tuple(range(blocks)),))], 0, True, now))

    def computed(self, requests: Iterable[SimRequest], began: float, now: float) -> None:
        """Push the new blocks after a step over these requests. By layers, the WRITEs have begun with the step."""
        writes_from = began if self._kv.transfer in ("auto", "layer") else now
        self._carry_out(self._outbound.stepped(now))
        for request in requests:
            if request.phase is Phase.PREFILL and not request.left:
                self._ship(request, writes_from, now)

    def _ship(self, request: SimRequest, writes_from: float, now: float) -> None:
        total = self._scheduler.blocks_for(len(request.prompt))
        closed, stay = request.sampled > 0, request.stay
        if self._kv.transfer == "whole" and not closed:
            return
        full = total if closed else min(stay.computed // self._scheduler.profile.block_size, total)
        start = request.pushed[0] if request.pushed[1] == stay.epoch else 0
        request.pushed = full, stay.epoch
        chunks = [do.Chunk(start, (tuple(range(start, full)),))] if full > start else []
        if chunks or closed:
            follows = self._outbound.computed(request.key, chunks, stay.epoch, closed, now)
            self._carry_out(follows, writes_from)
        if closed:
            self._carry_out(self._outbound.finish(request.key, now))

    def end(self, request: SimRequest, why: str) -> None:
        """Abort a request: free its blocks at once, or as soon as no transfer can touch them."""
        now, source = time.monotonic(), request.kv_source
        if request.left:
            return
        if request.stay in self._scheduler.receiving:
            self._scheduler.withdraw(request)
            self._carry_out(self._inbound.withdraw(request.key, why, now))
        elif request.phase is Phase.PREFILL:
            self._carry_out(self._outbound.abort(request.key, self._scheduler.withdraw(request), why, now))
        else:
            self._scheduler.forget(request)
            if source is not None:
                order = wire.Unregister(source.key, request.key, self._here)
                self._carry_out(self._inbound.release_unused(order, _endpoint(source), now))

    def fail_peer(self, engine: str) -> None:
        """Called when the fleet has found `engine` dead."""
        now = time.monotonic()
        self._carry_out(self._inbound.declared_dead(engine, now))
        self._carry_out(self._outbound.declared_dead(engine, now))

    def meet(self, peer: KVEndpoint) -> None:
        self._carry_out([do.Connect(msgspec.convert(peer, wire.Endpoint, from_attributes=True))])

    # ---- from the connections ----------------------------------------------------------------------------------

    def connected(self, engine: str) -> None:
        now = time.monotonic()
        self._carry_out(self._inbound.connected(engine, (engine,), now))
        self._carry_out(self._outbound.connected(engine, True, (engine,), now))

    def unreachable(self, engine: str, why: str) -> None:
        now = time.monotonic()
        self._carry_out(self._inbound.unreachable(engine, why, now))
        self._carry_out(self._outbound.unreachable(engine, why, now))

    def lost(self, engine: str) -> None:
        self.fail_peer(engine)
        self._inbound.forget(engine)
        self._outbound.forget(engine)

    def received(self, engine: str, data: bytes) -> None:
        now = time.monotonic()
        try:
            message = wire.parse(data)
        except wire.WireError as error:
            log.warning("KV message from %s dropped: %s", engine, error)
            self._bad_messages += 1
            return
        match message:
            case wire.Register():
                self._carry_out(self._outbound.register(message, engine, now))
            case wire.Unregister():
                self._carry_out(self._outbound.unregister(message, engine, now))
            case wire.Hello(epoch=epoch):
                self._carry_out(self._inbound.hello(engine, epoch, now))
            case wire.Computing(request=request):
                self._carry_out(self._inbound.computing(request, engine, now))
            case wire.Landed(request=request):
                self._carry_out(self._inbound.landed(request, engine, now))
            case wire.Gone(request=request, why=why, failed_epoch=failed_epoch):
                self._carry_out(self._inbound.gone(request, engine, why, now, failed_epoch))

    # ---- what follows ------------------------------------------------------------------------------------------

    def _carry_out(self, follows: Sequence[inbound.Action | outbound.Action], writes_from: float | None = None) -> None:
        for action in follows:
            match action:
                case do.Connect(peer=peer):
                    self._connections.connect(peer)
                case do.Renew(engine=engine):  # what carries simulated messages connects anew by itself
                    self._carry_out(self._outbound.connected(engine, True, (engine,), time.monotonic()))
                case do.Send(engine=engine, peer=peer, message=message):
                    if not self._connections.send(engine, message):
                        self._carry_out(self._inbound.unsendable(engine, peer, message, time.monotonic()))
                case do.Tell(engine=engine, message=message):
                    self._connections.send(engine, message)
                case do.Post():
                    self._post(action, writes_from)
                case do.Ended():
                    self._account(action)
                case do.Cut():  # simulated WRITEs touch no memory
                    self._carry_out(self._inbound.cut_off(action, time.monotonic()))
                case do.Finish():
                    self._received_or_not(action)
                case do.Release(stream=stream):
                    if request := self._scheduler.requests.get(stream):
                        self._scheduler.forget(request)
                    self._wake()
        if self._tick_timer is None and (self._inbound.busy or self._outbound.busy):
            self._tick_timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick_soon)

    def _post(self, post: do.Post, writes_from: float | None) -> None:
        profile, now = self._scheduler.profile, time.monotonic()
        size = profile.block_size
        ranges = [(chunk.start * size, (chunk.start + len(chunk.blocks[0])) * size) for chunk in post.chunks]
        tokens = sum(min(end, post.order.prompt_tokens) - start for start, end in ranges)
        size_bytes = tokens * profile.kv_bytes_per_token
        self._bytes_sent += size_bytes
        seconds = size_bytes / profile.link_bytes_per_s
        self._link_bytes_per_s.observe(link_rate(size_bytes, seconds), now)
        self._link_free_at = max(self._link_free_at, writes_from or now) + seconds
        handle = next(self._handles)
        self._outbound.posted(post.stream, handle, now)
        self._writes[handle] = asyncio.get_running_loop().call_later(
            self._link_free_at - now, self._written, post.stream, handle, post.order.decode.engine_id
        )

    def _written(self, stream: str, handle: int, engine: str) -> None:
        del self._writes[handle]
        ok = self._connections.is_connected(engine)
        self._carry_out(self._outbound.written(stream, handle, ok, time.monotonic()))

    def _account(self, ended: do.Ended) -> None:
        if ended.ok:
            self._transfers += 1
            self._transfer_s += ended.seconds
        else:
            log.warning("KV of %s was not pushed: %s", ended.stream, ended.why)
            self._failures += 1

    def _received_or_not(self, finish: do.Finish) -> None:
        request = self._scheduler.requests[finish.request]
        if request.left:
            self._scheduler.forget(request)
        else:
            if not finish.ok:
                log.warning("%s is prefilled here: %s", request.key, finish.why)
                self._failures += 1
            self._scheduler.kv_came(request, finish.ok)
        self._wake()

    def _tick_soon(self) -> None:
        """Tick after the messages that have arrived: if the process was stalled, they count before deadlines do."""
        self._tick_timer = asyncio.get_running_loop().call_later(0.0, self._tick)

    def _tick(self) -> None:
        self._tick_timer = None
        now = time.monotonic()
        self._carry_out(self._inbound.tick(now))
        self._carry_out(self._outbound.tick(now))


def _endpoint(source: KVSource) -> wire.Endpoint:
    return msgspec.convert(source.endpoint, wire.Endpoint, from_attributes=True)
