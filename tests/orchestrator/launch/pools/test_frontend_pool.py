"""Frontends that hang are started again."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import AsyncMock

import msgspec
import pytest
from support_wait import until

from orchestrator.config.settings import Config, parse_config
from orchestrator.launch.commands import Setup
from orchestrator.launch.host.process import LocalProcess, ProcessGroup, ProcessSpec, adopt_orphans
from orchestrator.launch.machines import OnLine
from orchestrator.launch.pools.frontend_pool import FrontendPool, OfModel
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.launch.supervise import Stage
from orchestrator.store.registry import Frontend


class Sleepers:
    """A machine whose frontends only sleep."""

    def __init__(self) -> None:
        self.nodes: Sequence[str] | None = ("",)

    def frontend_nodes(self) -> Sequence[str] | None:
        return self.nodes

    def frontend(self, name: str, index: int, node: str, setup: Setup, on_line: OnLine) -> ProcessGroup:
        spec = ProcessSpec(name, [sys.executable, "-c", "import time; time.sleep(60)"])
        return ProcessGroup([LocalProcess(spec, on_line)])


def pool_on(machines: Sleepers, heartbeat_s: float) -> FrontendPool:
    tree = {
        "model": "demo",
        "engine": "sim",
        "workers": {"timeout_s": 4 * heartbeat_s},
        "launcher": {"restart_backoff_max_s": 0.01},
    }
    config = parse_config(tree)
    pool = FrontendPool(config, machines, lambda *_: None)  # type: ignore[arg-type]
    serving(pool, config, "")
    return pool


def serving(pool: FrontendPool, config: Config, name: str) -> OfModel:
    registry = AsyncMock()
    registry.frontends.return_value = {}
    model = OfModel(pool, Setup(0, config, Path("none"), name), registry, lambda _: None)
    model.serve()
    return model


async def test_a_frontend_that_is_silent_while_the_registry_works_is_started_again():
    adopt_orphans()
    pool = pool_on(Sleepers(), heartbeat_s=0.05)

    async def running(but: int) -> int:
        if pool.processes[0].pid in (0, but):
            await pool.update(Snapshot(looked_s=0.01))
        pid = pool.processes[0].pid
        return pid if pid != but else 0

    await pool.update(Snapshot())
    first = await until(lambda: running(but=0), "it runs")
    there = Frontend("f", "http://x", pool.processes[0].last_identity)
    for _ in range(20):
        await pool.update(Snapshot(frontends={"f": there}))
        await asyncio.sleep(0.05)
    assert pool.processes[0].pid == first and pool.processes[0].stage is Stage.READY
    os.kill(first, signal.SIGSTOP)  # it answers nobody, and is not in the registry any more
    await until(lambda: running(but=first), "another runs")
    await pool.close()


async def test_frontends_that_were_taken_over_serve_on_while_the_machines_are_not_known():
    """A cluster's head that does not answer once, at the start of the next launcher."""
    adopt_orphans()
    machines = Sleepers()
    machines.nodes = None
    pool = pool_on(machines, heartbeat_s=5.0)
    pool.take_over(["frontend-0@10.0.0.2", "frontend-of-somebody"])
    try:
        (taken,) = pool.processes
        await until(lambda: taken.pid, "it runs")
        await pool.update(Snapshot())
        assert not taken._stopping.is_set()
        machines.nodes = []
        await pool.update(Snapshot())
        await until(lambda: not pool.processes, "its node is gone")
    finally:
        await pool.close()


class Tells(Sleepers):
    """Its frontends end with the number of the signal that ends them."""

    def frontend(self, name: str, index: int, node: str, setup: Setup, on_line: OnLine) -> ProcessGroup:
        code = (
            "import signal, sys\nfor n in (2, 15): signal.signal(n, lambda n, _: sys.exit(n))\nprint(0)\nsignal.pause()"
        )
        spec = ProcessSpec(name, [sys.executable, "-uc", code + "\n" * 9])
        return ProcessGroup([LocalProcess(spec, on_line)])


