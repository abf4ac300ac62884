"""The launcher's view of the registry: members, orders and desired ratio, read again whenever something changes.

Keeps the last reading while Redis is away; the next one says that it was. Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from orchestrator.process.tasks import Turns, cancelled, left_s, set_whenever, until_told
from orchestrator.store.client import RedisAway
from orchestrator.store.configuration import Rollout
from orchestrator.store.planned import Reading
from orchestrator.store.registry import Frontend, Registry
from orchestrator.types import WorkerState

log = logging.getLogger("pd.launcher")

_SETTLE_S = 0.1  # changes come in bursts
_READ_EVERY_S = 1.0
_LOOKED_MOST_S = 2.0  # between two readings; nobody looked while Redis was away, or this process did not run


class Snapshot(Reading, frozen=True):
    """A reading, and what was read after it."""

    frontends: dict[str, Frontend] = {}
    rollout: Rollout | None = None
    read_at: float = 0.0  # monotonic
    was_away: bool = False  # Redis was, since the snapshot before
    looked_s: float = 0.0  # for how long since then a member that is not here can have been missed

    def connected(self, frontends: int) -> bool:
        """Whether so many frontends serve at least, and each is connected to as many workers as are ready."""
        ready = sum(worker.state is WorkerState.READY for worker in self.workers.values())
        reached = [frontend.reaches >= ready for frontend in self.frontends.values() if frontend.url]
        return len(reached) >= frontends and all(reached)


class RegistryWatch:
    """`run` it. `on_read` gets every new snapshot, and ends before the next one is read."""

    def __init__(self, registry: Registry, on_read: Callable[[Snapshot], Awaitable[None]]) -> None:
        self.snapshot = Snapshot()
        self.is_away = False  # Redis is, or has come back and `on_read` has not ended yet
        self._registry = registry
        self._on_read = on_read
        self._changed = asyncio.Event()
        self._turns = Turns(log, "what the registry asks for")

    def read_soon(self) -> None:
        """Something else changed: read without waiting for the next regular reading."""
        self._changed.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        listener = asyncio.create_task(set_whenever(self._changed, self._registry.watch()), name="fleet-events")
        try:
            while True:
                with self._turns.turn():
                    await self.read()
                if await until_told(self._changed, left_s(_READ_EVERY_S)):
                    await asyncio.sleep(_SETTLE_S)
                    self._changed.clear()
        finally:
            await cancelled(listener)

    async def read(self) -> None:
        """Read now, and hand the snapshot on. While Redis is away nothing changes."""
        try:
            reading, now = await self._registry.read(), time.monotonic()
            self.snapshot = Snapshot(
                **msgspec.structs.asdict(reading),
                frontends=await self._registry.frontends(),
                rollout=await self._registry.rollout.read(),
                read_at=now,
                was_away=self.is_away,
                looked_s=min(now - self.snapshot.read_at, _LOOKED_MOST_S),
            )
            await self._on_read(self.snapshot)
            self.is_away = False
        except RedisAway:
            self.is_away = True
