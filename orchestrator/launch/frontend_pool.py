"""The frontend processes of this launcher: so many on every machine that should have some.

A frontend keeps nothing that another cannot take over, so one that is not needed is ended at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from orchestrator.config.settings import Config
from orchestrator.launch.machines import FRONTEND, Machines, OnLine
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.launch.supervise import Supervised
from orchestrator.store.client import RedisAway
from orchestrator.store.registry import Registry


class FrontendPool:
    """`update` with every snapshot. Nothing is started after `close`."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        machines: Machines,
        on_line: OnLine,
        on_stage: Callable[[Supervised], None],
    ) -> None:
        self._config = config
        self._registry = registry
        self._machines = machines
        self._on_line = on_line
        self._on_stage = on_stage
        self._closed = False
        self._running: dict[tuple[str, int], Supervised] = {}  # by machine, and number there
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    @property
    def processes(self) -> list[Supervised]:
        return list(self._running.values())

    def update(self, snapshot: Snapshot) -> None:
        """Start what is missing on the machines there are now, end what is on others, note what is ready."""
        if self._closed:
            return
        wanted = {(node, n) for node in self._machines.frontend_nodes() for n in range(self._config.frontend.replicas)}
        for place in wanted - self._running.keys():
            self._start(*place)
        for place in self._running.keys() - wanted:
            self._running[place].request_stop()
        for frontend in snapshot.frontends.values():
            for process in self._running.values():
                if process.runs_as(frontend.process):
                    process.mark_ready()

    async def close(self) -> None:
        """End all, at once. Returns when their processes are gone."""
        self._closed = True
        for process in self._running.values():
            process.request_stop()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start(self, node: str, index: int) -> None:
        name = f"{FRONTEND}{index}@{node}" if node else f"{FRONTEND}{index}"
        process = Supervised(
            name,
            lambda: self._machines.frontend(name, index, node, self._on_line),
            self._config.launcher,
            self._config.workers.start_timeout_s,
            self._on_stage,
            self._left,
        )
        self._running[node, index] = process
        self._tasks[node, index] = asyncio.create_task(self._run((node, index), process), name=name)

    async def _run(self, place: tuple[str, int], process: Supervised) -> None:
        try:
            await process.run()
        finally:
            if not self._closed:
                del self._running[place], self._tasks[place]

    async def _left(self, process: Supervised) -> None:
        """Take it out of the registry at once, so that its waiting jobs are swept."""
        with contextlib.suppress(RedisAway):
            for frontend in (await self._registry.frontends()).values():
                if frontend.process == process.last_identity:
                    await self._registry.leave_frontend(frontend.id)
