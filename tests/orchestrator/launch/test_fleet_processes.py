"""What the launcher takes for dead before it starts: a real registry, entries of processes that run and that do not."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, PropertyMock

import msgspec
import pytest
from support_redis import Server, fresh_namespace, worker
from support_steering import set_desired
from support_wait import DEADLINE_S, until

from orchestrator.config.models import namespace_of
from orchestrator.config.settings import Config, LauncherConfig, Refused, ScaleConfig, parse_config
from orchestrator.launch import fleet_processes, launcher
from orchestrator.launch.commands import Setup
from orchestrator.launch.console import Console
from orchestrator.launch.fleet_processes import FleetProcesses, StartFailed, StartLater
from orchestrator.launch.host.process import LocalProcess, ProcessGroup, ProcessSpec
from orchestrator.launch.machines import LocalMachine
from orchestrator.launch.pools.frontend_pool import FrontendPool
from orchestrator.launch.pools.model_list import begin_list
from orchestrator.launch.pools.worker_pool import WorkerPool
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.launch.rollout import cannot_start
from orchestrator.launch.supervise import Exit, Stage, Supervised
from orchestrator.process.parent import EXIT_AGAIN, own_identity
from orchestrator.store.client import Redis
from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.fields import Frontend, Launcher
from orchestrator.store.operator.log_levels import LogLevels
from orchestrator.store.operator.models import ListedModel, ModelList, ModelStore
from orchestrator.store.planned import BY_HAND
from orchestrator.store.registry import Registry
from orchestrator.types import DesiredRatio, Offered, Role, WorkerInfo

pytestmark = pytest.mark.slow  # a server of its own


def of(worker_id: str, process: str) -> WorkerInfo:
    return msgspec.structs.replace(worker(worker_id), pid=os.getpid(), process=process)


CONFIG = parse_config({"model": "m", "engine": "sim"})


def named(redis: Redis, **sections: Any) -> tuple[Config, Registry]:
    """The configuration of a fleet of its own, and its registry."""
    config = parse_config({"model": "m", "engine": "sim", "namespace": fresh_namespace(), **sections})
    return config, Registry(redis, config.namespace)


def processes_of(
    config: Config, registry: Registry, folder: Path, machine: LocalMachine | None = None
) -> FleetProcesses:
    setup, machine = Setup(0, config, folder / "c.yaml"), machine or LocalMachine(config)
    frontends = FrontendPool(config, machine, lambda *line: None)
    fleet = FleetProcesses(config, registry, machine, Console(), lambda *noted: None, setup, AsyncMock(), frontends)
    fleet.frontends.serve()
    return fleet


async def test_only_ended_members_leave_registry(redis: Redis, tmp_path: Path):
    """Containers repeat host names and pids: neither a worker of another one nor a pid given anew is one of ours."""
    place, pid, ticks = own_identity().split("/")
    config, registry = named(redis)
    for info in (
        of("runs", own_identity()),
        of("its-pid-is-anothers-now", f"{place}/{pid}/{int(ticks) - 1}"),
        of("of-another-container", f"another/{pid}/{int(ticks) - 1}"),
        of("of-no-process-here", "another/999999999/1"),
    ):
        await registry.join(info, 60)
    await registry.refresh_launcher(f"{place}/{pid}/{int(ticks) - 1}", Launcher(), 60)
    await registry.refresh_launcher("another/1/1", Launcher(), 60)
    await registry.refresh_launcher(f"{BY_HAND}{place}/{pid}/{int(ticks) - 1}", Launcher(), 60)
    fleet = processes_of(config, registry, tmp_path)
    await fleet.remove_dead_entries()
    assert set(await registry.workers()) == {"runs", "of-another-container", "of-no-process-here"}
    assert set(await registry.launchers()) == {"another/1/1"}


async def test_who_takes_the_id_of_an_ended_worker_meanwhile_stays(redis: Redis, tmp_path: Path, monkeypatch):
    config, registry = named(redis)
    fleet = processes_of(config, registry, tmp_path)

    async def read(worker_id: str) -> None:
        await registry.join(of(worker_id, "another/1/1"), 60)

    monkeypatch.setattr(registry, "worker", read)  # it was not there, and is now
    ended: Any = SimpleNamespace(name="a", parts=[SimpleNamespace(name="a", identity="here/1/1")])
    await fleet._pool._deregister(ended)
    assert set(await registry.workers()) == {"a"}


class LeftRunning(LocalMachine):
    """As machines on which an earlier launcher left workers, and of one of them only a part."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.ended: list[str] = []

    async def left_running(self) -> dict[str, bool]:
        return {"worker-2": True, "worker-3": True, "worker-0": True, "worker-1": True}

    async def take_over(self, units: Mapping[str, Role | None]) -> dict[str, Role]:
        started = {"worker-0": Role.PREFILL, "worker-1": Role.PREFILL}
        return {unit: role for unit, role in started.items() if unit in units}

    async def give_back(self, unit: str) -> None:
        self.ended.append(unit)


