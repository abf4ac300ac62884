"""`/pause` and `/resume` of vLLM's server for a fleet, which is paused as a whole.

Running requests end before any engine is paused, except in mode `keep`. Engines that were paused one by one would wait
for each other: decode for the KV of a prefill that is not scheduled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from orchestrator.fleet.control_calls import ControlCalls, Unanswered
from orchestrator.fleet.pause import PauseMode
from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.view import Fleet
from orchestrator.router.request import State
from orchestrator.router.router import Router
from orchestrator.types import PauseState, Role, WorkerLoad

log = logging.getLogger("pd.frontend")

POLL_S = 0.05
_BEFORE_DECODE = (State.PLACING, State.QUEUED, State.TRANSFERRING)
REPORTS_TIMEOUT_S = 10.0  # until the load reports of all workers have the new state
SETTLE_TIMEOUT_S = 60.0  # then engines are paused although requests or transfers have not ended


class _Superseded(Unanswered):
    """Another pause or resume came later, and stays in effect."""


class PauseCalls:
    """`begin` and `end` a pause of the whole fleet. Both raise CallFailed."""

    def __init__(self, fleet: Fleet, calls: ControlCalls, router: Router, queue: QueueView) -> None:
        self._fleet, self._calls, self._router, self._queue = fleet, calls, router, queue
        fleet.pause.on_outdated = self._catch_up
        self._number = 0  # of the newest state that this frontend has asked for

    @property
    def active(self) -> bool:
        return self._fleet.pause.active

    async def begin(self, mode: PauseMode, clear_cache: bool) -> None:
        """Pause the fleet. Frontends hold new requests until `end` is called. Running requests are ended (`abort`),
        awaited however long they take (`wait`), or frozen (`keep`); then the engines are paused."""
        try:
            await self._set(mode, self._fleet.pause.state.engines)
            await self._queue.look()  # others may have enqueued jobs until just now
            if mode == "wait":
                await self._wait_while(self._busy)
            elif mode == "abort":
                await self._wait_or_warn(self._busy)
            elif clear_cache:  # engines cannot drop blocks that KV is written to or read from
                await self._wait_or_warn(self._in_transit)
            await self._set(mode, True, clear_cache)
        except _Superseded:
            raise
        except BaseException:
            await self._set("", False)
            raise

    async def end(self) -> None:
        """Of a model that became idle as it was paused: its workers, which are to be told, are asked for again."""
        if self.active and (rest := self._fleet.rest) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest.cold_start_s):
                    while rest.recall():
                        await asyncio.sleep(POLL_S)
        await self._set("", False)

    async def _set(self, mode: PauseMode | Literal[""], engines: bool, clear_cache: bool = False) -> None:
        """Give the state to all workers, and wait until their load reports have it. Every frontend receives the same
        reports, so that from then on none starts a new request during a pause."""
        self._number = max(self._number, self._fleet.pause.state.number) + 1
        state = PauseState(self._number, mode, engines, clear_cache)
        await self._calls.call("set_pause", list(msgspec.structs.astuple(state)))
        try:
            async with asyncio.timeout(REPORTS_TIMEOUT_S):
                while not all(reported >= state for reported in self._reported_states()):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unanswered(f"pause: workers' load reports were not heard within {REPORTS_TIMEOUT_S:g} s") from None
        if self._fleet.pause.state != state:
            raise _Superseded("pause: somebody else paused or resumed the fleet at the same time; ask again")

    def _reported_states(self) -> Iterator[PauseState]:
        return (view.load.pause for view in self._fleet.workers.values() if view.connected and view.load is not None)

    def _catch_up(self, worker_id: str) -> None:
        """Give the state to a worker that has joined since. Its next report shows whether it got it."""
        self._calls.tell(worker_id, "set_pause", list(msgspec.structs.astuple(self._fleet.pause.state)))

    async def _wait_or_warn(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._wait_while(condition)
        except TimeoutError:
            log.warning("engines are paused although requests or transfers have not ended in %g s", SETTLE_TIMEOUT_S)

    async def _wait_while(self, condition: Callable[[], bool]) -> None:
        while condition():
            if not self.active:
                raise _Superseded("pause: the fleet was resumed before what runs had ended")
            await asyncio.sleep(POLL_S)

    def _busy(self) -> bool:
        """Whether this frontend has requests, the queue has jobs, or a worker's last report has requests or used
        blocks."""
        held = any(load.running + load.waiting or load.blocks_free < load.blocks_total for _, load in self._loads())
        return bool(self._router.requests) or self._queued() or held

    def _in_transit(self) -> bool:
        """Whether a prompt is queued, prefilled remotely, or waits for its KV."""
        own = any(active.state in _BEFORE_DECODE for active in self._router.requests.values())
        return own or self._queued() or any(moves_kv(role, load) for role, load in self._loads())

    def _loads(self) -> Iterator[tuple[Role, WorkerLoad]]:
        for view in self._fleet.workers.values():
            if view.load is not None:
                yield view.info.role, view.load

    def _queued(self) -> bool:
        depth = self._queue.depth
        return depth is not None and depth.requests + depth.claimed > 0


def moves_kv(role: Role, load: WorkerLoad) -> bool:
    """Whether a worker computes prompts for others, sends KV or waits for some, by its last report. What a prefill
    worker still decodes holds blocks too: who waits for its KV then says whether it sends any."""
    if load.waiting or role is Role.DECODE:
        return load.waiting > 0
    return load.running > load.decodes or (not load.decodes and load.blocks_free < load.blocks_total)
