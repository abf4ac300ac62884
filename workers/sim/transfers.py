"""KV hand-over of the simulated engine, both halves: what it pushes and what it waits for.

Decides how long bytes take over the modelled link and when blocks may be freed: never while a write could still touch
them, always in bounded time. `link` carries the messages, `scheduler` owns the blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from orchestrator.config.settings import KVConfig
from orchestrator.types import KVSource
from workers.engine import Phase
from workers.sim.link import Computing, Peer, Register, Settled, SimLink, Withdraw
from workers.sim.scheduler import SimRequest, SimScheduler, SimState

log = logging.getLogger("pd.sim")

_ENDED_REMEMBERED = 10_000


class _Push:
    """Sending half of one request. Exists from registration or the end of prefill, whichever is first."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.receiver: Peer | None = None
        self.receiver_id = ""
        self.unwanted = False  # withdrawn, or the receiver died: nobody will ask again
        self.began_at: float | None = None
        self.lands_at = 0.0  # when all bytes handed to the link so far have arrived
        self.timer: asyncio.TimerHandle | None = None


class _Receive:
    """Receiving half of one request, from reserving its blocks until no write can touch them."""

    def __init__(self, request: SimRequest, source: KVSource, timer: asyncio.TimerHandle) -> None:
        self.request, self.source, self.timer = request, source, timer