async def test_launcher_takes_over_workers_of_dead_launcher(redis: Redis, tmp_path: Path, monkeypatch):
    config, registry = named(redis, workers={"timeout_s": 1.0, "prefill": {"replicas": 0}})
    await registry.join(msgspec.structs.replace(worker("worker-1"), role=Role.DECODE), 60)  # it was flipped
    await registry.join(worker("worker-3"), 60)  # a rank of it has ended, which the others have not noticed yet
    await registry.refresh_launcher("lives/1/1", Launcher({"worker-2": Role.DECODE}), 60)
    dead = Launcher({"worker-0": Role.PREFILL, "worker-1": Role.DECODE})
    await registry.refresh_launcher("dead/1/1", dead, 0.5)
    taken: dict[str, Role] = {}
    monkeypatch.setattr(WorkerPool, "supervise", lambda pool, worker_id, role: taken.update({worker_id: role}))
    machine = LeftRunning(config)
    fleet = processes_of(config, registry, tmp_path, machine)
    monkeypatch.setattr(FrontendPool, "update", AsyncMock())
    await fleet.start()
    await fleet.end()
    assert taken == {"worker-0": Role.PREFILL, "worker-1": Role.DECODE}
    assert machine.ended == ["worker-3"], "worker-2 is another launcher's"


async def test_what_is_set_survives_a_launcher_that_starts_when_all_entries_have_run_out(
    redis: Redis, tmp_path: Path, monkeypatch
):
    """Redis was away for longer than an entry lives, and the fleet's own launcher comes back a moment later."""
    monkeypatch.setattr(launcher, "COME_BACK_S", 2.0)
    config, registry = named(redis)
    levels = LogLevels(redis, config.namespace)
    first, runs_on = Launcher({"worker-0": Role.DECODE}), asyncio.Event()
    await registry.refresh_launcher("other/1/1", first, 0.1)
    rollout = Rollout(Version(0, {}), Version(1, {}), phase=Phase.DONE)
    await registry.rollout.write(rollout)
    await levels.set("DEBUG")
    await set_desired(registry, 3, 1, "scale")
    await asyncio.sleep(0.2)

    async def come_back() -> None:
        await until(lambda: registry.has_settings())
        await asyncio.sleep(0.5)
        await registry.refresh_launcher("other/1/1", first, 60)
        runs_on.set()

    async with asyncio.TaskGroup() as together:
        together.create_task(come_back())
        assert await launcher._list_models(redis, {"": config}, {}) is None
        fleet = processes_of(config, registry, tmp_path)
        await fleet._begin_version()
        await fleet._pool.begin(fleet.desired)
    assert await registry.rollout.read() == rollout and await levels.of("worker-0") == [None, "DEBUG"]
    desired = await registry.desired()
    assert desired is not None and (desired.prefill, desired.set_by) == (3, "scale")


async def test_workers_by_hand_whose_heartbeats_are_rare_have_the_time_to_come_back(redis: Redis, monkeypatch):
    """They are all that lives of the fleet: a launcher that does not see them takes itself for alone."""
    monkeypatch.setattr(launcher, "COME_BACK_S", 0.0)
    config, registry = named(redis)
    await registry.join(worker("mine"), 0.1)
    await set_desired(registry, 3, 1, "scale")
    await asyncio.sleep(0.2)

    async def beat() -> None:
        await asyncio.sleep(config.workers.heartbeat_s)
        await registry.join(worker("mine"), 60)

    async with asyncio.TaskGroup() as together:
        together.create_task(beat())
        await launcher._list_models(redis, {"": config}, {})
        assert set(await registry.workers()) == {"mine"}


