"""Where a command looks for a fleet, and whom it asks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from support_redis import fresh_namespace, running_server

from orchestrator.cli.operator import FleetHandle, FleetOperator, find_fleet
from orchestrator.config.settings import QueueConfig, parse_config
from orchestrator.launch.host.run_folder import Ready, RunFolder
from orchestrator.store.client import connect
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Registry


def test_a_fleet_elsewhere_is_not_taken_for_the_one_that_runs_here(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = RunFolder("default")
    folder.claim()
    config = parse_config({"model": "m", "redis": {"url": "redis://here:1"}})
    folder.write_config(config)
    folder.note_ready(Ready("http://here:8000", "m", "1P1D"))
    here = FleetHandle("default", "redis://here:1", "http://here:8000", config)
    assert find_fleet(None, None) == find_fleet(None, "redis://here:1") == here
    assert find_fleet(None, "redis://there:1") == FleetHandle("default", "redis://there:1", None, None)
    folder.remove()


@pytest.mark.parametrize(
    ("redis_url", "asked"),
    [("redis://127.0.0.1:6379", True), ("unix:///run/redis", True), ("redis://192.0.2.1:6379", False)],
)
async def test_the_loopback_address_of_another_host_is_not_asked(tmp_path: Path, redis_url: str, asked: bool):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"model": "m1"}')
        await writer.drain()
        writer.close()

    frontend = await asyncio.start_server(answer, "127.0.0.1", 0)
    with running_server(tmp_path) as server:
        redis, namespace = await connect(server.url, 2.0), fresh_namespace()
        registry = Registry(redis, namespace)
        url = f"http://127.0.0.1:{frontend.sockets[0].getsockname()[1]}"
        await registry.refresh_frontend("f1", url, "", 30.0)
        handle = FleetHandle(namespace, redis_url, None, None)
        seen = await FleetOperator(handle, registry, PrefillQueue(redis, namespace, QueueConfig())).status()
        assert (seen["model"] == "m1") is asked, msgspec.json.encode(seen)
        await redis.aclose()
    frontend.close()