class SimTransfers:
    def __init__(self, scheduler: SimScheduler, kv: KVConfig, engine_id: str, wake: Callable[[], None]) -> None:
        """`wake` is called whenever blocks or requests became available to the scheduler."""
        self._scheduler, self._kv, self._engine_id, self._wake = scheduler, kv, engine_id, wake
        self._link = SimLink(
            engine_id, self._on_message, self._on_receiver_lost, self._on_settled, on_computing=self._on_computing
        )
        self._pushes: dict[str, _Push] = {}
        self._receives: dict[str, _Receive] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._link_free_at = 0.0
        self.bytes_sent = 0
        self.completed = 0
        self.seconds = 0.0
        self.failures = 0

    async def listen(self, host: str, port: int) -> int:
        return await self._link.listen(host, port)

    async def close(self) -> None:
        for timer in [p.timer for p in self._pushes.values()] + [r.timer for r in self._receives.values()]:
            if timer is not None:
                timer.cancel()
        self._pushes.clear()
        self._receives.clear()
        await self._link.close()

    # ---- either half -------------------------------------------------------------------------------------------

    def end(self, request: SimRequest, why: str) -> None:
        """Abort: free its blocks at once, or as soon as no transfer can touch them."""
        if request.state is SimState.LEAVING:
            return
        if request.state is SimState.AWAITING_KV and request.kv_source is not None:
            self._scheduler.leave(request)
            self._link.withdraw(request.kv_source.key, request.kv_source.endpoint)
        elif request.phase is Phase.PREFILL:
            self._scheduler.leave(request)
            push = self._pushes.get(request.key)
            self._after_landing(push or _Push(request.key), lambda p: self._close(p, arrived=False, why=why))
        else:
            self._scheduler.free(request)

    def forget(self, key: str) -> None:
        """Abort of a request that is not here: who registered for it gets no KV."""
        if key in self._pushes and key not in self._scheduler.requests:
            self._close(self._pushes[key], arrived=False, why="aborted")

    def fail_peer(self, engine_id: str) -> None:
        self._link.fail_sender(engine_id)
        for push in list(self._pushes.values()):
            if push.receiver_id == engine_id and not push.unwanted:
                self._receiver_gone(push)

    # ---- sending -----------------------------------------------------------------------------------------------

    def computed(self, requests: Iterable[SimRequest], began: float, now: float) -> None:
        """A step over these ended: hand what is new to the link. Layer-wise pushing overlaps with the step itself."""
        for request in requests:
            if request.phase is Phase.PREFILL:
                self._advance(request, began if self._kv.transfer == "layer" else now)

    def _advance(self, request: SimRequest, since: float) -> None:
        ended = request.state is SimState.PUSHING
        if request.state is not SimState.RUNNING and not ended:
            return
        push = self._pushes.get(request.key)
        if push is None:
            if not ended:
                return
            push = self._pushes[request.key] = _Push(request.key)
        if push.unwanted:
            if ended and push.timer is None:  # else `_let_go` is on its way
                self._give_up(push, "unwanted")
            return
        if push.receiver is None:
            if ended and push.timer is None:
                self._later(push, self._kv.transfer_timeout_s, lambda p: self._give_up(p, "nobody asked for it"))
            return
        total = len(request.prompt)
        ready = total if ended else 0 if self._kv.transfer == "whole" else min(request.computed, total)
        if ready > request.pushed:
            self._write(push, (ready - request.pushed) * self._scheduler.config.kv_bytes_per_token, since)
            request.pushed = ready
        if ended:
            self._after_landing(push, self._deliver)

    def _write(self, push: _Push, size_bytes: int, since: float) -> None:
        config = self._scheduler.config
        starts_at = max(self._link_free_at, since)
        self._link_free_at = push.lands_at = starts_at + size_bytes / (config.link_gb_per_s * 1e9) / config.speed
        push.began_at = push.began_at or starts_at
        self.bytes_sent += size_bytes

    def _deliver(self, push: _Push) -> None:
        if push.receiver is not None:
            self.completed += 1
            self.seconds += push.lands_at - (push.began_at or push.lands_at)
        self._close(push, arrived=True)

    def _give_up(self, push: _Push, why: str) -> None:
        if not push.unwanted:
            self.failures += 1
        self._close(push, arrived=False, why=why)

    def _close(self, push: _Push, arrived: bool, why: str = "") -> None:
        if push.timer is not None:
            push.timer.cancel()
        self._pushes.pop(push.key, None)
        self._ended[push.key] = None
        if len(self._ended) > _ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        if push.receiver is not None:
            push.receiver.send(Settled(push.key, arrived, why))
        if request := self._scheduler.requests.get(push.key):
            self._scheduler.free(request)
        self._wake()

    def _on_message(self, peer: Peer, message: Register | Withdraw) -> None:
        if isinstance(message, Withdraw):
            self._withdrawn(peer, message)
            return
        request, push = self._scheduler.requests.get(message.key), self._pushes.get(message.key)
        refusal = None
        if message.engine_id != self._engine_id:
            refusal = f"engine {message.engine_id} is gone, {self._engine_id} is here"
        elif message.key in self._ended or (push is not None and push.unwanted):
            refusal = "its KV was released"
        elif push is not None and push.receiver is not None:
            refusal = "another receiver has registered"
        elif request is not None and (request.phase is not Phase.PREFILL or request.state is SimState.LEAVING):
            refusal = "it is not being prefilled"
        if refusal is not None:
            peer.send(Settled(message.key, arrived=False, why=refusal))
            return
        if push is None:
            push = self._pushes[message.key] = _Push(message.key)
        elif push.timer is not None:
            push.timer.cancel()
            push.timer = None
        push.receiver, push.receiver_id = peer, message.receiver_id
        if request is not None:
            self._advance(request, time.monotonic())
        else:
            self._later(push, self._kv.transfer_timeout_s, self._expire_unknown)

    def _expire_unknown(self, push: _Push) -> None:
        if push.key not in self._scheduler.requests:
            self._give_up(push, "it was never prefilled")

    def _withdrawn(self, peer: Peer, message: Withdraw) -> None:
        push, request = self._pushes.get(message.key), self._scheduler.requests.get(message.key)
        if push is None or push.receiver is not peer:
            peer.send(Settled(message.key, arrived=False, why="withdrawn"))
            return
        if message.unless_computing and request is not None and request.state in (SimState.WAITING, SimState.RUNNING):
            peer.send(Computing(message.key))
            return
        push.unwanted = True
        self._after_landing(push, self._let_go)

    def _let_go(self, push: _Push) -> None:
        """Nothing is in flight to a receiver that withdrew. A prefill that still computes ends when it is aborted, or
        at its end, whichever is first."""
        request = self._scheduler.requests.get(push.key)
        if request is None or request.state in (SimState.PUSHING, SimState.LEAVING):
            self._close(push, arrived=False, why="withdrawn")
        elif push.receiver is not None:
            push.receiver.send(Settled(push.key, arrived=False, why="withdrawn"))
            push.receiver = None

    def _on_receiver_lost(self, peer: Peer) -> None:
        for push in list(self._pushes.values()):
            if push.receiver is peer:
                self._receiver_gone(push)

    def _receiver_gone(self, push: _Push) -> None:
        self.failures += not push.unwanted
        push.unwanted, push.receiver = True, None
        self._let_go(push)

    def _after_landing(self, push: _Push, then: Callable[[_Push], None]) -> None:
        """Once nothing handed to the link is in flight any more."""
        wait_s = push.lands_at - time.monotonic()
        if wait_s > 0 and push.receiver is not None:
            self._later(push, wait_s, then)
        else:
            then(push)

    def _later(self, push: _Push, delay_s: float, then: Callable[[_Push], None]) -> None:
        if push.timer is not None:
            push.timer.cancel()

        def fire() -> None:
            push.timer = None
            then(push)

        push.timer = asyncio.get_running_loop().call_later(delay_s, fire)

    # ---- receiving ---------------------------------------------------------------------------------------------

    def receive(self, request: SimRequest) -> None:
        """Its blocks are reserved: ask for the KV."""
        source = request.kv_source
        if source is None:
            raise RuntimeError(f"simulated request {request.key} awaits KV from nowhere")
        self._receives[source.key] = _Receive(request, source, self._patience(source))
        self._link.expect(source.key, source.endpoint)

    def _patience(self, source: KVSource) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._kv.transfer_timeout_s, self._timed_out, source)

    def _timed_out(self, source: KVSource) -> None:
        log.warning("no KV for %s within %.1f s", source.key, self._kv.transfer_timeout_s)
        self._link.withdraw(source.key, source.endpoint, unless_computing=True)

    def _on_computing(self, key: str) -> None:
        if receive := self._receives.get(key):
            receive.timer.cancel()
            receive.timer = self._patience(receive.source)

    def _on_settled(self, settled: Settled) -> None:
        receive = self._receives.pop(settled.key, None)
        if receive is None:
            return
        receive.timer.cancel()
        if receive.request.state is SimState.LEAVING:
            self._scheduler.free(receive.request)
        elif settled.arrived:
            self._scheduler.kv_arrived(receive.request)
        else:
            self.failures += 1
            log.warning("%s is prefilled here: %s", receive.request.key, settled.why)
            self._scheduler.kv_failed(receive.request)
        self._wake()