async def test_a_launcher_that_starts_where_nothing_is_set_or_all_have_left_waits_for_nobody(redis: Redis, monkeypatch):
    monkeypatch.setattr(launcher, "COME_BACK_S", 600.0)
    config, registry = named(redis)
    await launcher._list_models(redis, {"": config}, {})
    monkeypatch.setattr(launcher, "COME_BACK_S", 0.5)
    await registry.refresh_launcher("other/1/1", Launcher(), 60)
    await set_desired(registry, 3, 1, "scale")
    await asyncio.sleep(0.6)
    monkeypatch.setattr(launcher, "COME_BACK_S", 600.0)
    await launcher._list_models(redis, {"": config}, {})  # a launcher is there
    await registry.leave_launcher("other/1/1")
    async with asyncio.timeout(DEADLINE_S):
        await launcher._list_models(redis, {"": config}, {})


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """For how long the launcher waits, seconds; it does not."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(launcher, "asyncio", SimpleNamespace(sleep=sleep))
    return waits


async def ran_out(redis: Redis, timeout_s: float) -> tuple[Config, Registry]:
    """A fleet that may live, and whose entries have just run out. `timeout_s`: by this launcher's file."""
    config, registry = named(redis, workers={"timeout_s": timeout_s})
    await registry.join(worker("mine"), 60)
    await set_desired(registry, 3, 1, "scale")
    await redis.delete(registry.keys.worker("mine"))
    return config, registry


async def test_a_launcher_waits_for_no_fleet_longer_than_operators_do_and_says_so(redis: Redis, waits, caplog):
    config, _ = await ran_out(redis, timeout_s=1000.0)
    with caplog.at_level(logging.INFO, "pd.launcher"):
        await launcher._list_models(redis, {"": config}, {})
    assert waits == [pytest.approx(launcher.MOST_COME_BACK_S, abs=1.0)]
    assert "a fleet of this name: it has 30 s to come back" in caplog.text


@pytest.mark.parametrize("told_by", ["the configuration", "the rollout"])
async def test_workers_that_were_started_with_another_file_have_the_time_to_come_back(redis: Redis, waits, told_by):
    config, registry = await ran_out(redis, timeout_s=1.0)
    theirs, mine = (Version(i, {"workers": {"timeout_s": it}}) for i, it in enumerate((40.0, 1.0)))
    await registry.configuration.write(theirs if told_by == "the configuration" else mine)
    if told_by == "the rollout":
        await registry.rollout.write(Rollout(theirs, mine))
    await launcher._list_models(redis, {"": config}, {})
    assert waits == [pytest.approx(20.0, abs=1.0)]


async def test_the_list_of_a_fleet_that_runs_is_no_other_files_to_delete(redis: Redis):
    config, _ = named(redis)
    store = ModelStore(redis, config.namespace)
    listed = ModelList(1, {"a": ListedModel({"model": "demo"})})
    assert await store.change(None, listed)
    of_model = Registry(redis, namespace_of(config.namespace, "a"))
    await of_model.refresh_launcher("other/1/1", Launcher(), 60)
    with pytest.raises(Refused, match=r"namespace: under .* runs a fleet of several models \(a\); choose another"):
        await launcher._list_models(redis, {"": config}, {})
    assert await store.read() == listed
    await of_model.leave_launcher("other/1/1")
    await of_model.refresh_launcher(f"{BY_HAND}other/2/1", Launcher({"mine": Role.DECODE}), 60)  # no launcher
    await launcher._list_models(redis, {"": config}, {})
    assert await store.read() is None


