"""Commands that follow a fleet for minutes, on a Redis that is away for a moment: a real server and registry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock, call

import msgspec
import pytest
from support_redis import Server, fresh_namespace, running_server, worker
from support_steering import claim_ids, order_drain
from support_wait import DEADLINE_S, until
from typer.testing import CliRunner

from orchestrator.cli import handle, rolling
from orchestrator.cli.handle import FleetHandle, OpenFleet, open_fleet, retry_while_away
from orchestrator.cli.join import Token
from orchestrator.cli.main import app
from orchestrator.cli.rolling import Step, restart
from orchestrator.cli.rollout import Event, _follow
from orchestrator.config.settings import WorkersConfig
from orchestrator.store.client import RedisAway
from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.fields import Launcher
from orchestrator.types import Role, WorkerState

pytestmark = pytest.mark.slow  # a server of its own
QUICK = WorkersConfig(heartbeat_s=0, drain_timeout_s=30, start_timeout_s=30)


@pytest.fixture
def server(tmp_path: Path):
    with running_server(tmp_path) as server:
        yield server


@pytest.fixture
def namespace() -> str:
    return fresh_namespace()


@pytest.fixture
async def fleet(server: Server, namespace: str) -> AsyncIterator[OpenFleet]:
    async with open_fleet(FleetHandle(namespace, server.url, None, None)) as fleet:
        yield fleet


async def test_rollout_follows_through_redis_outage(server: Server, fleet: OpenFleet) -> None:
    begun = Rollout(Version(0, {}), Version(1, {}))
    configuration, show = fleet.registry.configuration, Mock()
    assert await configuration.change_rollout(None, begun)
    assert await claim_ids(fleet.registry, "launcher", Role.DECODE, ttl_s=600)
    following = asyncio.create_task(_follow(fleet, 1, show))
    await asyncio.sleep(0.1)
    server.stop()
    await asyncio.sleep(1)
    assert not following.done()
    server.start()
    assert await retry_while_away(lambda: configuration.change_rollout(None, begun.to(Phase.DONE)))
    assert (await following).phase is Phase.DONE
    assert show.mock_calls[-1].args == (Event("done", generation=1),)


async def test_restart_continues_after_redis_outage(server: Server, fleet: OpenFleet) -> None:
    """It orders each worker itself: one that gave up would leave half of them as they were."""
    registry = fleet.registry
    infos = [msgspec.structs.replace(worker(name), state=WorkerState.READY, process="1") for name in ("a", "b")]
    for info in infos:
        await registry.join(info, 600)
    restarting = asyncio.create_task(restart(fleet, QUICK, None, 1, False, Mock()))
    await asyncio.sleep(0.1)
    server.stop()
    await asyncio.sleep(1)
    assert not restarting.done()
    server.start()
    for info in infos:  # each comes back as another process, as a launcher has it
        await retry_while_away(lambda info=info: registry.join(msgspec.structs.replace(info, process="2"), 600))  # type: ignore[misc]
    assert await restarting == 2


async def test_restart_waits_for_workers_that_a_redis_without_its_data_has_not_heard_of(fleet: OpenFleet) -> None:
    registry, show = fleet.registry, Mock()
    infos = [msgspec.structs.replace(worker(name), state=WorkerState.READY, process="1") for name in ("a", "b")]
    await registry.join(infos[0], 600)
    settings = msgspec.structs.replace(QUICK, heartbeat_s=1.5)
    restarting = asyncio.create_task(restart(fleet, settings, None, 1, False, show))
    await asyncio.sleep(0.3)
    await registry.join(infos[1], 600)  # its first heartbeat since
    for info in infos:
        async with asyncio.timeout(DEADLINE_S):
            while call(Step("draining", info.id)) not in show.mock_calls:
                await asyncio.sleep(0.01)
        await registry.join(msgspec.structs.replace(info, process="2"), 600)
    assert await restarting == 2


async def test_restart_does_not_wait_for_workers_that_leave_for_good(fleet: OpenFleet, monkeypatch) -> None:
    """The fleet is scaled meanwhile: launchers drain what they run, and `scale` what was started by hand."""
    monkeypatch.setattr(rolling, "_LOOKS", 3)
    registry, launcher, show = fleet.registry, "host/1/1", Mock()
    infos = [msgspec.structs.replace(worker(n), state=WorkerState.READY, process="1") for n in ("a", "b", "c", "hand")]
    for info in infos:
        await registry.join(info, 600)
    await registry.refresh_launcher(launcher, Launcher(dict.fromkeys("abc", Role.PREFILL)), 600)
    restarting = asyncio.create_task(restart(fleet, QUICK, None, 1, False, show))
    async with asyncio.timeout(DEADLINE_S):
        while show.mock_calls != [call(Step("draining", "a"))]:
            await asyncio.sleep(0.01)
        await registry.leave("a")  # to come back
        await asyncio.sleep(2.0)
        assert len(show.mock_calls) == 1
        await order_drain(registry, "hand")
        await asyncio.sleep(0.5)
        await registry.leave("hand")
        await registry.leave("c")
        await registry.refresh_launcher(launcher, Launcher(dict.fromkeys("ab", Role.PREFILL)), 600)
        for info in infos[:2]:
            await registry.join(msgspec.structs.replace(info, process="2"), 600)
        assert await restarting == 2
    assert call(Step("left", "hand")) in show.mock_calls and call(Step("left", "c")) in show.mock_calls


async def test_max_unavailable_above_fleet_size_keeps_one_serving(fleet: OpenFleet) -> None:
    registry = fleet.registry
    infos = [msgspec.structs.replace(worker(name), state=WorkerState.READY, process="1") for name in ("a", "b")]
    for info in infos:
        await registry.join(info, 600)
    say = Mock()
    restarting = asyncio.create_task(restart(fleet, QUICK, None, 9, False, say))
    await until(lambda: say.mock_calls)
    await asyncio.sleep(0.5)  # in which it would drain the other
    assert [call.args for call in say.mock_calls] == [(Step("draining", "a"),)]
    for info in infos:
        await registry.join(msgspec.structs.replace(info, process="2"), 600)
        await asyncio.sleep(0.5)
    assert await restarting == 2


async def test_restart_prints_steps_as_json(server: Server, fleet: OpenFleet, namespace: str) -> None:
    registry, options = fleet.registry, ["--redis", server.url, "--namespace", namespace]
    info = msgspec.structs.replace(worker("a"), state=WorkerState.READY, process="1")
    await registry.join(info, 600)
    running = asyncio.create_task(
        asyncio.to_thread(CliRunner().invoke, app, ["restart", "--json", "--force", *options])
    )
    async with asyncio.timeout(60):
        while "a" not in (await registry.workers_and_orders())[1]:
            await asyncio.sleep(0.02)
        await registry.join(msgspec.structs.replace(info, process="2"), 600)
        done = await running
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"event": "draining", "id": "a"},
        {"event": "restarted", "id": "a"},
        {"event": "done", "workers": 1},
    ]


def test_join_prints_token_as_json(server: Server) -> None:
    told = json.loads(CliRunner().invoke(app, ["join", "--json", "--redis", server.url, "--namespace", "n"]).stdout)
    assert Token.decode(told["PD_JOIN"]) == Token(server.url, "n")
    assert told["command"] == "orchestrator worker --role decode"


async def test_long_redis_outage_ends_command(
    server: Server, fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "_REDIS_PATIENCE_S", 0.0)
    server.stop()
    with pytest.raises(RedisAway):
        await retry_while_away(fleet.registry.workers)
