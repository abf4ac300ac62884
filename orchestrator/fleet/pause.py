"""Whether the fleet is paused. Workers report it with their load, so that every frontend has the same state.

An operator pauses the fleet by `/pause` of vLLM's server: new requests then wait until it is resumed. Workers store the
state; their requests go on until the engines themselves are paused. The newest state that any worker reports counts. A
worker that reports an older one has joined since, and is told the newest. So a pause survives the loss of any worker or
frontend, but not of all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from orchestrator.types import PauseState

PauseMode = Literal["abort", "wait", "keep"]


class Pause:
    """`note` takes the states that workers report; new requests wait for `ended`."""

    def __init__(self) -> None:
        self.state = PauseState()  # the newest reported one
        self.on_abort: Callable[[], None] = lambda: None  # called when a pause begins that ends running requests
        self.on_outdated: Callable[[str], None] = lambda _: None  # called with a worker that does not know `state`
        self.ended_at = 0.0  # monotonic; frozen requests could not continue before
        self.ended = asyncio.Event()  # the fleet is not paused
        self.ended.set()

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