async def test_of_two_launchers_that_start_at_once_none_deletes_what_the_other_has_begun(redis, monkeypatch):
    """Both find the list of a fleet that has ended."""
    config, _ = named(redis)
    store = ModelStore(redis, config.namespace)
    assert await store.change(None, ModelList(1, {"old": ListedModel({"model": "demo"})}))
    is_followed = ModelStore.is_followed

    async def begun_meanwhile(self: ModelStore, listed: ModelList, has_ended: Callable[[str], bool]) -> bool:
        found = await is_followed(self, listed, has_ended)
        monkeypatch.undo()
        await begin_list(redis, config.namespace, {"models": {"a": {"model": "demo"}}})
        return found

    monkeypatch.setattr(ModelStore, "is_followed", begun_meanwhile)
    with pytest.raises(Refused, match=r"runs a fleet of several models \(a\)"):
        await launcher._list_models(redis, {"": config}, {})
    listed = await store.read()
    assert listed is not None and list(listed.models) == ["a"]


async def test_the_list_of_a_fleet_that_comes_back_to_redis_is_no_other_files_to_delete(redis: Redis, monkeypatch):
    """Redis was away for longer than an entry lives, of each of its models."""
    monkeypatch.setattr(launcher, "COME_BACK_S", 2.0)
    config, _ = named(redis)
    store = ModelStore(redis, config.namespace)
    listed = ModelList(1, {"a": ListedModel({"model": "demo"})})
    assert await store.change(None, listed)
    of_model = Registry(redis, namespace_of(config.namespace, "a"))
    await of_model.refresh_launcher("other/1/1", Launcher(), 0.1)
    await set_desired(of_model, 1, 1, "scale")
    await asyncio.sleep(0.2)

    async def come_back() -> None:
        await asyncio.sleep(0.5)
        await of_model.refresh_launcher("other/1/1", Launcher(), 60)

    async with asyncio.TaskGroup() as together:
        together.create_task(come_back())
        with pytest.raises(Refused, match="runs a fleet of several models"):
            await launcher._list_models(redis, {"": config}, {})
    assert await store.read() == listed


@pytest.mark.parametrize(
    ("left", "alone"),
    [
        ({}, True),
        ({"worker-0": False}, True),
        ({"worker-0": False, "frontend-0@10.0.0.2": True}, False),
        (None, False),
    ],
)
async def test_a_place_on_which_nothing_runs_is_no_fleet(tmp_path: Path, left: dict[str, bool] | None, alone: bool):
    """It would go on with what was rolled out last, instead of what it is started with. None: another launcher runs the
    fleet, whose model is idle."""
    config = parse_config({"model": "m", "engine": "sim"})
    others, left = ({}, left) if left is not None else ({"other/1/1": Launcher()}, {})
    others[f"{BY_HAND}other/2/1"] = Launcher({"mine": Role.DECODE})  # a worker that loads, which is no launcher
    registry = AsyncMock(launchers=AsyncMock(return_value=others), workers=AsyncMock(return_value={}))
    machine = LocalMachine(config)
    machine.left_running = AsyncMock(return_value=left)
    fleet = processes_of(config, registry, tmp_path, machine)
    fleet._rolling.begin = AsyncMock()
    await fleet._begin_version()
    fleet._rolling.begin.assert_awaited_once_with(alone)


@pytest.fixture
def pools_rest(monkeypatch) -> None:
    """Nothing is started or ended: what the launcher decides beside its pools."""
    for pool in (FrontendPool, WorkerPool):
        monkeypatch.setattr(pool, "update", AsyncMock())


@pytest.mark.usefixtures("pools_rest")
async def test_a_redis_that_forgot_gets_the_configuration_back_after_the_ratio(redis, tmp_path: Path):
    """A frontend or an operator may have set the ratio again before the launcher looked."""
    config, registry = named(redis)
    fleet = processes_of(config, registry, tmp_path)
    await set_desired(registry, 1, 1, "scale")
    snapshot = Snapshot(desired=await registry.desired())
    await fleet._update(snapshot)
    known = await registry.configuration.read()
    assert known is not None and known.config, "what workers on other hosts and rollouts begin with"
    newer = msgspec.structs.replace(known, generation=7)
    await registry.configuration.write(newer)
    await fleet._update(snapshot)
    assert await registry.configuration.read() == newer, "another launcher's, or a rollout's"


