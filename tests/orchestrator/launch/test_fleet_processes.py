"""What the launcher takes for dead before it starts: a real registry, entries of processes that run and that do not."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from support_redis import fresh_namespace, worker

from orchestrator.config.settings import parse_config
from orchestrator.launch.console import Console
from orchestrator.launch.fleet_processes import FleetProcesses
from orchestrator.launch.host.local_machine import LocalMachine
from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.parent import own_identity
from orchestrator.store.client import connect
from orchestrator.store.registry import Registry
from orchestrator.store.seen import BY_HAND
from orchestrator.types import WorkerInfo

pytestmark = pytest.mark.slow  # a server of its own


def of(worker_id: str, process: str) -> WorkerInfo:
    return msgspec.structs.replace(worker(worker_id), pid=os.getpid(), process=process)


async def test_only_what_is_known_to_have_ended_is_forgotten(tmp_path: Path):
    """Containers repeat host names and pids: neither a worker of another one nor a pid given anew is one of ours."""
    place, pid, ticks = own_identity().split("/")
    server = EmbeddedRedis()
    redis = await connect(await server.start(tmp_path), 5)
    try:
        config = parse_config({"model": "m", "engine": "sim", "namespace": fresh_namespace()})
        registry = Registry(redis, config.namespace)
        for info in (
            of("runs", own_identity()),
            of("its-pid-is-anothers-now", f"{place}/{pid}/{int(ticks) - 1}"),
            of("of-another-container", f"another/{pid}/{int(ticks) - 1}"),
            of("of-no-process-here", "another/999999999/1"),
        ):
            await registry.join(info, 60)
        await registry.refresh_launcher(f"{place}/{pid}/{int(ticks) - 1}", {}, 60)
        await registry.refresh_launcher("another/1/1", {}, 60)
        await registry.refresh_launcher(f"{BY_HAND}{place}/{pid}/{int(ticks) - 1}", {}, 60)
        machine = LocalMachine(config, tmp_path / "config.yaml")
        fleet = FleetProcesses(config, registry, machine, Console(), lambda *noted: None)
        await fleet.forget_the_dead()
        assert set(await registry.workers()) == {"runs", "of-another-container", "of-no-process-here"}
        assert set(await registry.launchers()) == {"another/1/1"}
    finally:
        await redis.aclose()
        await server.stop()
