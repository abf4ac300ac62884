"""The launcher's connection to Redis, with a real server."""

import asyncio
import os
import shutil
import signal
import tempfile
from pathlib import Path
from subprocess import SubprocessError
from typing import Any
from unittest.mock import Mock

import pytest
from support_redis import RedisOnPort

from orchestrator.config.settings import parse_config
from orchestrator.launch.host import redis_server
from orchestrator.launch.host.redis_server import RedisServer
from orchestrator.process.tasks import cancelled
from orchestrator.store.client import RedisAway, connect

pytestmark = pytest.mark.slow  # a server of its own


async def test_launcher_waits_for_a_slow_redis(tmp_path: Path):
    """A machine on which workers load is busy: `up` failed there because one answer took over `redis.timeout_s`."""
    config = parse_config({"model": "m", "engine": "sim", "redis": {"timeout_s": 0.05}})
    server = RedisServer(config, tmp_path)
    redis = await server.start()
    assert server._own is not None and (pid := server._own.pid) is not None
    try:
        os.kill(pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGCONT)
        assert await redis.ping()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RedisAway, match="no answer within 2 s"):
            await redis.ping()
    finally:
        os.kill(pid, signal.SIGCONT)
        await redis.aclose()
        await server.stop()


@pytest.mark.parametrize("name", ["with space", "é", "a#b", "a?b", "a%41"])
async def test_any_folder_can_have_the_socket(name: str):
    """Some characters mean something else in a URL."""
    base = Path(tempfile.mkdtemp(prefix="pd-"))  # a path short enough for a socket
    server = RedisServer(parse_config({"model": "m"}), base / name)
    try:
        redis = await server.start()
        assert await redis.ping() and server._own is not None and server._own.reachable
        await redis.aclose()
    finally:
        await server.stop()
        shutil.rmtree(base)


@pytest.mark.parametrize(("has_bytes", "bound"), [(32 << 30, (32 << 30) // 10), (256 << 20, 64 << 20)])
async def test_embedded_server_has_a_share_of_the_memory(tmp_path: Path, monkeypatch, has_bytes: int, bound: int):
    monkeypatch.setattr(redis_server, "find_memory", lambda: has_bytes)
    server = RedisOnPort()
    redis = await connect(await server.start(tmp_path), 5.0)
    try:
        told = await redis.info("memory")
        assert (told["maxmemory"], told["maxmemory_policy"]) == (bound, "noeviction")
    finally:
        await redis.aclose()
        await server.stop()


async def test_a_server_that_cannot_be_started_again_now_is_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = parse_config({"model": "m", "engine": "sim", "launcher": {"restart_backoff_max_s": 0.01}})
    server = RedisServer(config, tmp_path)
    await (await server.start()).aclose()
    assert server._own is not None and (pid := server._own.pid) is not None
    spawn, refusals = redis_server._spawn, [OSError(24, "Too many open files"), SubprocessError("no process")]

    def refusing(*where: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return spawn(*where)

    monkeypatch.setattr(redis_server, "_spawn", refusing)
    again = asyncio.Event()
    keeping = asyncio.create_task(server.keep_running(again.set))
    try:
        os.kill(pid, signal.SIGKILL)
        await again.wait()
        assert server._own.alive and not refusals
    finally:
        await cancelled(keeping)
        await server.stop()


async def test_a_server_that_outlives_sigkill_holds_nobody_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redis_server, "_STOP_DEADLINE_S", 0.05)
    server = RedisOnPort()
    server._process = stuck = Mock(poll=Mock(return_value=None))
    await server.stop()
    stuck.kill.assert_called_once_with()