@pytest.mark.usefixtures("pools_rest")
async def test_bounds_of_the_size_that_were_rolled_out_hold(redis, tmp_path: Path):
    """The launcher alone goes by them, and its own file has others."""
    config, registry = named(redis)
    fleet = processes_of(config, registry, tmp_path)
    grown = msgspec.structs.replace(config, scale=ScaleConfig(max_workers=3, grow_after_s=10))
    fleet._pool.setup = Setup(1, grown, tmp_path / "c.yaml")
    await set_desired(registry, 1, 1, "scale")
    workers = {name: worker(name, role) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))}
    launchers, desired = {fleet._pool.launcher_id: Launcher()}, await registry.desired()
    for now in range(0, 21, 10):  # twenty more are late each time
        late = Offered(ended=2 * now, late_first=2 * now, late=2 * now)
        frontends = {"f": Frontend("f", "", "", 0.0, late)}
        reading = {"workers": workers, "launchers": launchers, "frontends": frontends, "desired": desired}
        await fleet._update(Snapshot(**reading, read_at=float(now)))  # type: ignore[arg-type]
    wanted = await registry.desired()
    assert wanted is not None and (wanted.prefill, wanted.decode) == (2, 1)


@pytest.fixture
def led(tmp_path: Path, pools_rest) -> FleetProcesses:
    """Launchers of a fleet whose size follows its load, and that ends its workers when nobody asks for it."""
    scale = {"min_workers": 1, "max_workers": 4, "grow_after_s": 10}
    config = parse_config({"model": "m", "engine": "sim", "scale": scale, "idle_after_s": 60})
    registry = AsyncMock(restored=AsyncMock(side_effect=lambda held, found: found))
    fleet = processes_of(config, registry, tmp_path)
    fleet._came_up = True
    fleet._rolling = AsyncMock()
    return fleet


def seen(fleet: FleetProcesses, now: float, offered: Offered = Offered(), other: bool = False, **more: Any) -> Snapshot:
    """`other`: whether there is a launcher that goes before this one."""
    launchers = {fleet._pool.launcher_id: Launcher()} | ({"": Launcher()} if other else {})
    frontends = {"f": Frontend("f", "http://f", "p", offered=offered, **more)}
    workers = {name: worker(name, role) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))}
    desired = DesiredRatio(1, 1, "scale", 1.0)
    return Snapshot(workers=workers, frontends=frontends, launchers=launchers, desired=desired, read_at=now)


async def test_what_was_late_while_another_launcher_led_was_late_then(led: FleetProcesses):
    ended = late = 0
    for now in range(100):
        ended += 10
        late += 5 if 20 < now < 60 else 0
        offered = Offered(ended=ended, late_first=late, late=late)
        await led._update(seen(led, float(now), offered, other=20 < now < 80))
    led.registry.steer.assert_not_awaited()


async def test_nothing_is_decided_on_those_alone_who_came_back_to_redis_first(led: FleetProcesses):
    """Another frontend may have requests, another launcher old workers."""
    for now in range(0, 100, 10):
        await led._update(seen(led, float(now), idle_s=1.0))
    led._pool._complete_at = 104.0
    for now, decides in ((101.0, False), (105.0, True)):
        await led._update(seen(led, now, idle_s=900.0))
        assert led._rolling.follow.await_args.args[1] is decides
        assert bool(led.registry.steer.await_count) is decides


@pytest.mark.usefixtures("pools_rest")
async def test_crashes_while_redis_was_away_are_not_held_against_a_process(
    server: Server, redis, tmp_path, monkeypatch
):
    """A rollout would go back for them, and `up` would end for good."""
    config, registry = named(redis)
    fleet = processes_of(config, registry, tmp_path)
    monkeypatch.setattr("orchestrator.launch.supervise.BACKOFF_S", 0.01)
    launcher = LauncherConfig(restart_backoff_max_s=600)
    spec = ProcessSpec("w", [sys.executable, "-c", "raise SystemExit(75)"])
    process = Supervised("w", lambda: ProcessGroup([LocalProcess(spec, Mock())]), launcher, 60, Mock(), AsyncMock())
    monkeypatch.setattr(fleet, "_processes", lambda: [process])
    running = asyncio.create_task(process.run())
    try:
        await until(lambda: cannot_start(process))
        await fleet.watch.read()
        assert cannot_start(process)
        with pytest.raises(StartFailed):
            fleet._check_start(process)
        server.stop()
        await fleet.watch.read()
        fleet._check_start(process)
        server.start()

        async def is_forgiven() -> bool:
            await fleet.watch.read()
            return not cannot_start(process)

        await until(is_forgiven, "its crashes do not count")
    finally:
        process.request_stop()
        await running


