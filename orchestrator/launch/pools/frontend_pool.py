"""The frontend processes of this launcher: so many on every machine that should have some, all of one generation.

A frontend that leaves is told so through the registry: it takes no new connections and ends with its last request.
Another is ready before one that is replaced leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from orchestrator.config.settings import Config, WorkersConfig
from orchestrator.launch.commands import Setup
from orchestrator.launch.decisions.fleet_size import SHRINK_AFTER_S, FrontendSample, frontends_wanted
from orchestrator.launch.host.process import ProcessGroup
from orchestrator.launch.machines import FRONTEND, Machines, OnLine, frontend_named
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.launch.supervise import Stage, Supervised
from orchestrator.store.client import RedisAway
from orchestrator.store.registry import Registry

log = logging.getLogger("pd.launcher")


class _Placed:
    """One of our frontends: where it is, what it was started with last, and how the registry knows it."""

    def __init__(self, node: str, index: int, process: Supervised, generations: dict[str, int]) -> None:
        """`generations`: by model."""
        self.node, self.index = node, index
        self.process, self.generations = process, generations
        self.registries: Sequence[Registry] = ()  # of the models that it serves
        self.task: asyncio.Task[None] | None = None
        self.id = ""

    @property
    def ready(self) -> bool:
        return self.process.stage is Stage.READY

    @property
    def stays(self) -> bool:
        return self.process.stage not in (Stage.LEAVING, Stage.ENDED)


class OfModel:
    """One of the models of the frontends: what they are started with for it, and whether they have been. The first
    model's registry says which frontends there are, so what is done with them all is done through the first."""

    def __init__(
        self, pool: FrontendPool, setup: Setup, registry: Registry, on_stage: Callable[[Supervised], None]
    ) -> None:
        """Frontends serve it once it is told to `serve`. `on_stage` is called while it is the first."""
        self._pool, self.setup, self.registry, self.on_stage = pool, setup, registry, on_stage

    @property
    def is_first(self) -> bool:
        return self._pool.first is self

    @property
    def all_serve(self) -> bool:
        """Whether all frontends of the pool do, whichever model answers for them."""
        return all(process.stage is Stage.READY for process in self._pool.processes)

    @property
    def renewed(self) -> bool:
        """Whether all are of the generation of `setup`, and serve."""
        model, generation = self.setup.model, self.setup.generation
        return all(placed.ready and placed.generations.get(model) == generation for placed in self._pool.placed)

    def of_generation(self, generation: int) -> list[Supervised]:
        placed = self._pool.placed
        return [it.process for it in placed if it.generations.get(self.setup.model) == generation]

    async def close(self) -> None:
        if self.is_first:
            await self._pool.close()

    def serve(self) -> None:
        """Frontends that start from now on serve this model, and take the place of those that do not."""
        self._pool.models.append(self)

    def leave(self) -> None:
        """Frontends that start from now on do not serve this model, and take the place of those that do."""
        if self in self._pool.models:
            self._pool.models.remove(self)


