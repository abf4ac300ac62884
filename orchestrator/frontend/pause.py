"""What `/pause` and `/resume` of vLLM's server do to a fleet: it is drained as a whole before its engines are paused.

Engines that were paused one by one would wait for each other: decode for the KV of a prefill that is not scheduled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from orchestrator.fleet.control_calls import CallFailed, ControlCalls
from orchestrator.fleet.pause import PauseMode
from orchestrator.fleet.view import Fleet
from orchestrator.router.request import State
from orchestrator.router.router import Router
from orchestrator.types import QueueDepth, Role, WorkerLoad

log = logging.getLogger("pd.frontend")

POLL_S = 0.05
_BEFORE_DECODE = (State.PLACING, State.QUEUED, State.TRANSFERRING)
HEARD_TIMEOUT_S = 10.0  # for load reports that say that their workers are paused
SETTLE_TIMEOUT_S = 60.0  # after it engines are paused although something still runs, or is transferred


class PauseCalls:
    """`begin` and `end` a pause of the whole fleet. Each raises CallFailed."""

    def __init__(
        self, fleet: Fleet, calls: ControlCalls, router: Router, depth: Callable[[], QueueDepth | None]
    ) -> None:
        self._fleet, self._calls, self._router, self._depth = fleet, calls, router, depth

    @property
    def on(self) -> bool:
        return self._fleet.pause.on

    async def begin(self, mode: PauseMode, clear_cache: bool) -> None:
        """Frontends hold new requests. What runs is ended (`abort`), awaited (`wait`) or frozen (`keep`); then the
        engines are paused. New requests go on once `end` was called. A `wait` lasts as long as what runs."""
        await self._calls.call("hold", [mode])
        try:
            await self._heard(mode)
            if mode == "wait":
                await self._ended(self._busy)
            elif mode == "abort":
                await self._settled(self._busy)
            elif clear_cache:  # engines cannot drop blocks that KV is written to or read from
                await self._settled(self._in_transit)
            await self._calls.call("pause_scheduler", [], {"mode": mode, "clear_cache": clear_cache})
        except BaseException:
            await self._calls.call("release", [])
            raise

    async def end(self) -> None:
        await self._calls.call("resume_scheduler", [])
        await self._calls.call("release", [])
        await self._until(lambda: not self.on, HEARD_TIMEOUT_S)

    async def _heard(self, mode: PauseMode) -> None:
        """Every frontend hears what this one hears: no new request comes after it."""
        workers = [worker_id for worker_id, view in self._fleet.workers.items() if view.connected]
        modes = self._fleet.pause.modes
        await self._until(
            lambda: all(modes.get(worker) == mode for worker in workers if worker in self._fleet.workers),
            HEARD_TIMEOUT_S,
        )

    async def _settled(self, true: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._ended(true)
        except TimeoutError:
            log.warning("engines are paused although requests or transfers have not ended in %g s", SETTLE_TIMEOUT_S)

    async def _ended(self, true: Callable[[], bool]) -> None:
        while true():
            if not self.on:
                raise CallFailed("pause_scheduler: the fleet was resumed before what runs had ended")
            await asyncio.sleep(POLL_S)

    def _busy(self) -> bool:
        """Something runs, by what this frontend and every worker's last report say, and the queue."""
        held = any(load.running + load.waiting or load.blocks_free < load.blocks_total for _, load in self._loads())
        return bool(self._router.requests) or self._queued() or held

    def _in_transit(self) -> bool:
        """A prompt is queued, prefilled remotely, or waits for its KV."""
        own = any(active.state in _BEFORE_DECODE for active in self._router.requests.values())
        held = any(
            load.waiting or (role is Role.PREFILL and load.blocks_free < load.blocks_total)
            for role, load in self._loads()
        )
        return own or self._queued() or held

    def _loads(self) -> Iterator[tuple[Role, WorkerLoad]]:
        for view in self._fleet.workers.values():
            if view.load is not None:
                yield view.info.role, view.load

    def _queued(self) -> bool:
        depth = self._depth()
        return depth is not None and depth.requests + depth.claimed > 0

    async def _until(self, true: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not true():
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise CallFailed(f"pause: workers' load reports were not heard within {timeout_s:g} s") from None
