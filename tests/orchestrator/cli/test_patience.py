"""Commands that follow a fleet for minutes, on a Redis that is away for a moment: a real server and registry."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import Mock

import msgspec
import pytest
from support_redis import Server, fresh_namespace, worker
from support_steering import claim_ids, order_drain
from support_wait import until
from typer.testing import CliRunner

from orchestrator.cli import handle as handle_module
from orchestrator.cli import rollout as rollout_module
from orchestrator.cli.handle import FleetHandle, OpenFleet, open_fleet, retry_while_away
from orchestrator.cli.join import Token
from orchestrator.cli.main import app
from orchestrator.cli.models import model as model_module
from orchestrator.cli.rollout import Event, _refuse_rename, _steps, follow, restart
from orchestrator.config.settings import Refused, WorkersConfig
from orchestrator.store.client import RedisAway
from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.operator.models import ListedModel, ModelList, ModelState, ModelStore
from orchestrator.store.registry import Registry
from orchestrator.types import Role, WorkerState

pytestmark = pytest.mark.slow  # a server of its own
QUICK = WorkersConfig(drain_timeout_s=30, start_timeout_s=30)


@pytest.fixture
def namespace() -> str:
    return fresh_namespace()


@pytest.fixture
async def fleet(mortal: Server, namespace: str) -> AsyncIterator[OpenFleet]:
    async with open_fleet(FleetHandle(namespace, mortal.url, None, None)) as fleet:
        yield fleet


async def test_rollout_follows_through_redis_outage(mortal: Server, fleet: OpenFleet) -> None:
    begun = Rollout(Version(0, {}), Version(1, {}))
    rollout, show = fleet.registry.rollout, Mock()
    assert await rollout.change(None, begun)
    assert await claim_ids(fleet.registry, "launcher", Role.DECODE, ttl_s=600)
    following = asyncio.create_task(follow(fleet, begun, show))
    await asyncio.sleep(0.1)
    mortal.stop()
    await asyncio.sleep(1)
    assert not following.done()
    mortal.start()
    assert await retry_while_away(lambda: rollout.change(None, begun.to(Phase.DONE)))
    assert (await following).phase is Phase.DONE
    assert show.mock_calls[-1].args == (Event("done", generation=1),)


@pytest.mark.parametrize("restarts", [{}, {"a": "1"}])
@pytest.mark.parametrize(("left", "phase"), [(1, Phase.DONE), (0, Phase.UNDONE)])
async def test_a_rollout_has_ended_where_somebody_has_ordered_the_next(
    restarts: dict[str, str], left: int, phase: Phase, fleet: OpenFleet
) -> None:
    """Between two looks."""
    begun, rollout, show = Rollout(Version(0, {}), Version(1, {})), fleet.registry.rollout, Mock()
    new = Version(left if restarts else 2, {})
    assert await rollout.change(None, Rollout(Version(left, {}), new, restart=restarts, ordered=1))
    assert (await follow(fleet, begun, show)).phase is phase
    (event,) = (call.args[0] for call in show.mock_calls)
    assert (event.event, event.generation) == (phase.value, left)


async def test_a_restart_that_another_order_has_followed_is_not_said_to_be_nobodys(fleet: OpenFleet) -> None:
    version, rollout = Version(0, {}), fleet.registry.rollout
    assert await rollout.change(None, Rollout(version, version, restart={"b": "1"}))
    with pytest.raises(Refused, match="ordered a restart since"):
        await follow(fleet, Rollout(version, version, restart={"a": "1"}), Mock())


@pytest.mark.parametrize("set_to", ["another", "def", None, "default", "default.small"])
def test_a_rollout_renames_no_fleet(set_to: str | None) -> None:
    """Neither that of a file with `model:`, nor one of several models, which is named with its own namespace."""
    if set_to in ("another", "def"):
        with pytest.raises(Refused, match=f"--set namespace={set_to}: .* rename the fleet 'default.small'"):
            _refuse_rename("default.small", set_to)
    else:
        _refuse_rename("default.small", set_to)


def test_a_frontend_that_starts_is_not_shown_as_draining():
    looks: list[dict[str, tuple[str, int]]] = [
        {"f0": ("ready", 0)},
        {"f0": ("ready", 0), "f1": ("draining", 1)},
        {"f0": ("draining", 0), "f1": ("ready", 1)},
        {"f1": ("ready", 1)},
    ]
    steps = [sorted(_steps(*pair), key=lambda event: event.id) for pair in zip(looks, looks[1:], strict=False)]
    assert steps == [[], [Event("draining", "f0", 0), Event("started", "f1", 1)], [Event("gone", "f0", 0)]]


# ---- a restart of workers that no launcher runs: the command itself orders it ------------------------------------


class ByHand:
    """Workers under a service manager, and `restart`, which does not wait for heartbeats before it begins."""

    def __init__(self, fleet: OpenFleet, *names: str, heartbeat_s: float = 0.0) -> None:
        self.fleet, self.registry = msgspec.structs.replace(fleet, heartbeat_s=heartbeat_s), fleet.registry
        self.infos = {n: msgspec.structs.replace(worker(n), state=WorkerState.READY, process="1") for n in names}
        self.shown: list[Event] = []

    @classmethod
    async def joined(cls, fleet: OpenFleet, *names: str) -> Self:
        workers = cls(fleet, *names)
        await workers.join(*names)
        return workers

    async def join(self, *names: str, process: str = "1") -> None:
        for name in names:
            info = msgspec.structs.replace(self.infos[name], process=process)
            await retry_while_away(lambda info=info: self.registry.join(info, 600))  # type: ignore[misc]

    def restart(self, max_unavailable: int = 1, role: Role | None = None, force: bool = False) -> asyncio.Task[None]:
        return asyncio.create_task(restart(self.fleet, QUICK, role, max_unavailable, force, self.shown.append))

    async def told(self, name: str) -> None:
        await until(lambda: Event("draining", name) in self.shown)

    async def all_restart(self, restarting: asyncio.Task[None], *names: str) -> None:
        """They are the last ones."""
        for name in names:
            await self.told(name)
            await self.join(name, process="2")
        await restarting


async def test_a_restart_keeps_the_number_of_a_rollout_that_went_back(fleet: OpenFleet) -> None:
    """A launcher would take the next rollout for that one, and start workers with what it prepared for it."""
    rollout = fleet.registry.rollout
    assert await rollout.change(None, Rollout(Version(0, {}), Version(1, {}), phase=Phase.UNDONE))
    workers = await ByHand.joined(fleet, "a", "b")
    restarting = workers.restart(max_unavailable=2, force=True)
    await workers.all_restart(restarting, "a", "b")
    last = await rollout.read()
    assert last is not None and last.phase is Phase.DONE and last.new.generation == 0
    assert last.highest == 1, "the next rollout is number 2"


async def test_the_only_prefill_worker_restarts_by_force_alone_where_long_prompts_would_be_refused(
    fleet: OpenFleet,
) -> None:
    workers = ByHand(fleet, "a", "b", "p")
    for name in ("a", "b"):
        workers.infos[name] = msgspec.structs.replace(workers.infos[name], role=Role.DECODE)
    await workers.join("a", "b", "p")
    assert await fleet.registry.configuration.change(None, Version(0, {"routing": {"fallback": "refuse"}}))
    for role in (None, Role.PREFILL):
        with pytest.raises(Refused, match="^p: is the only prefill worker; .* use --force"):
            await workers.restart(role=role)
    restarting = workers.restart(role=Role.DECODE)
    await workers.all_restart(restarting, "a", "b")
    restarting = workers.restart(role=Role.PREFILL, force=True)
    await workers.all_restart(restarting, "p")


async def test_restart_continues_after_redis_outage(mortal: Server, fleet: OpenFleet) -> None:
    """One that gave up would leave half of them as they were."""
    workers = await ByHand.joined(fleet, "a", "b")
    restarting = workers.restart()
    await workers.told("a")
    mortal.stop()
    await asyncio.sleep(1)
    assert not restarting.done()
    mortal.start()
    await workers.join("b")
    await workers.join("a", process="2")
    await workers.all_restart(restarting, "b")
    assert workers.shown[-1] == Event("done", workers=2)


async def test_restart_orders_again_what_redis_did_not_take(fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was there when the command looked, and away when it ordered."""
    workers, steer, away = ByHand(fleet, "a", "b"), fleet.registry.steer, [RedisAway("it fails over")]

    async def first_away(*args: Any, **options: Any) -> list[str] | None:
        if away:
            raise away.pop()
        return await steer(*args, **options)

    monkeypatch.setattr(fleet.registry, "steer", first_away)
    await workers.join("a", "b")
    restarting = workers.restart()
    await workers.all_restart(restarting, "a", "b")
    assert not away and workers.shown[-1] == Event("done", workers=2)


