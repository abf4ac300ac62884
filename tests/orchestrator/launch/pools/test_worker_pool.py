"""The launcher's workers against the desired ratio: real worker processes (simulated engines) on a real Redis."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from unittest.mock import AsyncMock, Mock
from urllib.parse import urlsplit

import msgspec
import pytest
from support_redis import RedisOnPort, worker
from support_relay import Relay
from support_steering import set_desired
from support_wait import DEADLINE_S

from orchestrator.cli.handle import FleetHandle, open_fleet
from orchestrator.cli.look.frontend import fleet_status
from orchestrator.config.settings import Config, Refused, parse_config
from orchestrator.launch import supervise
from orchestrator.launch.commands import Setup
from orchestrator.launch.decisions.reconcile import Drain, Flip, PlannedWorker
from orchestrator.launch.host import machine
from orchestrator.launch.host.machine import MachineShares
from orchestrator.launch.host.process import adopt_orphans, group_alive
from orchestrator.launch.host.run_folder import RunFolder
from orchestrator.launch.machines import LocalMachine
from orchestrator.launch.pools.worker_pool import WorkerPool
from orchestrator.launch.registry_watch import RegistryWatch, Snapshot
from orchestrator.process.parent import started_ticks
from orchestrator.process.tasks import cancelled
from orchestrator.store.client import connect
from orchestrator.store.fields import Launcher
from orchestrator.store.planned import Holder
from orchestrator.store.registry import Registry
from orchestrator.store.steering import Steering
from orchestrator.types import DesiredRatio, Role, WorkerState

pytestmark = pytest.mark.slow  # real worker processes


class Pool:
    """A pool kept equal to the desired ratio, and the commands that a person would give."""

    def __init__(
        self, pool: WorkerPool, watch: RegistryWatch, registry: Registry, fleet: Steering, config: Config
    ) -> None:
        self.pool = pool
        self.watch = watch
        self.registry = registry
        self.fleet, self.config = fleet, config
        self.ever: set[int] = set()

    @property
    def snapshot(self) -> Snapshot:
        return self.watch.snapshot

    def roles(self) -> dict[str, str]:
        """Ready workers and their roles."""
        infos = self.snapshot.workers.values()
        return {info.id: info.role.value for info in infos if info.state is WorkerState.READY}

    def pids(self) -> dict[str, int]:
        return {name: slot.process.pid for name, slot in self.pool.slots.items()}

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            self.ever |= set(self.pids().values()) - {0}
            assert time.monotonic() < deadline, f"not in time: {what}; {self.roles()}, {self.snapshot.desired}"
            await asyncio.sleep(0.02)
        self.ever |= set(self.pids().values()) - {0}

    async def until_ratio(self, prefill: int, decode: int) -> None:
        def there() -> bool:
            roles = list(self.roles().values())
            settled = not self.snapshot.orders and len(roles) == len(self.pool.slots)
            return settled and (roles.count("prefill"), roles.count("decode")) == (prefill, decode)

        await self.until(there, f"{prefill}P{decode}D")


@asynccontextmanager
async def running_pool(tmp_path: Path, prefill: int, decode: int, relay: Relay | None = None) -> AsyncIterator[Pool]:
    """With a `relay`, which listens already, workers reach Redis by that alone."""
    adopt_orphans()
    server = RedisOnPort()
    url = await server.start(tmp_path)
    for_workers = url
    if relay is not None:
        relay.target = "127.0.0.1", urlsplit(url).port or 0
        for_workers = url.replace(f":{relay.target[1]}", f":{relay.port}")
    patch = pytest.MonkeyPatch()
    patch.setattr(supervise, "BACKOFF_S", 0.1)
    config = parse_config(
        {
            "model": "sim-model",
            "engine": "sim",
            "namespace": f"pool-{os.getpid()}",
            "redis": {"url": for_workers, "timeout_s": 5},
            "workers": {
                "timeout_s": 4 if relay is None else 1,
                "prefill": {"replicas": prefill},
                "decode": {"replicas": decode},
            },
            "launcher": {"stop_timeout_s": 5},
        }
    )
    folder = RunFolder(config.namespace)
    folder.claim()
    redis = await connect(url, 5)
    registry = Registry(redis, config.namespace)
    pool = WorkerPool(
        registry,
        LocalMachine(config),
        lambda name, line: None,
        lambda process: None,
        Setup(0, config, folder.write_config(config)),
    )
    watch = RegistryWatch(registry, pool.update)
    async with open_fleet(FleetHandle(config.namespace, url, None, config)) as fleet:
        running = Pool(pool, watch, registry, Steering(fleet.registry, fleet.queue, 0), config)
        await pool.hold_ids()
        watching = asyncio.create_task(watch.run())
        try:
            await set_desired(registry, prefill, decode, "test")
            await running.until_ratio(prefill, decode)
            yield running
        finally:
            await cancelled(watching)
            await pool.close()
            await redis.aclose()
            await server.stop()
            folder.remove()
            patch.undo()
    assert pool.slots == {}
    assert not [pid for pid in running.ever if started_ticks(pid) is not None or group_alive(pid)]


@asynccontextmanager
async def hand_started(running: Pool, role: Role, worker_id: str) -> AsyncIterator[asyncio.subprocess.Process]:
    config = running.config
    command = [sys.executable, "-m", "workers.main", role.value, "--id", worker_id, "--redis", config.redis.url]
    process = await asyncio.create_subprocess_exec(
        *command, "--config", str(RunFolder(config.namespace).path / "config.yaml"), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def test_only_a_fleet_that_has_had_decode_workers_needs_a_stand_in(tmp_path):
    config = parse_config({"model": "sim-model", "engine": "sim"})
    registry = Registry(AsyncMock(), "none")
    pool = WorkerPool(
        registry, LocalMachine(config), lambda *line: None, lambda process: None, Setup(0, config, tmp_path)
    )
    loading = [PlannedWorker("worker-0", Role.PREFILL, True), PlannedWorker("worker-1", Role.DECODE, False)]
    assert pool.actions(DesiredRatio(1, 1), loading) == []
    assert pool.actions(DesiredRatio(1, 1), [msgspec.structs.replace(worker, ready=True) for worker in loading]) == []
    assert pool.actions(DesiredRatio(1, 1), loading) == [Flip("worker-0", Role.DECODE, stands_in=True)]
    assert pool.actions(DesiredRatio(1, 0), loading) == [Drain("worker-1")], "none is wanted"


@pytest.mark.parametrize("empty", [True, False], ids=["Redis is empty", "Redis was away"])
async def test_nothing_is_done_before_all_are_back_in_a_registry_that_has_lost_them(tmp_path, empty):
    """Another launcher's, or one by hand, is not missing: it has not said yet that it is there."""
    config = parse_config({"model": "sim-model", "engine": "sim"})
    pool = WorkerPool(Registry(AsyncMock(), "none"), LocalMachine(config), Mock(), Mock(), Setup(0, config, tmp_path))
    pool.start = AsyncMock()  # type: ignore[method-assign]
    desired, now = DesiredRatio(1, 1, "test"), time.monotonic()
    there, replace = Snapshot(launchers={pool.launcher_id: Launcher()}, desired=desired), msgspec.structs.replace
    both = {"d": worker("d", Role.DECODE), "p": worker("p", Role.PREFILL)}
    await pool.update(replace(there, workers=both, read_at=now - 1))
    await pool.update(replace(there, launchers={} if empty else there.launchers, was_away=not empty, read_at=now))
    await pool.update(replace(there, read_at=now + config.workers.timeout_s - 0.1))
    assert not pool.start.called
    workers = {"d": worker("d", Role.DECODE)}
    await pool.update(replace(there, workers=workers, read_at=now + config.workers.timeout_s))
    pool.start.assert_called_once()
    assert pool.start.call_args.args[1] == [Role.PREFILL]


