"""The processes of all models of a fleet, as those of one. The first model's registry has the frontends of all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from orchestrator.launch.fleet_processes import FleetProcesses
from orchestrator.launch.host.run_folder import StartedProcess

Note = Callable[[list[StartedProcess], frozenset[str]], None]


class NotesOfModels:
    """Writes down together what each model's processes tell of themselves."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._of: dict[str, tuple[list[StartedProcess], frozenset[str]]] = {}

    def of(self, model: str) -> Note:
        def noted(started: list[StartedProcess], shared_memory: frozenset[str]) -> None:
            self._of[model] = started, shared_memory
            everything = [process for processes, _ in self._of.values() for process in processes]
            self._note(everything, frozenset().union(*(names for _, names in self._of.values())))

        return noted


class ModelsProcesses:
    """As `FleetProcesses`, for all models."""

    def __init__(self, models: Mapping[str, FleetProcesses]) -> None:
        self._each = list(models.values())
        self.first = self._each[0]

    async def start(self) -> None:
        """Raises ConfigError, RedisAway."""
        for fleet in reversed(self._each):  # the first starts the frontends, with what all models run
            await fleet.start()

    async def watch(self) -> None:
        """Runs until cancelled."""
        await _together([fleet.watch.run() for fleet in self._each])

    def read_soon(self) -> None:
        for fleet in self._each:
            fleet.watch.read_soon()

    async def until_ready(self) -> None:
        """Returns when all are. Raises StartFailed."""
        await _together([fleet.until_ready() for fleet in self._each])

    async def end(self) -> None:
        """Frontends first, then the workers of all models, at once. Returns when all are gone."""
        await self.first.frontends.close()
        await asyncio.gather(*(fleet.end() for fleet in self._each))

    def kill(self) -> None:
        for fleet in self._each:
            fleet.kill()


async def _together(doing: list[Coroutine[Any, Any, None]]) -> None:
    """Returns when all have; the first that raises ends the others, and is raised."""
    tasks = [asyncio.create_task(each) for each in doing]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