@pytest.mark.parametrize(
    ("others", "url", "number"),
    [([], "http://x", signal.SIGINT), (["elsewhere"], "http://x", signal.SIGTERM), ([], "", signal.SIGTERM)],
)
async def test_frontends_that_serve_are_told_whether_others_do_when_they_end(others: list[str], url: str, number: int):
    adopt_orphans()
    pool = pool_on(Tells(), heartbeat_s=5.0)
    await pool.update(Snapshot())
    (process,) = pool.processes
    await until(lambda: process.last_lines, "it has said what signals mean to it")
    names = {process.last_identity, *others}
    await pool.update(Snapshot(frontends={name: Frontend(name, url, name) for name in names}))
    await pool.close()
    assert process.last_exit is not None and process.last_exit.code == number


class Noted(Sleepers):
    def __init__(self) -> None:
        super().__init__()
        self.started: list[Setup] = []

    def frontend(self, name: str, index: int, node: str, setup: Setup, on_line: OnLine) -> ProcessGroup:
        self.started.append(setup)
        return super().frontend(name, index, node, setup, on_line)

    def generations(self) -> dict[str, int]:
        """Those of the models of the frontend that was started last."""
        return {each.model: each.generation for each in (self.started[-1], *self.started[-1].others)}


async def sees(pool: FrontendPool, name: str, generation: int = 0) -> None:
    """The newest one is in the first model's registry, which tells that model's generation."""
    process = pool.processes[-1]
    await until(lambda: process.pid, "it runs")
    there = Frontend(name, "http://x", process.last_identity, generation=generation)
    await pool.update(Snapshot(frontends={name: there}))


async def test_frontends_of_several_models_are_renewed_when_one_of_them_is_rolled_out():
    adopt_orphans()
    machine = Noted()
    pool = pool_on(machine, heartbeat_s=5.0)
    first = pool.models[0]
    first.setup = msgspec.structs.replace(first.setup, model="first")
    other = serving(pool, first.setup.config, "other")
    try:
        await pool.update(Snapshot())
        await sees(pool, "f")
        assert first.renewed and other.renewed and len(machine.started) == 1
        other.setup = msgspec.structs.replace(other.setup, generation=7)
        await pool.update(Snapshot())
        assert not other.renewed and other.of_generation(7) == [pool.processes[-1]]
        await until(lambda: len(machine.started) == 2, "another is started beside it")
        assert machine.generations() == {"first": 0, "other": 7}
        assert len(pool.processes) == 2 and first.of_generation(0) == pool.processes
        await sees(pool, "g")
        first.registry.order_frontend_drain.assert_awaited_once_with("f")  # type: ignore[attr-defined]
        lost = pool.processes[-1]
        gone = Frontend("g", "http://x", lost.last_identity)
        other.registry.frontends.return_value = {"g": gone}  # type: ignore[attr-defined]
        lost.kill()
        left = other.registry.leave_frontend  # type: ignore[attr-defined]
        await until(lambda: left.await_count, "it is taken out of both registries")
        left.assert_awaited_once_with("g")
    finally:
        await pool.close()


async def test_frontends_take_a_model_up_and_leave_the_first_one():
    adopt_orphans()
    machine = Noted()
    pool = pool_on(machine, heartbeat_s=5.0)
    first = pool.models[0]
    first.setup = msgspec.structs.replace(first.setup, model="first")
    try:
        await pool.update(Snapshot())
        await sees(pool, "f")
        added = serving(pool, first.setup.config, "added")
        assert not added.renewed and not added.is_first
        await pool.update(Snapshot())
        await sees(pool, "g")
        first.registry.order_frontend_drain.assert_awaited_once_with("f")  # type: ignore[attr-defined]
        assert machine.generations() == {"first": 0, "added": 0}
        pool.processes[0].kill()  # it was told to leave, and does
        await until(lambda: len(pool.processes) == 1, "one serves both")
        first.leave()
        assert added.is_first
        await sees(pool, "g")
        await until(lambda: len(machine.started) == 3, "one that serves the other alone")
        assert machine.generations() == {"added": 0}
        await sees(pool, "h")
        added.registry.order_frontend_drain.assert_awaited_once_with("g")  # type: ignore[attr-defined]
    finally:
        await pool.close()
