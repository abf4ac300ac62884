"""Whether the fleet is paused, as its workers say in their load reports, so that every frontend knows it alike.

A pause is an operator's (`/pause` of vLLM's server): new requests wait until it ends. Workers only remember it; what
they hold goes on until the engines themselves are paused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

PauseMode = Literal["abort", "wait", "keep"]


class Pause:
    """`note` what workers say; new requests wait for `over`."""

    def __init__(self) -> None:
        self.modes: dict[str, str] = {}  # by worker that is paused
        self.on_abort: Callable[[], None] = lambda: None  # a pause began that ends what runs
        self.ended_at = 0.0  # this process's monotonic clock: what was frozen could not go on before
        self._over = asyncio.Event()
        self._over.set()

    def note(self, worker_id: str, mode: str) -> None:
        """`mode`: one of PauseMode, or empty where the worker is not paused."""
        before = self.modes.get(worker_id, "")
        if mode == before:
            return
        began = mode == "abort" and "abort" not in self.modes.values()
        if mode:
            self.modes[worker_id] = mode
        else:
            del self.modes[worker_id]
        if self.modes:
            self._over.clear()
        else:
            self.ended_at = time.monotonic()
            self._over.set()
        if began:
            self.on_abort()

    @property
    def on(self) -> bool:
        return bool(self.modes)

    @property
    def frozen(self) -> bool:
        """What runs has been stopped where it is, to go on later."""
        return "keep" in self.modes.values()

    async def over(self) -> None:
        """Returns at once where the fleet is not paused."""
        await self._over.wait()