async def test_restart_waits_for_workers_that_a_redis_without_its_data_has_not_heard_of(fleet: OpenFleet) -> None:
    workers = ByHand(fleet, "a", "b", heartbeat_s=1.5)
    await workers.join("a")
    restarting = workers.restart()
    await asyncio.sleep(0.3)
    await workers.join("b")  # its first heartbeat since
    await workers.all_restart(restarting, "a", "b")
    assert workers.shown[-1] == Event("done", workers=2)


async def test_restart_does_not_wait_for_workers_that_leave_for_good(fleet: OpenFleet) -> None:
    workers = await ByHand.joined(fleet, "a", "b", "c")
    restarting = workers.restart()
    await workers.told("a")
    await workers.registry.leave("a")  # to come back
    await order_drain(workers.registry, "c")
    await asyncio.sleep(0.5)  # in which the next one would be told
    assert workers.shown == [Event("draining", "a")]
    await workers.registry.leave("c")
    await workers.join("a", process="2")
    await workers.all_restart(restarting, "b")
    assert workers.shown[-2:] == [Event("left", "c"), Event("done", workers=2)]


async def test_restart_of_one_role_leaves_the_others(fleet: OpenFleet) -> None:
    workers = ByHand(fleet, "a", "b")
    workers.infos["b"] = msgspec.structs.replace(workers.infos["b"], role=workers.infos["a"].role.other)
    await workers.join("a", "b")
    restarting = workers.restart(role=workers.infos["b"].role)
    await workers.all_restart(restarting, "b")
    assert [event.id for event in workers.shown] == ["b", "b", ""]