class FrontendPool:
    """`update` with every snapshot of the first model's registry. Nothing is started after `close`."""

    def __init__(self, config: Config, machines: Machines, on_line: OnLine) -> None:
        self.models: list[OfModel] = []  # that new frontends serve
        self._wanted: dict[str, int] = {}  # by machine, where the load says how many
        self._samples: dict[str, deque[FrontendSample]] = {}
        self._config = config
        self._machines = machines
        self._on_line = on_line
        self._closed, self._alone = False, True  # no frontend of another launcher, or of nobody, is in the registry
        self.placed: list[_Placed] = []

    @property
    def processes(self) -> list[Supervised]:
        return [placed.process for placed in self.placed]

    @property
    def first(self) -> OfModel | None:
        return self.models[0] if self.models else None

    @property
    def _whole(self) -> Setup:
        first, *others = (model.setup for model in self.models)
        return msgspec.structs.replace(first, others=tuple(others))

    @property
    def _workers(self) -> WorkersConfig:
        """The first model's section, as it was rolled out last."""
        return self.models[0].setup.config.workers

    def take_over(self, names: Sequence[str]) -> None:
        """Supervise those that run as these already."""
        for name in names:
            if (placed := frontend_named(name)) is not None:
                index, node = placed
                self._start(node, index)

    async def update(self, snapshot: Snapshot) -> None:
        """Note what is ready; start what is missing, drain what is too many, end what is astray. Raises RedisAway."""
        registered = {frontend.process: frontend for frontend in snapshot.frontends.values()}
        for placed in self.placed:
            frontend = registered.get(placed.process.last_identity)
            if frontend is not None and placed.process.runs_as(frontend.process):
                placed.id, placed.generations[self.models[0].setup.model] = frontend.id, frontend.generation
                placed.process.seen()
                if frontend.url:
                    placed.process.mark_ready()
            else:
                placed.process.missed(snapshot.looked_s, self._workers.timeout_s)
        self._alone = registered.keys() <= {placed.process.last_identity for placed in self.placed}
        nodes = [] if self._closed else self._machines.frontend_nodes()
        if nodes is None:
            return  # those that were taken over serve on
        for placed in self.placed:
            if placed.node not in nodes:
                placed.process.request_stop()
        if self._config.frontend.replicas == "auto":
            for node in nodes:
                self._follow_load(node, snapshot)
        for node in nodes:
            await self._fill([placed for placed in self.placed if placed.node == node and placed.stays], node)

    async def close(self) -> None:
        """End all, at once. Returns when their processes are gone. By SIGINT those that serve are told that nobody
        else does: their clients have nowhere else to go, and idle connections are not waited for."""
        self._closed = True
        for placed in self.placed:
            placed.process.request_stop(signal.SIGINT if self._alone and placed.ready else signal.SIGTERM)
        await asyncio.gather(*(placed.task for placed in self.placed if placed.task), return_exceptions=True)

    def _replicas(self, node: str) -> int:
        configured = self._config.frontend.replicas
        return self._wanted.get(node, 1) if configured == "auto" else configured

    def _follow_load(self, node: str, snapshot: Snapshot) -> None:
        """Each reading of the registry is a sample while as many serve as should."""
        ours = {placed.id for placed in self.placed if placed.node == node and placed.ready and placed.stays}
        serving = [frontend for frontend in snapshot.frontends.values() if frontend.id in ours and frontend.url]
        samples = self._samples.setdefault(node, deque())
        if len(serving) != self._replicas(node):
            samples.clear()
            return
        now = snapshot.read_at
        cpu, in_flight = sum(f.cpu for f in serving), sum(f.in_flight for f in serving)
        samples.append(FrontendSample(now, len(serving), cpu, in_flight))
        while samples[0].at < now - 2 * SHRINK_AFTER_S:
            samples.popleft()
        wanted = frontends_wanted(samples, 1, self._config.frontend.max_replicas, now)
        if wanted is not None:
            where = f" on {node}" if node else ""
            log.info("frontends%s: %d -> %d (%.2f cores, %d requests)", where, len(serving), wanted, cpu, in_flight)
            self._wanted[node] = wanted
            samples.clear()

    async def _fill(self, staying: list[_Placed], node: str) -> None:
        replicas = self._replicas(node)
        current = [placed for placed in staying if placed.generations == _generations(self._whole)]
        for _ in range(replicas - len(staying)):
            self._start(node)
        if len(staying) >= replicas > len(current) and all(placed.ready for placed in current):
            self._start(node)  # it takes the place of one of an older generation once it is ready
        spare = len(staying) - replicas
        ready = sum(placed.ready for placed in staying)
        for placed in sorted(staying, key=lambda placed: (placed in current, placed.ready, -placed.index)):
            if spare > 0 and (not placed.ready or ready > replicas):
                replaces = placed in current and not placed.ready and len(current) < len(staying)
                if not replaces:
                    spare -= 1
                    ready -= placed.ready
                    await self._drain(placed)

    async def _drain(self, placed: _Placed) -> None:
        if placed.ready:
            await self.models[0].registry.order_frontend_drain(placed.id)
            placed.process.expect_exit(self._workers.drain_timeout_s)
        else:
            placed.process.expect_exit(0)

    def _start(self, node: str, number: int | None = None) -> None:
        """Start a frontend there, with this number or the first one that is free."""
        taken = {placed.index for placed in self.placed if placed.node == node}
        index = next(n for n in itertools.count() if n not in taken) if number is None else number
        name = f"{FRONTEND}{index}@{node}" if node else f"{FRONTEND}{index}"

        def make() -> ProcessGroup:
            setup = self._whole
            placed.generations = _generations(setup)
            placed.process.start_timeout_s = self._workers.start_timeout_s
            placed.registries = [model.registry for model in self.models]
            return self._machines.frontend(name, index, node, setup, self._on_line)

        async def deregister(process: Supervised) -> None:
            """Take it out of its models' registries at once, so that its waiting jobs are swept."""
            with contextlib.suppress(RedisAway):
                for registry in placed.registries:
                    for frontend in (await registry.frontends()).values():
                        if frontend.process == process.last_identity:
                            await registry.leave_frontend(frontend.id)

        process = Supervised(name, make, self._config.launcher, self._workers.start_timeout_s, self._show, deregister)
        placed = _Placed(node, index, process, _generations(self._whole))
        self.placed.append(placed)
        placed.task = asyncio.create_task(self._run(placed), name=name)

    async def _run(self, placed: _Placed) -> None:
        try:
            await placed.process.run()
        finally:
            if not self._closed:
                self.placed.remove(placed)

    def _show(self, process: Supervised) -> None:
        if self.first is not None:
            self.first.on_stage(process)


def _generations(setup: Setup) -> dict[str, int]:
    return {each.model: each.generation for each in (setup, *setup.others)}