async def test_a_launcher_whose_own_connection_fails_again_and_again_acts_on_what_it_sees(tmp_path):
    """Its claim holds between, so no other launcher leads in its place."""
    config = parse_config({"model": "sim-model", "engine": "sim"})
    pool = WorkerPool(Registry(AsyncMock(), "none"), LocalMachine(config), Mock(), Mock(), Setup(0, config, tmp_path))
    pool.start = AsyncMock()  # type: ignore[method-assign]
    there = Snapshot(launchers={pool.launcher_id: Launcher()}, workers={"d": worker("d", Role.DECODE)})
    for second in range(0, 40, 2):
        fails, desired = second % 4 == 0, DesiredRatio(1 if second > 9 else 0, 1, "test")
        snapshot = msgspec.structs.replace(there, desired=desired, was_away=fails, read_at=1000.0 + second)
        await pool.update(snapshot)
        assert pool.sees_all(snapshot)
    assert pool.start.call_args.args[1] == [Role.PREFILL]
    # One that is lost meanwhile is waited for once, though the connection fails on.
    for second in range(40, 45, 2):
        snapshot = msgspec.structs.replace(snapshot, workers={}, was_away=True, read_at=1000.0 + second)
        await pool.update(snapshot)
        assert pool.sees_all(snapshot) is (second == 44)


