"""Frontends that hang are started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import AsyncMock

from support_wait import DEADLINE_S, until

from orchestrator.config.settings import parse_config
from orchestrator.launch.host.process import LocalProcess, ProcessSpec, adopt_orphans
from orchestrator.launch.machines import OnLine, Setup
from orchestrator.launch.pools.frontend_pool import FrontendPool
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.launch.supervise import Stage
from orchestrator.store.registry import Frontend


class Sleepers:
    """A machine whose frontends only sleep."""

    def __init__(self) -> None:
        self.nodes: Sequence[str] | None = ("",)

    def frontend_nodes(self) -> Sequence[str] | None:
        return self.nodes

    def frontend(self, name: str, index: int, node: str, setup: Setup, on_line: OnLine) -> LocalProcess:
        return LocalProcess(ProcessSpec(name, [sys.executable, "-c", "import time; time.sleep(60)"]), on_line)


def pool_on(machines: Sleepers, heartbeat_s: float) -> FrontendPool:
    tree = {
        "model": "demo",
        "engine": "sim",
        "workers": {"timeout_s": 4 * heartbeat_s, "heartbeat_s": heartbeat_s},
        "launcher": {"restart_backoff_s": 0.01},
    }
    config, registry = parse_config(tree), AsyncMock()
    registry.frontends.return_value = {}
    setup = Setup(0, config, Path("none"))
    return FrontendPool(config, registry, machines, lambda *_: None, lambda _: None, setup)  # type: ignore[arg-type]


async def test_a_frontend_that_is_silent_while_the_registry_works_is_started_again():
    adopt_orphans()
    pool = pool_on(Sleepers(), heartbeat_s=0.05)

    async def until_running(but: int = 0) -> int:
        async with asyncio.timeout(DEADLINE_S):
            while not (pid := pool.processes[0].pid) or pid == but:
                await pool.update(Snapshot(looked_s=0.01))
                await asyncio.sleep(0.01)
        return pid

    await pool.update(Snapshot())
    first = await until_running()
    there = Frontend("f", "http://x", pool.processes[0].last_identity)
    for _ in range(20):
        await pool.update(Snapshot(frontends={"f": there}))
        await asyncio.sleep(0.05)
    assert pool.processes[0].pid == first and pool.processes[0].stage is Stage.READY
    os.kill(first, signal.SIGSTOP)  # it answers nobody, and is not in the registry any more
    assert await until_running(but=first) != first
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
