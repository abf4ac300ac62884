"""Who orders what in a rollout of several launchers: a real registry, launchers without processes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from support_redis import fresh_namespace, lose, worker

from orchestrator.config.settings import Config, ConfigError, parse_config
from orchestrator.config.shared import shared
from orchestrator.launch.commands import Setup
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.launch.rollout import RolloutRunner
from orchestrator.launch.supervise import Exit
from orchestrator.store.client import Redis
from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.fields import Launcher
from orchestrator.store.registry import Registry
from orchestrator.types import Role, WorkerInfo

pytestmark = pytest.mark.slow  # a server of its own
PATIENCE_S = 30.0


class Nobody:
    """A launcher's workers or frontends, of which there are none."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.slots: dict[str, Any] = {}
        self.waiting_for_room: set[str] = set()
        self.renewed = True
        self.hold_ids = AsyncMock()

    def restart_now(self) -> None:
        pass

    def of_generation(self, generation: int) -> list[Any]:
        return []


class Leader:
    """The launcher that orders; snapshots are handed to it."""

    def __init__(self, config: Config, registry: Registry) -> None:
        self.cannot, self.hangs = "", False  # why it cannot prepare; that it never ends to
        self.kind: type[Exception] = ConfigError  # of what it raises then

        async def prepare(changed: Config, generation: int) -> Setup:
            if self.hangs:
                await asyncio.Event().wait()
            if self.cannot:
                raise self.kind(self.cannot)
            return Setup(generation, changed, Path("unused"))

        self.workers, frontends = (Nobody(Setup(0, config, Path("unused"))) for _ in range(2))
        self.rolling = RolloutRunner(config, registry, self.workers, frontends, prepare)  # type: ignore[arg-type]
        self.registry, self.now = registry, 1000.0

    async def sees(self, others: dict[str, Launcher], leads: bool = True, was_away: bool = False) -> set[str]:
        """Act on what is there now. Returns who has been told to restart."""
        reading = msgspec.structs.asdict(await self.registry.read())
        snapshot = Snapshot(
            **reading | {"launchers": {"a": Launcher(generation=self.workers.setup.generation), **others}},
            rollout=await self.registry.rollout.read(),
            read_at=self.now,
            was_away=was_away,
        )
        await self.rolling.follow(snapshot, leads)
        return set((await self.registry.read()).orders)


@pytest.fixture
async def leader(redis: Redis) -> AsyncIterator[Leader]:
    times = {"drain_timeout_s": PATIENCE_S / 2, "start_timeout_s": PATIENCE_S / 2}
    config = parse_config({"model": "m", "engine": "sim", "namespace": fresh_namespace(), "workers": times})
    registry = Registry(redis, config.namespace)
    leader = Leader(config, registry)
    for info in (worker("decode-0", Role.DECODE), worker("decode-1", Role.DECODE)):
        await registry.join(info, 60)
    old, new = Version(0, shared(config)), Version(1, shared(config))
    assert await registry.rollout.change(None, Rollout(old, new))
    while leader.workers.setup.generation == 0:  # it prepares in a task
        assert await leader.sees({}) == set()
    yield leader
    await leader.rolling.close()


async def phase(leader: Leader) -> tuple[Phase, str]:
    rollout = await leader.registry.rollout.read()
    assert rollout is not None
    return rollout.phase, rollout.why


def renewed(info: WorkerInfo, worker_id: str = "") -> WorkerInfo:
    return msgspec.structs.replace(info, id=worker_id or info.id, generation=1, process="its successor")


async def test_rollout_waits_until_every_launcher_is_prepared(leader: Leader):
    held = {"decode-0": Role.DECODE, "decode-1": Role.DECODE}
    assert await leader.sees({"b": Launcher(held, 0)}) == set(), "b would start what it has: the old one"
    assert await leader.sees({"b": Launcher(held, 1)}) == {"decode-0"}


async def test_worker_started_for_dead_launcher_counts_as_loading(leader: Leader):
    """The registry has been read before: it does not tell of it, and the last that serve would be drained."""
    leader.workers.slots["decode-2"] = SimpleNamespace(generation=0)
    assert await leader.sees({}) == set()
    del leader.workers.slots["decode-2"]
    assert await leader.sees({}) == {"decode-0"}


async def test_launcher_that_cannot_prepare_rolls_back(leader: Leader):
    behind = {"b": Launcher({"decode-0": Role.DECODE, "decode-1": Role.DECODE}, 0)}
    await leader.sees(behind)
    leader.now += PATIENCE_S - 1
    await leader.sees(behind)
    assert (await phase(leader))[0] is Phase.FORWARD
    leader.now += 2
    await leader.sees(behind)
    assert await phase(leader) == (Phase.BACK, f"nothing has changed for {PATIENCE_S:g} s: launcher b is not prepared")