async def test_a_pool_finds_room_for_what_was_rolled_out(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "has_cuda_vllm", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    two, one = (
        parse_config({"model": "m", "workers": {"engine_args": {"tensor_parallel_size": size}}}) for size in (2, 1)
    )
    here = LocalMachine(two)
    pool = WorkerPool(AsyncMock(), here, Mock(), Mock(), Setup(0, two, tmp_path))
    assert here.room == 2 and len(here.fitting([Role.DECODE] * 4)) == 2
    pool.setup = Setup(1, one, tmp_path)
    assert pool._holder.held.room == 4 and len(here.fitting([Role.DECODE] * 4)) == 4


async def test_of_two_models_that_grow_at_once_one_gets_the_last_room(tmp_path, monkeypatch, caplog):
    """Both have seen that there is room, and wait for the registry."""
    monkeypatch.setattr(machine, "find_gpus", lambda: ["0"])
    monkeypatch.setattr(machine, "has_cuda_vllm", lambda: True)
    monkeypatch.setattr(WorkerPool, "_run", AsyncMock())
    configs = [parse_config({"model": "m", "namespace": name, "idle_after_s": 60}) for name in ("first", "second")]
    shares, both = MachineShares(*configs), asyncio.Barrier(2)

    async def claimed(*_: object, holder: Holder) -> list[str]:
        await both.wait()
        return [f"{holder.named}-0"]

    pools = []
    for config in configs:
        registry, setup = Registry(AsyncMock(), config.namespace), Setup(0, config, tmp_path, config.namespace)
        registry.steer = claimed  # type: ignore[assignment, method-assign]
        machines = LocalMachine(config, shares)
        assert machines.fitting([Role.DECODE]) == [Role.DECODE]
        pools.append(WorkerPool(registry, machines, Mock(), Mock(), setup))
    await asyncio.gather(*(pool.start(Snapshot().seen, [Role.DECODE]) for pool in pools))
    assert sorted(len(pool.slots) for pool in pools) == [0, 1] and "this machine has 0 left of 1" in caplog.text


async def test_last_decode_worker_is_removed_only_by_force(tmp_path):
    async with running_pool(tmp_path, 0, 1) as running:
        for command in (
            running.fleet.change_role("worker-0", Role.PREFILL, False),
            running.fleet.drain("worker-0", False),
        ):
            with pytest.raises(Refused, match="last decode worker.*--force"):
                await command
        with pytest.raises(Refused, match="decode=0: expected an integer >= 1"):
            await running.fleet.scale(None, 0)
        with pytest.raises(Refused, match="'worker-9' is not in the fleet; there: worker-0"):
            await running.fleet.drain("worker-9", False)
        assert await running.fleet.change_role("worker-0", Role.PREFILL, force=True)
        await running.until(lambda: running.roles() == {"worker-0": "prefill"}, "forced")


async def test_a_worker_that_cannot_reach_redis_lives_on_and_one_that_stands_still_is_killed(tmp_path):
    relay = Relay("", 0)
    async with relay.listening(), running_pool(tmp_path, 1, 1, relay) as running:
        before, target = running.pids(), relay.target
        relay.cut()
        await running.until(lambda: not running.snapshot.workers, "the registry has lost both")
        os.kill(before["worker-1"], signal.SIGSTOP)
        try:
            pid = running.pids
            await running.until(lambda: pid()["worker-1"] not in (0, before["worker-1"]), "the hung one was killed")
        finally:
            with suppress(ProcessLookupError):
                os.kill(before["worker-1"], signal.SIGCONT)
        await asyncio.sleep(2 * running.config.workers.timeout_s)  # the other may have been missed for less
        assert running.pids()["worker-0"] == before["worker-0"]
        relay.target = target
        await running.until_ratio(1, 1)
        assert running.pids()["worker-0"] == before["worker-0"]


async def test_a_worker_that_another_launcher_has_started_meanwhile_is_given_up(tmp_path):
    """This host was cut off for so long that its ids were free. The other worker lives: it answers at its address."""
    async with running_pool(tmp_path, 0, 1) as running:
        listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        address = f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        mine = running.snapshot.workers["worker-0"]
        theirs = msgspec.structs.replace(
            mine,
            process="elsewhere/1/1",
            request_address=address,
            kv=msgspec.structs.replace(mine.kv, engine_id="other"),
        )
        try:
            await running.registry.refresh_launcher("other", Launcher({"worker-0": Role.DECODE}), 60)
            await running.registry.join(theirs, 60)
            await running.until(lambda: not running.pool.slots, "it is ended, and not started again")
            await asyncio.sleep(1)  # in which nothing is started
            there = await running.registry.worker("worker-0")
            assert not running.pool.slots and there is not None and there.process == theirs.process
        finally:
            listener.close()


async def test_workers_started_by_hand_come_on_top_until_scale_drains_them(tmp_path):
    async with running_pool(tmp_path, 0, 1) as running, hand_started(running, Role.DECODE, "by-hand") as process:
        before = running.pids()
        await running.until(lambda: running.roles().keys() == {"worker-0", "by-hand"}, "it has joined")
        for _ in range(5):  # readings, its claim of the id and then its entry among them
            await running.watch.read()
            await asyncio.sleep(0.1)
        assert running.roles().keys() == {"worker-0", "by-hand"} and running.pids() == before
        await running.fleet.scale(None, 2)
        await running.watch.read()
        assert running.pids() == before, "it counts: there are two"
        await running.fleet.scale(None, 1)
        await running.until(lambda: running.roles().keys() == {"worker-0"}, "drained")
        assert await process.wait() == 0, "and not to be started again"
        assert running.pids() == before


async def test_role_and_drain_of_one_that_comes_on_top_end_no_other(tmp_path):
    async with running_pool(tmp_path, 1, 2) as running, hand_started(running, Role.DECODE, "by-hand") as process:
        before, desired = running.pids(), await running.registry.desired()
        await running.until(lambda: "by-hand" in running.roles(), "it has joined")
        for role in (Role.PREFILL, Role.DECODE):
            assert await running.fleet.change_role("by-hand", role, force=False)
            await running.until(lambda role=role: running.roles().get("by-hand") == role.value, "its role is another")
        assert await running.fleet.drain("by-hand", force=False)
        assert await process.wait() == 0
        for _ in range(5):
            await running.watch.read()
            await asyncio.sleep(0.1)
        assert running.pids() == before and await running.registry.desired() == desired
        await running.until_ratio(1, 2)


async def test_status_from_the_registry_alone(tmp_path):
    async with running_pool(tmp_path, 1, 1) as running:
        seen = await fleet_status(FleetHandle(running.config.namespace, running.config.redis.url, None, running.config))
        assert [(w["id"], w["role"], w["state"], w["engine"]) for w in seen["workers"]] == [
            ("worker-1", "decode", "ready", "sim"),
            ("worker-0", "prefill", "ready", "sim"),
        ]
        assert seen["workers"][0]["blocks_free"] is None, "loads are not in the registry"
        assert seen["queue"] == {"requests": 0, "tokens": 0, "claimed": 0}
        assert (seen["desired"]["prefill"], seen["desired"]["decode"]) == (1, 1)


def test_a_unit_that_finds_no_room_to_start_again_is_missed():
    """Else a rollout to a size that no node has room for would drain one unit after the other."""
    pool: WorkerPool = object.__new__(WorkerPool)
    waits = {"new": None, "again": supervise.Exit(75, "", True)}
    pool.slots = {
        name: Mock(process=Mock(stage=supervise.Stage.PLACING, last_exit=last)) for name, last in waits.items()
    }
    pool.slots["runs"] = Mock(process=Mock(stage=supervise.Stage.STARTING, last_exit=None))
    assert pool.waiting_for_room == {"new"}


async def test_a_worker_whose_machine_takes_nothing_back_leaves_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    config = parse_config({"model": "m", "engine": "sim"})
    machines = Mock(give_back=AsyncMock(side_effect=ValueError("no such place")))
    pool = WorkerPool(AsyncMock(), machines, Mock(), Mock(), Setup(0, config, Path("c.yaml")))
    machines.worker.side_effect = OSError("nothing runs here")
    pool.supervise("worker-0", Role.DECODE)
    await pool.close()
    assert not pool.slots and "worker-0: what it has of its machine is not given back" in caplog.text


async def test_times_that_were_rolled_out_hold_for_what_starts_and_leaves_then() -> None:
    """A new configuration may take longer to load, or to drain, than the one that the launcher was started with."""
    old = parse_config({"model": "m", "engine": "sim", "workers": {"start_timeout_s": 60, "drain_timeout_s": 5}})
    workers = {"start_timeout_s": 3600, "drain_timeout_s": 600, "timeout_s": 8}
    new = parse_config({"model": "m", "engine": "sim", "workers": workers})
    machines = Mock(give_back=AsyncMock(), placed=AsyncMock())
    machines.worker.side_effect = OSError("nothing runs here")
    pool = WorkerPool(AsyncMock(), machines, Mock(), Mock(), Setup(0, old, Path("c.yaml")))
    pool.setup = Setup(1, new, Path("c.yaml"))
    pool.supervise("worker-0", Role.DECODE)
    process = pool.slots["worker-0"].process
    pool.setup = Setup(2, old, Path("c.yaml"))
    async with asyncio.timeout(DEADLINE_S):
        while not machines.worker.called:
            await asyncio.sleep(0.01)
    assert process.start_timeout_s == 60, "it has gone back meanwhile"
    pool.setup = Setup(3, new, Path("c.yaml"))
    pool.restart_now()
    async with asyncio.timeout(DEADLINE_S):
        while process.start_timeout_s != 3600:
            await asyncio.sleep(0.01)
    assert pool._holder.ttl_s == 8
    pool.setup = Setup(4, old, Path("c.yaml"))
    assert pool._leave_deadline_s(pool.slots["worker-0"]) > 600, "it drains by what it was started with"
    await pool.close()