async def test_interrupted_restart_tells_no_more_workers_and_the_next_one_begins_anew(fleet: OpenFleet) -> None:
    workers = await ByHand.joined(fleet, "a", "b")
    restarting = workers.restart()
    await workers.told("a")
    restarting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restarting
    rollout = await workers.registry.rollout.read()
    assert rollout is not None and (rollout.phase, rollout.why) == (Phase.UNDONE, "interrupted")
    await workers.join("a", process="2")
    assert "b" not in (await workers.registry.read()).orders
    workers.shown.clear()
    again = workers.restart()
    await workers.told("a")
    await workers.join("a", process="3")
    await workers.all_restart(again, "b")


async def test_restart_that_nobody_carries_out_is_given_up_with_the_reason(fleet: OpenFleet) -> None:
    workers = await ByHand.joined(fleet, "a", "b")
    quick = msgspec.structs.replace(QUICK, drain_timeout_s=0.5, start_timeout_s=0.5)
    with pytest.raises(Refused, match="nothing has changed for 1 s: a worker told to restart is not back"):
        await restart(workers.fleet, quick, None, 1, False, workers.shown.append)


class Outage:
    """Redis is away for a call, which takes longer than any patience. The commands' clock stands still otherwise."""

    LONG_S = 1e6

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
        call, self.now, self.comes, self.answers = getattr(kind, name), 0.0, False, 0

        async def away_once(*args: Any, **options: Any) -> Any:
            if self.comes:
                self.now, self.comes = self.now + self.LONG_S, False
                raise RedisAway("it fails over")
            self.answers += 1
            return await call(*args, **options)

        monkeypatch.setattr(kind, name, away_once)
        for module in (rollout_module, model_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    async def passes(self, command: asyncio.Task[Any]) -> None:
        """Returns when the command has looked again."""
        self.comes = True
        await until(lambda: not self.comes)
        before = self.answers
        await until(lambda: command.done() or self.answers >= before + 2)
        if command.done():
            await command  # raises why it has given up


async def test_restart_does_not_count_an_outage_in_its_patience(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(monkeypatch, Registry, "read")
    workers = await ByHand.joined(fleet, "a", "b")
    restarting = workers.restart()
    await workers.told("a")
    await outage.passes(restarting)
    await workers.join("a", process="2")
    await workers.all_restart(restarting, "b")
    assert workers.shown[-1] == Event("done", workers=2)


async def test_model_add_does_not_count_an_outage_in_its_patience(
    fleet: OpenFleet, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, shown = ModelStore(fleet.redis, namespace), list[str]()

    async def has_state(state: ModelState) -> None:
        listed = ModelList(1, {"a": ListedModel({"model": "demo"}, state)})
        assert await store.change(await store.read(), listed)

    await has_state(ModelState.ADDING)
    outage = Outage(monkeypatch, Registry, "frontends")
    following = asyncio.create_task(
        model_module._follow(fleet, "a", 60.0, lambda seen: shown.append(seen.state), added=True)
    )
    await until(lambda: shown == ["adding"])
    await outage.passes(following)
    await has_state(ModelState.SERVING)
    assert await following is None and shown == ["adding", "serving"]


async def test_restart_prints_steps_as_json(fleet: OpenFleet, capsys: pytest.CaptureFixture[str]) -> None:
    workers = await ByHand.joined(fleet, "a")
    restarting = asyncio.create_task(restart(workers.fleet, QUICK, None, 1, True, handle_module.print_json))
    printed = ""

    def drains() -> bool:
        nonlocal printed
        printed += capsys.readouterr().out
        return "draining" in printed

    await until(drains)
    await workers.join("a", process="2")
    await restarting
    assert [json.loads(line) for line in (printed + capsys.readouterr().out).splitlines()] == [
        {"event": "draining", "id": "a"},
        {"event": "restarted", "id": "a"},
        {"event": "done", "workers": 1},
    ]


def test_join_prints_token_as_json(mortal: Server) -> None:
    told = json.loads(CliRunner().invoke(app, ["join", "--json", "--redis", mortal.url, "--namespace", "n"]).stdout)
    assert Token.decode(told["PD_JOIN"]) == Token(mortal.url, "n")
    assert told["command"] == "orchestrator worker --role decode"


async def test_long_redis_outage_ends_command(
    mortal: Server, fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_module, "_REDIS_PATIENCE_S", 0.0)
    mortal.stop()
    with pytest.raises(RedisAway):
        await retry_while_away(fleet.registry.workers)