async def is_patient_for(leader: Leader, seconds: float) -> bool:
    """Whether a rollout in which nothing changes goes on for so long, and no longer."""
    assert await leader.sees({}) == {"decode-0"}
    leader.now += seconds - 1
    await leader.sees({})
    goes_on = (await phase(leader))[0] is Phase.FORWARD
    leader.now += 2
    await leader.sees({})
    return goes_on and (await phase(leader))[0] is Phase.BACK


async def test_workers_have_the_times_that_are_rolled_out(leader: Leader):
    """More to load takes longer, and the new configuration says so."""
    running = leader.workers.setup.config
    longer = msgspec.structs.replace(running.workers, start_timeout_s=running.workers.start_timeout_s + 100)
    leader.workers.setup = Setup(1, msgspec.structs.replace(running, workers=longer), Path("unused"))
    assert await is_patient_for(leader, PATIENCE_S + 100), "its successor may load still"


async def test_a_worker_drains_by_the_time_that_a_rollout_shortens(leader: Leader):
    """It was started with it."""
    rollout = await leader.registry.rollout.read()
    assert rollout is not None
    times = {**rollout.old.config["workers"], "drain_timeout_s": PATIENCE_S / 2 + 100}
    old = Version(0, {**rollout.old.config, "workers": times})
    assert await leader.registry.rollout.change(rollout, msgspec.structs.replace(rollout, old=old))
    assert await is_patient_for(leader, PATIENCE_S + 100), "it may drain still"


async def test_a_rollout_is_not_given_up_for_the_time_in_which_redis_was_away(leader: Leader):
    """A successor that found none has begun again."""
    assert await leader.sees({}) == {"decode-0"}
    leader.now += PATIENCE_S + 1
    await leader.sees({}, was_away=True)
    leader.now += PATIENCE_S - 1
    await leader.sees({})
    assert (await phase(leader))[0] is Phase.FORWARD
    leader.now += 2
    await leader.sees({})
    assert (await phase(leader))[0] is Phase.BACK


@pytest.mark.parametrize("missed", [{"was_away": True}, {"leads": False}])
async def test_a_rollout_that_is_stuck_is_given_up_though_a_look_is_missed_now_and_then(leader: Leader, missed: Any):
    assert await leader.sees({}) == {"decode-0"}
    phases = []
    for second in range(int(2 * PATIENCE_S)):
        leader.now += 1
        await leader.sees({}, **(missed if second % 5 == 4 else {}))
        phases.append((await phase(leader))[0])
    assert Phase.BACK in phases and Phase.BACK not in phases[: int(PATIENCE_S)]


async def test_a_rollout_is_not_given_up_for_the_time_in_which_nobody_led(leader: Leader):
    """Redis was away for longer than any step takes."""
    assert await leader.sees({}) == {"decode-0"}
    leader.now += PATIENCE_S + 1
    await leader.sees({}, leads=False)
    leader.now += 1
    await leader.sees({})
    assert (await phase(leader))[0] is Phase.FORWARD


@pytest.mark.parametrize("kind", [ConfigError, PermissionError])
async def test_a_leader_that_cannot_prepare_rolls_back_at_once(leader: Leader, kind: type[Exception]):
    before = await leader.registry.rollout.read()
    assert before is not None
    leader.cannot, leader.kind = "model: 'm' is gone", kind
    assert await leader.registry.rollout.change(before, Rollout(before.new, Version(2, before.new.config)))
    for _ in range(9):
        await leader.sees({})
        await asyncio.sleep(0)
    assert await phase(leader) == (Phase.BACK, leader.cannot)


async def test_a_leader_that_never_gets_prepared_rolls_back(leader: Leader):
    """As where the model's file system does not answer. Nobody else judges the one that leads."""
    before = await leader.registry.rollout.read()
    assert before is not None
    leader.hangs = True
    assert await leader.registry.rollout.change(before, Rollout(before.new, Version(2, before.new.config)))
    await leader.sees({})
    leader.now += PATIENCE_S / 2
    await leader.sees({})
    assert (await phase(leader))[0] is Phase.FORWARD
    leader.now += 1
    await leader.sees({})
    why = f"a launcher is not prepared within workers.start_timeout_s ({PATIENCE_S / 2:g} s)"
    assert await phase(leader) == (Phase.BACK, why)
    assert await leader.sees({}) == {"decode-0"}, "it goes on to what it was prepared for"


async def test_a_launcher_that_cannot_go_back_says_why_once(leader: Leader, caplog: pytest.LogCaptureFixture):
    forward = await leader.registry.rollout.read()
    assert forward is not None and await leader.registry.rollout.change(forward, forward.given_up("aborted"))
    leader.cannot = "model: 'm' is gone"
    for _ in range(9):
        await leader.sees({})
        await asyncio.sleep(0)
    assert caplog.text.count(leader.cannot) == 1 and leader.workers.setup.generation == 1
    leader.cannot = ""
    while leader.workers.setup.generation:
        await leader.sees({})