@pytest.mark.parametrize(("code", "later"), [(EXIT_AGAIN, True), (1, False), (-9, False)])
async def test_a_start_that_a_process_wants_tried_again_is_told_from_one_that_failed(
    tmp_path: Path, code: int, later: bool
):
    """A service manager that takes 2 for an end for good would never start the fleet again."""
    fleet = processes_of(CONFIG, Mock(), tmp_path)
    end = Exit(code, "Redis cannot be used", was_ready=False, said=True)
    process = Mock(stage=Stage.PAUSING, last_exit=end, last_lines=[], crashes=3)
    process.name = "worker-0"
    with pytest.raises(StartFailed, match=r"worker-0 did not start: it .* \(Redis cannot be used\)") as raised:
        fleet._check_start(process)
    assert isinstance(raised.value, StartLater) is later


@pytest.mark.parametrize(("final", "shown"), [(False, "restarting"), (True, "cannot work as it is")])
async def test_a_process_that_would_fail_again_is_not_said_to_restart(tmp_path: Path, final: bool, shown: str):
    fleet = processes_of(CONFIG, Mock(), tmp_path)
    fleet._console = Mock()
    end = Exit(2, "why", was_ready=False, said=True, final=final)
    process = Mock(stage=Stage.PAUSING, last_exit=end, parts=(), pid=0)
    process.name = "frontend-0"
    fleet._show(process)
    fleet._console.stage.assert_called_once_with("frontend-0", shown, done=False)


async def test_what_a_process_leaves_that_drained_to_start_again_is_removed(tmp_path: Path):
    """It pauses before no start: a rollout has told it to."""
    fleet = processes_of(CONFIG, Mock(), tmp_path)
    fleet._shared_memory = Mock(remove_files_of=Mock(return_value=[]))
    process = Mock(stage=Stage.STARTING, last_exit=None, parts=(Mock(identity=own_identity()),), pid=0)
    process.name = "worker-0"
    fleet._show(process)
    await fleet.remove_shared_memory()
    fleet._shared_memory.remove_files_of.assert_called_once_with(os.getpid())


async def test_a_start_says_once_that_only_the_endpoint_is_not_ready(tmp_path: Path, monkeypatch, caplog):
    """The workers that decode may be on a host whose launcher is started later."""
    monkeypatch.setattr(fleet_processes, "_CONNECT_S", 0.0)
    fleet = processes_of(CONFIG, AsyncMock(), tmp_path)
    fleet._answers = AsyncMock(side_effect=[False] * 4 + [True])  # type: ignore[method-assign]
    await fleet.until_ready()
    (line,) = caplog.messages
    assert line.startswith("http://127.0.0.1:8000/ready is not, though all processes here are")


async def test_a_model_waits_for_frontends_though_another_answers_for_them(tmp_path: Path, monkeypatch, caplog):
    """Before they serve, nothing is late."""
    monkeypatch.setattr(fleet_processes, "_CONNECT_S", 0.0)
    fleet = processes_of(CONFIG, AsyncMock(), tmp_path)
    fleet._answers = AsyncMock(return_value=True)  # type: ignore[method-assign]
    stages, frontend = [Stage.STARTING] * 3, Mock()
    type(frontend).stage = PropertyMock(side_effect=lambda: stages.pop() if stages else Stage.READY)
    pool = fleet.frontends._pool
    pool.models.insert(0, Mock())
    pool.placed.append(Mock(process=frontend))
    await fleet.until_ready()
    assert not stages and not caplog.messages
