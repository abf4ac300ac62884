"""What `/pause` and `/resume` of vLLM's server do to a fleet: it is drained as a whole before its engines are paused.

Engines that were paused one by one would wait for each other: decode for the KV of a prefill that is not scheduled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from orchestrator.fleet.control_calls import CallFailed, ControlCalls
from orchestrator.fleet.pause import PauseMode
from orchestrator.fleet.view import Fleet
from orchestrator.router.router import Router
from orchestrator.types import QueueDepth

log = logging.getLogger("pd.frontend")

POLL_S = 0.05
HEARD_TIMEOUT_S = 10.0  # for load reports that say that their workers are paused
ABORT_TIMEOUT_S = 60.0  # after it engines are paused although something still runs


class PauseCalls:
    """`begin` and `end` a pause of the whole fleet. Each raises CallFailed."""

    def __init__(
        self, fleet: Fleet, calls: ControlCalls, router: Router, depth: Callable[[], QueueDepth | None]
    ) -> None:
        self._fleet, self._calls, self._router, self._depth = fleet, calls, router, depth

    @property
    def on(self) -> bool:
        return bool(self._fleet.pause.modes)

    async def begin(self, mode: PauseMode, clear_cache: bool) -> None:
        """Frontends hold new requests. What runs is ended (`abort`), awaited (`wait`) or frozen (`keep`); then the
        engines are paused. New requests go on once `end` was called. A `wait` lasts as long as what runs."""
        await self._calls.call("hold", [mode])
        try:
            await self._heard(mode)
            if mode == "abort":
                await self._aborted()
            elif mode == "wait":
                await self._idle()
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

    async def _aborted(self) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._idle()
        except TimeoutError:
            log.warning("engines are paused although requests that were aborted %g s ago still run", ABORT_TIMEOUT_S)

    async def _idle(self) -> None:
        while self._busy():
            if not self.on:
                raise CallFailed("pause_scheduler: the fleet was resumed before what runs had ended")
            await asyncio.sleep(POLL_S)

    def _busy(self) -> bool:
        """By what this frontend and every worker's last report say, and the queue."""
        depth = self._depth()
        loads = (view.load for view in self._fleet.workers.values())
        return bool(
            self._router.requests
            or (depth is not None and depth.requests + depth.claimed)
            or any(load is not None and load.running + load.waiting for load in loads)
        )

    async def _until(self, true: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not true():
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise CallFailed(f"pause: workers' load reports were not heard within {timeout_s:g} s") from None