async def test_unrestarted_worker_stops_further_replacements(leader: Leader):
    """They hold no id of a launcher's, so when they have gone nothing is left of them."""
    first = (await leader.registry.workers())["decode-0"]
    assert await leader.sees({}) == {"decode-0"}
    await leader.registry.leave("decode-0")
    assert await leader.sees({}) == set(), "the one that is left is all that serves"
    await leader.registry.join(renewed(first, "decode-0-again"), 60)
    assert await leader.sees({}) == {"decode-1"}
    await leader.registry.leave("decode-1")
    await leader.sees({})
    assert (await phase(leader))[0] is Phase.FORWARD, "all that are there are new, but one is to come back"
    await leader.registry.join(renewed(first, "decode-1-again"), 60)
    await leader.sees({})
    assert (await phase(leader))[0] is Phase.DONE


async def test_unrestarted_worker_rolls_back(leader: Leader):
    assert await leader.sees({}) == {"decode-0"}
    await leader.registry.leave("decode-0")
    await leader.sees({})
    leader.now += PATIENCE_S + 1
    await leader.sees({})
    back, why = await phase(leader)
    assert back is Phase.BACK and "a worker told to restart is not back" in why
    # decode-1 was never replaced, so nothing is left to be done but for the launcher itself to go back.
    while leader.workers.setup.generation == 1:
        await leader.sees({})
    await leader.sees({})
    assert (await phase(leader))[0] is Phase.UNDONE


async def test_a_launcher_that_starts_alone_deletes_no_rollout_that_was_begun_since_it_looked(leader: Leader):
    document = leader.registry.rollout
    seen = await document.read()
    assert seen is not None
    ended, later = seen.to(Phase.DONE), Rollout(seen.new, Version(2, seen.new.config))
    assert await document.change(seen, ended)
    read, leader.rolling._registry.rollout = AsyncMock(side_effect=[ended, later]), Mock(wraps=document)
    leader.rolling._registry.rollout.read = read
    await document.change(ended, later)
    await leader.rolling.begin(alone=True)
    assert await document.read() == later and leader.rolling.version == later.settled


# ---- a restart: a rollout to what runs ---------------------------------------------------------------------------


@pytest.fixture
async def restarted(leader: Leader) -> Leader:
    """Both workers are this launcher's, nothing was rolled out, and a restart of them is ordered."""
    rollout, units = leader.registry.rollout, await leader.registry.workers()
    await lose(rollout)
    leader.workers.setup = msgspec.structs.replace(leader.workers.setup, generation=0)
    as_started = Version(0, {})
    ordered = Rollout(as_started, as_started, restart={name: info.process for name, info in units.items()})
    assert await rollout.change(None, ordered)
    return leader


def held(*names: str) -> dict[str, Launcher]:
    return {"b": Launcher(dict.fromkeys(names, Role.DECODE))}


async def test_restart_takes_one_after_the_other_and_no_new_configuration(restarted: Leader):
    infos = await restarted.registry.workers()
    for name in ("decode-0", "decode-1"):
        assert await restarted.sees(held(*infos)) == {name}
        await restarted.registry.leave(name)
        assert await restarted.sees(held(*infos)) == set()
        await restarted.registry.join(msgspec.structs.replace(infos[name], process="its successor"), 60)
    assert await restarted.sees(held(*infos)) == set()
    assert (await phase(restarted))[0] is Phase.DONE and restarted.workers.setup.generation == 0
    await restarted.rolling.begin(alone=False)
    assert restarted.rolling.version.config, "its own file counts: nothing was rolled out"


async def test_restart_ends_when_its_last_worker_is_drained_for_good(restarted: Leader):
    infos = await restarted.registry.workers()
    assert await restarted.sees(held(*infos)) == {"decode-0"}
    await restarted.registry.leave("decode-1")
    await restarted.registry.join(msgspec.structs.replace(infos["decode-0"], process="its successor"), 60)
    await restarted.sees(held(*infos))
    assert (await phase(restarted))[0] is Phase.FORWARD, "its launcher may start it again"
    await restarted.sees(held("decode-0"))
    assert (await phase(restarted))[0] is Phase.DONE


async def test_restart_is_given_up_when_a_restarted_worker_cannot_start(restarted: Leader):
    def process(name: str) -> Any:
        end = Exit(1, "no such library", was_ready=False)
        return SimpleNamespace(
            generation=0, process=SimpleNamespace(name=name, last_exit=end, crashes=3, stage="ended")
        )

    infos = await restarted.registry.workers()
    restarted.workers.slots["decode-9"] = process("decode-9")
    await restarted.sees(held(*infos))
    assert (await phase(restarted))[0] is Phase.FORWARD, "it failed before, and is none of those that are restarted"
    restarted.workers.slots["decode-0"] = process("decode-0")
    await restarted.sees(held(*infos))
    given_up, why = await phase(restarted)
    assert given_up is Phase.UNDONE and "decode-0 cannot start: it ended with exit code 1" in why
