"""Why requests wait although nothing is wrong: an operator has paused the fleet, or the model is idle; or this process
did not run.

An operator pauses the fleet by `/pause` of vLLM's server: new requests then wait until it is resumed. Workers store the
state; their requests go on until the engines themselves are paused. The newest state that any worker reports counts. A
worker that reports an older one has joined since, and is told the newest. So a pause survives the loss of any worker or
frontend, but not of all of them.

A model that nobody asks for may end its workers (`idle_after_s`); a frontend that needs one brings them back. That it
is idle is in the desired ratio: who set it is `IDLE`, and it keeps how many workers there were. Launchers decide when
it becomes idle (`launch/decisions/fleet_size.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from orchestrator.process.tasks import Turns, ticks
from orchestrator.store.client import RedisAway
from orchestrator.store.planned import Seen
from orchestrator.store.registry import Registry
from orchestrator.types import WAKE, DesiredRatio, PauseState

PauseMode = Literal["abort", "wait", "keep"]
MAX_STALLS = 16  # times that this process stood still; of earlier ones workers are held to have had the time


class Pause:
    """`note` takes the states that workers report; new requests wait for `ended`."""

    def __init__(self) -> None:
        self.state = PauseState()  # the newest reported one
        self.on_abort: Callable[[], None] = lambda: None  # called when a pause begins that ends running requests
        self.on_outdated: Callable[[str], None] = lambda _: None  # called with a worker that does not know `state`
        self.ended_at = 0.0  # monotonic; frozen requests could not continue before
        self.ended = asyncio.Event()  # the fleet is not paused
        self.ended.set()
        self._stalls: deque[tuple[float, float]] = deque(maxlen=MAX_STALLS)  # until when, and for how many seconds

    def stood_still(self, until: float, seconds: float) -> None:
        """This process did: that is no time of workers, of which it has heard nothing meanwhile."""
        self._stalls.append((until, seconds))

    def waited_s(self, since: float, now: float) -> float:
        """For how long something waits since then that could have come about: by this its deadline counts. Monotonic
        seconds."""
        if self.frozen:
            return 0.0
        since = max(since, self.ended_at)
        if not self._stalls:
            return now - since
        # What began within a stall, or after it but before it was noted, lost only the rest of it.
        return now - since - sum(min(seconds, until - since) for until, seconds in self._stalls if until > since)

    def note(self, worker_id: str, state: PauseState) -> None:
        before = self.state
        if state == before:
            return  # with almost every report
        if state < before:
            self.on_outdated(worker_id)
            return
        self.state = state
        if state.mode:
            self.ended.clear()
        else:
            self.ended_at = time.monotonic()
            self.ended.set()
        if state.mode == "abort" != before.mode:
            self.on_abort()

    @property
    def active(self) -> bool:
        return bool(self.state.mode)

    @property
    def frozen(self) -> bool:
        """Whether running requests are stopped, to go on later."""
        return self.state.mode == "keep"


log = logging.getLogger("pd.frontend")

_LOOK_EVERY_S = 0.1
_DRAINED_S = 5.0  # after a rest has ended the workers of before it may still seem ready, though they drain


class Rest:
    """`run` it. `cold_start_s`: for how long a request may wait for the workers."""

    def __init__(
        self,
        registry: Registry,
        serves: Callable[[], bool],
        desired: Callable[[], DesiredRatio | None],
        cold_start_s: float,
    ) -> None:
        """`serves`: whether the workers that a request may need are ready."""
        self.cold_start_s = cold_start_s
        self._registry, self._serves, self._desired = registry, serves, desired
        self._asked = False  # a request waits
        self._rested = False  # at the last look
        self._noted, self._woken_at = 0.0, -math.inf  # the ratio that ended the last rest: its `set_at`; monotonic
        self._used_at = time.monotonic()
        self._seen_requests = 0

    @property
    def away(self) -> bool:
        """Whether no worker is there because nobody asked, and one comes when it is asked for, or is about to."""
        desired = self._desired()
        if desired is None or self._serves():
            return False
        if desired.idle or self._wakes(desired):
            return True
        return desired.decode > 0 and time.monotonic() - self._woken_at < self.cold_start_s

    def _wakes(self, desired: DesiredRatio) -> bool:
        """Whether this ratio ends a rest, which has not been noted yet. An operator's does, too."""
        return self._rested or (desired.set_by == WAKE and desired.set_at != self._noted)

    def recall(self) -> bool:
        """A request found no worker. Whether it is worth waiting for one, which is then asked for."""
        desired = self._desired()
        self._asked |= desired is not None and desired.idle
        return self.away

    def idle_s(self, in_use: bool, requests: int) -> float:
        """For how long there has been no request. `in_use`: some run, or wait for the end of a pause, which is the
        workers' to keep. `requests`: how many came since the start."""
        if in_use or requests != self._seen_requests:
            self._seen_requests, self._used_at = requests, time.monotonic()
        return time.monotonic() - self._used_at

    async def run(self) -> None:
        """Runs until cancelled."""
        turns = Turns(log, "asking for an idle model's workers")
        async for _ in ticks(_LOOK_EVERY_S):
            with turns.turn():
                await self._look()

    async def _look(self) -> None:
        if (desired := self._desired()) is not None:
            if not desired.idle and self._wakes(desired):
                self._noted, self._woken_at = desired.set_at, time.monotonic()
            elif time.monotonic() - self._woken_at > _DRAINED_S and self._serves():
                self._woken_at = -math.inf  # it is awake: what is missing from now on is not loading
            self._rested = desired.idle
        if self._asked:
            self._asked = False
            with contextlib.suppress(RedisAway):
                await self._wake()

    async def _wake(self) -> None:
        """Unless somebody has done so. Raises RedisAway."""
        desired = await self._registry.desired()
        if desired is not None and desired.idle:
            wanted = replace(desired, set_by=WAKE, why="a request came")
            if await self._registry.steer(Seen.ratio(desired), desired=wanted) is not None:
                log.info("workers are asked for again: %d prefill, %d decode", wanted.prefill, wanted.decode)
