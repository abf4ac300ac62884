"""Whether the fleet is paused, as its workers say in their load reports, so that every frontend knows it alike.

A pause is an operator's (`/pause` of vLLM's server): new requests wait until it ends. Workers only remember it; what
they hold goes on until the engines themselves are paused. The newest state counts, whoever says it. A worker that says
an older one has joined since, and is told: so a pause outlives each worker and each frontend, but not all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from orchestrator.types import PauseState

PauseMode = Literal["abort", "wait", "keep"]


class Pause:
    """`note` what workers say; new requests wait for `over`."""

    def __init__(self) -> None:
        self.state = PauseState()  # the newest that was heard
        self.on_abort: Callable[[], None] = lambda: None  # a pause began that ends what runs
        self.on_behind: Callable[[str], None] = lambda _: None  # this worker does not know `state`
        self.ended_at = 0.0  # this process's monotonic clock: what was frozen could not go on before
        self._over = asyncio.Event()
        self._over.set()

    def note(self, worker_id: str, state: PauseState) -> None:
        before = self.state
        if state == before:
            return  # with almost every report
        if state < before:
            self.on_behind(worker_id)
            return
        self.state = state
        if state.mode:
            self._over.clear()
        else:
            self.ended_at = time.monotonic()
            self._over.set()
        if state.mode == "abort" != before.mode:
            self.on_abort()

    @property
    def on(self) -> bool:
        return bool(self.state.mode)

    @property
    def frozen(self) -> bool:
        """What runs has been stopped where it is, to go on later."""
        return self.state.mode == "keep"

    async def over(self) -> None:
        """Returns at once where the fleet is not paused."""
        await self._over.wait()
