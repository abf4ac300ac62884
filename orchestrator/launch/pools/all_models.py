"""The processes of all models of a fleet, as those of one. The first model's registry has the frontends of all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from orchestrator.launch.fleet_processes import FleetProcesses
from orchestrator.process.tasks import cancelled


class ModelsProcesses:
    """As `FleetProcesses`, for all models."""

    def __init__(self, models: Mapping[str, FleetProcesses]) -> None:
        self.models = dict(models)
        self._watching: dict[str, asyncio.Task[None]] = {}

    @property
    def first(self) -> FleetProcesses:
        """Whose registry has all frontends."""
        return next(fleet for fleet in self.models.values() if fleet.frontends.is_first)

    async def start(self) -> None:
        """Raises ConfigError, RedisAway."""
        for fleet in self.models.values():
            fleet.frontends.serve()
        for fleet in reversed(self.models.values()):  # the first starts the frontends, with what all models run
            await fleet.start()

    def watch(self) -> None:
        for name in self.models:
            self._watch(name)

    def _watch(self, name: str) -> None:
        self._watching[name] = asyncio.create_task(self.models[name].watch.run(), name=f"watch-{name}")

    async def add(self, name: str, fleet: FleetProcesses) -> None:
        """Start the workers of one more model, while all are watched. Raises ConfigError, RedisAway."""
        self.models[name] = fleet
        await fleet.start()
        self._watch(name)

    async def remove(self, name: str) -> None:
        """End the workers of a model that frontends have left. Returns when they are gone."""
        await cancelled(self._watching.pop(name, None))
        if (fleet := self.models.get(name)) is not None:
            await fleet.end()
            await fleet.remove_shared_memory()  # nobody watches them any more
            del self.models[name]

    def read_soon(self) -> None:
        for fleet in self.models.values():
            fleet.watch.read_soon()

    async def until_ready(self) -> None:
        """Returns when all are. Raises StartFailed."""
        try:
            async with asyncio.TaskGroup() as together:
                for fleet in self.models.values():
                    together.create_task(fleet.until_ready())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def end(self) -> None:
        """Frontends first, then the workers of all models, at once. Returns when all are gone."""
        await cancelled(*self._watching.values())
        for fleet in self.models.values():
            await fleet.frontends.close()
        await asyncio.gather(*(fleet.end() for fleet in self.models.values()))

    def kill(self) -> None:
        for fleet in self.models.values():
            fleet.kill()
