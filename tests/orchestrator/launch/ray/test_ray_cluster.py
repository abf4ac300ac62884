"""A cluster that does not answer, or answers late. Real clusters: tests/e2e/test_ray.py."""

import asyncio
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from support_wait import DEADLINE_S, until

from orchestrator.config.settings import Config, ConfigError, load_config, parse_config
from orchestrator.launch.commands import Setup
from orchestrator.launch.host.process import ProcessSpec
from orchestrator.process.files import make_folder
from orchestrator.process.tasks import cancelled
from orchestrator.types import Role

pytestmark = pytest.mark.slow  # imports Ray

ray = pytest.importorskip("ray")
from orchestrator.launch.ray import cluster as module  # noqa: E402
from orchestrator.launch.ray import places as places_module  # noqa: E402
from orchestrator.launch.ray import process as process_module  # noqa: E402
from orchestrator.launch.ray import runner as runner_module  # noqa: E402
from orchestrator.launch.ray.places import Bundles  # noqa: E402
from orchestrator.launch.ray.process import RayProcess, Runners  # noqa: E402
from orchestrator.launch.ray.runner import Ended, NotStarted, Order, Started, decode_reply, encode  # noqa: E402

CONFIG = parse_config(
    {"model": "m", "engine": "sim", "redis": {"url": "redis://h"}, "launcher": {"kind": "ray", "gpus_per_rank": 2}}
)
BUNDLE = {"CPU": 1.0, "GPU": 2.0}


class Group:
    def __init__(self, name: str, bundles: Bundles, strategy: str = "") -> None:
        self.name, self.bundle_specs, self.strategy = name, bundles, strategy

    def wait(self, timeout_s: float) -> bool:
        return True


class Groups:
    """The placement groups of a cluster, in place of Ray's calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there: dict[str, Group] = {}
        self.removed: list[Group] = []
        for name in ("get_placement_group", "placement_group", "remove_placement_group", "placement_group_table"):
            monkeypatch.setattr(places_module, name, getattr(self, name))

    def get_placement_group(self, name: str) -> Group:
        if name not in self.there:
            raise ValueError(f"Failed to look up placement group with name: {name}")
        return self.there[name]

    def placement_group(self, bundles: Bundles, strategy: str, name: str, lifetime: str) -> Group:
        assert name not in self.there and lifetime == "detached", "it outlives the launcher"
        self.there[name] = Group(name, bundles, strategy)
        return self.there[name]

    def remove_placement_group(self, group: Group) -> None:
        self.removed.append(self.there.pop(group.name))

    def placement_group_table(self) -> dict[int, dict[str, object]]:
        return {
            number: {
                "name": group.name,
                "bundles": dict(enumerate(group.bundle_specs)),
                "state": "REMOVED" if group in self.removed else "CREATED",
            }
            for number, group in enumerate([*self.removed, *self.there.values()])
        }

    def sizes(self) -> dict[str, Bundles]:
        return {name: group.bundle_specs for name, group in self.there.items()}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(monkeypatch)


def runners(monkeypatch: pytest.MonkeyPatch, roles: dict[str, str]) -> None:
    """Actors of these names say that they were started in these roles."""

    def get_actor(name: str) -> SimpleNamespace:
        if name not in roles:
            raise ValueError("Failed to look up actor")
        return SimpleNamespace(role=SimpleNamespace(remote=AsyncMock(return_value=roles[name])))

    monkeypatch.setattr(module.ray, "get_actor", get_actor)


def sized(prefill: str = "", decode: str = "") -> Config:
    """With these engine arguments."""
    sections = {"prefill": prefill, "decode": decode}
    tree = msgspec.to_builtins(CONFIG) | {"security": {"trust_network": True}}
    for role, argument in sections.items():
        name, _, value = argument.partition("=")
        tree["workers"][role]["engine_args"] = {name: int(value)} if name else {}
    return parse_config(tree)


async def started(cluster: module.RayCluster, unit: str, role: Role, config: Config = CONFIG) -> list[str]:
    """As a launcher starts a unit; the names of its processes."""
    setup = Setup(0, config, Path("c"))
    await cluster.placed(unit, lambda: (role, setup))
    return [part.name for part in cluster.worker(unit, role, setup, lambda *_: None).parts]


async def test_nodes_stay_known_while_the_head_does_not_answer(monkeypatch):
    cluster = module.RayCluster(CONFIG)
    node = {"Alive": True, "Resources": {"CPU": 4}, "NodeManagerAddress": "10.0.0.2", "NodeID": "n"}
    monkeypatch.setattr(module.ray, "nodes", lambda: [node, {**node, "Resources": {}, "NodeManagerAddress": "head"}])
    await cluster.refresh()

    def gone() -> None:
        raise ray.exceptions.RaySystemError("the head is gone")

    monkeypatch.setattr(module.ray, "nodes", gone)
    await cluster.refresh()
    assert cluster.frontend_nodes() == ["10.0.0.2"]


async def test_nodes_are_unknown_until_the_cluster_has_told_them(monkeypatch):
    cluster = module.RayCluster(CONFIG)

    def away() -> None:
        raise ray.exceptions.RaySystemError("not yet")

    monkeypatch.setattr(module.ray, "nodes", away)
    await cluster.refresh()
    assert cluster.frontend_nodes() is None
    with pytest.raises(OSError, match="not known"):
        cluster.frontend("frontend-0@10.0.0.2", 0, "10.0.0.2", Setup(0, CONFIG, Path("c")), lambda *_: None)
    monkeypatch.setattr(module.ray, "nodes", list)
    await cluster.refresh()
    assert cluster.frontend_nodes() == []


async def test_a_foreign_actor_is_none_of_the_fleets_processes(monkeypatch, groups, caplog):
    """Whoever may use the cluster may name one in our namespace."""
    ours = ["frontend-0@10.0.0.2", "frontend-12@::1", "worker-0", "worker-31", "worker-31.1"]
    foreign = [
        "",
        "counter",
        "worker-",
        "worker-x",
        "worker-1.x",
        "decode-0",
        "frontend-@10.0.0.2",
        "frontend-a@b",
        "trainer-0",
    ]
    monkeypatch.setattr(module, "list_named_actors", lambda: ours + foreign)
    left = await module.RayCluster(CONFIG).left_running()
    assert left == dict.fromkeys(ours[:-1], True), "a group is taken over as one"
    assert "counter" in caplog.text and "left alone" in caplog.text
    ended = []

    class Actor:
        class stop:
            remote = staticmethod(lambda timeout_s: None)

        def __init__(self, name: str) -> None:
            assert name in ours, "a foreign actor was asked to stop"
            if name == ours[-1]:
                raise ValueError("it has ended since")
            self.name = name

    monkeypatch.setattr(module, "connect", lambda config: "")
    monkeypatch.setattr(module.ray, "get_actor", Actor)
    monkeypatch.setattr(module.ray, "wait", lambda *_, **__: None)
    monkeypatch.setattr(module.ray, "kill", lambda actor: ended.append(actor.name))
    groups.there = {name: Group(name, [BUNDLE]) for name in ("pd-default/worker-7", "pd-other/worker-7")}
    assert module.end_fleet(CONFIG, 1.0) == ours and ended == ours[:-1]
    assert groups.there.keys() == {"pd-other/worker-7"}

    def away() -> None:
        raise ray.exceptions.RaySystemError("no head")

    monkeypatch.setattr(module, "list_named_actors", away)
    with pytest.raises(ConfigError, match=r"does not end the fleet .*no head.*orchestrator down"):
        module.end_fleet(CONFIG, 1.0)


async def test_what_runs_is_taken_over_as_it_is_and_takes_another_place_when_it_starts_again(monkeypatch, groups):
    """Also where this launcher's configuration has another size."""
    earlier, cluster = module.RayCluster(CONFIG), module.RayCluster(config := sized(decode="data_parallel_size=3"))
    assert await started(earlier, "worker-0", Role.DECODE) == ["worker-0"]
    runners(monkeypatch, {"worker-0": "decode"})
    monkeypatch.setattr(module, "left_running", lambda: ["worker-0", "frontend-0@10.0.0.2"])
    assert await cluster.left_running() == {"frontend-0@10.0.0.2": True, "worker-0": True}
    assert await cluster.take_over({"worker-0": None}) == {"worker-0": Role.DECODE}
    assert await started(cluster, "worker-0", Role.DECODE, config) == ["worker-0"] and not groups.removed
    assert await started(cluster, "worker-0", Role.DECODE, config) == ["worker-0", "worker-0.1", "worker-0.2"]
    assert groups.sizes() == {"pd-default/worker-0": [BUNDLE] * 3}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"worker-0": "decode"}, "Failed to look up actor"),
        ({"worker-0.1": "decode"}, "Failed to look up actor"),
        ({"worker-0": "decode", "worker-0.1": ""}, "is not a valid Role"),
        ({}, "Failed to look up actor"),
    ],
)
async def test_a_part_of_a_unit_is_not_taken_over_and_what_is_left_of_it_ends(monkeypatch, groups, caplog, said, why):
    """The node of a rank died with the launcher, or it had placed its ranks, and not started all of them."""
    await started(module.RayCluster(two := sized(decode="data_parallel_size=2")), "worker-0", Role.DECODE, two)
    cluster = module.RayCluster(two)
    monkeypatch.setattr(module, "left_running", lambda: list(said))
    runners(monkeypatch, said)
    assert await cluster.left_running() == {"worker-0": bool(said)}
    assert not await cluster.take_over({"worker-0": None})
    assert "worker-0: is not whole" in caplog.text and why in caplog.text
    await cluster.give_back("worker-0")
    assert not groups.there and not await cluster.take_over({"worker-0": None})


@pytest.mark.parametrize(
    "asked", [asyncio.Event().wait, AsyncMock(side_effect=ray.exceptions.ActorUnavailableError("a cut", b"a" * 16))]
)
@pytest.mark.parametrize("registered", [Role.DECODE, None])
async def test_a_registered_unit_that_does_not_answer_goes_on(monkeypatch, groups, registered, asked):
    """Its node stands still for a moment, or cannot be reached."""
    await started(module.RayCluster(CONFIG), "worker-0", Role.DECODE)
    silent = SimpleNamespace(role=SimpleNamespace(remote=asked))
    monkeypatch.setattr(module.ray, "get_actor", lambda name: silent)
    monkeypatch.setattr(module, "_RUNNER_ANSWERS_S", 0.01)
    taken = await module.RayCluster(CONFIG).take_over({"worker-0": registered})
    assert taken == ({"worker-0": registered} if registered else {})


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> runner_module.Runner:
    """On a node at 10.0.0.2, where nothing is started."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(runner_module.ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    monkeypatch.setattr(runner_module, "find_model", lambda name, say: name)
    spec = ProcessSpec("worker-0", [sys.executable, "-c", "pass"])
    monkeypatch.setattr(runner_module, "worker_spec", lambda *_: spec)
    return runner_module.Runner()


@pytest.mark.parametrize("loose", ["pd-orchestrator", "pd-orchestrator/default@10.0.0.2"])
async def test_a_runner_writes_no_password_where_others_may_read_it(runner, tmp_path: Path, loose: str):
    folder = tmp_path / "pd-orchestrator" / "default@10.0.0.2"
    folder.mkdir(parents=True)
    (file := folder / "worker-0.yaml").touch()  # somebody waits for it
    (tmp_path / loose).chmod(0o777)
    reply = decode_reply(await runner.start(encode(Order(CONFIG, "worker-0", 0, Role.DECODE))))
    assert isinstance(reply, NotStarted) and f"{tmp_path / loose}: others than" in reply.reason
    assert file.read_text() == ""


async def test_a_runner_replaces_a_file_that_was_there(runner, tmp_path: Path):
    """Whoever made it may have it open."""
    folder = tmp_path / "pd-orchestrator" / "default@10.0.0.2"
    make_folder(folder)
    (file := folder / "worker-0.yaml").touch(mode=0o666)
    with file.open() as waiting:
        reply = decode_reply(await runner.start(encode(Order(CONFIG, "worker-0", 0, Role.DECODE))))
        assert isinstance(reply, Started) and waiting.read() == ""
    assert await runner.role() == "decode", "a launcher that comes later asks"
    make_folder(folder / "metrics")  # of frontends that have been there
    assert decode_reply(await runner.wait()) == Ended(0)
    assert not folder.exists()


async def test_a_process_gets_text_as_text_on_its_node(runner, tmp_path: Path):
    """Also where it looks like a number."""
    tree = msgspec.to_builtins(CONFIG) | {"namespace": "7e10", "served_model_name": "1e3"}
    tree["workers"]["engine_args"] = {"revision": "12345e6"}
    assert isinstance(decode_reply(await runner.start(encode(Order(parse_config(tree), "w", 0, Role.DECODE)))), Started)
    read = load_config(tmp_path / "pd-orchestrator" / "7e10@10.0.0.2" / "w.yaml")
    assert (read.namespace, read.name_served, read.workers.engine_args) == ("7e10", "1e3", {"revision": "12345e6"})


async def test_a_runner_says_that_its_process_outlives_sigkill(runner, tmp_path: Path):
    stuck = SimpleNamespace(wait=AsyncMock(return_value=-9), pid=1 << 30, lost=True, exit_reason=None)
    runner._file = tmp_path / "folder" / "file"
    assert decode_reply(await runner._run(stuck)) == Ended(-9, lost=True)


async def test_a_frontend_is_refused_by_what_its_node_has(runner, monkeypatch: pytest.MonkeyPatch):
    """Another environment than the launcher's."""
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    reply = decode_reply(await runner.start(encode(Order(CONFIG, "frontend-0@10.0.0.2", 0))))
    assert isinstance(reply, NotStarted) and "got one on each node" in reply.reason


async def test_a_process_that_cannot_be_started_leaves_no_password_on_its_node(runner, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(runner_module, "worker_spec", lambda *_: ProcessSpec("worker-0", ["/no/such/program"]))
    reply = decode_reply(await runner.start(encode(Order(CONFIG, "worker-0", 0, Role.DECODE))))
    assert isinstance(reply, NotStarted) and reply.never
    assert list((tmp_path / "pd-orchestrator").iterdir()) == []


@pytest.mark.parametrize("address", ["127.0.0.1:²", "127.0.0.1", "a..b:6379"])
def test_an_address_that_no_cluster_can_have_is_refused(address: str):
    with pytest.raises(ConfigError, match="^launcher.address: "):
        module._check_address(address)


@pytest.mark.parametrize("had", [None, [BUNDLE], [BUNDLE] * 2, [{"CPU": 1.0, "GPU": 4.0}]])
@pytest.mark.parametrize("wanted", [None, [BUNDLE], [BUNDLE] * 2])
async def test_what_the_cluster_has_is_made_what_is_wanted(groups, had, wanted):
    places, others = places_module.Places("f/"), Group("g/worker-0", [BUNDLE])
    groups.there = {others.name: others} | ({"f/worker-0": Group("f/worker-0", had)} if had else {})
    if wanted is None:
        await places.give_back("worker-0")
    else:
        assert await places.has("worker-0", wanted)
        assert groups.there["f/worker-0"].strategy in ("", "PACK" if len(wanted) > 1 else "SPREAD")
    assert groups.there.pop(others.name) is others
    assert groups.sizes() == ({"f/worker-0": wanted} if wanted else {})
    assert len(groups.removed) == (had is not None and had != wanted)


async def test_a_unit_that_starts_again_in_another_role_gets_a_place_of_its_size(groups, caplog):
    """Of ranks, and of GPUs for each."""
    caplog.set_level("INFO", "pd.launcher")
    for prefill, needs in (("data_parallel_size=2", [BUNDLE] * 2), ("tensor_parallel_size=2", [{"CPU": 1, "GPU": 4}])):
        cluster = module.RayCluster(config := sized(prefill))
        await started(cluster, "worker-0", Role.DECODE, config)
        await started(cluster, "worker-0", Role.PREFILL, config)
        assert groups.sizes() == {"pd-default/worker-0": needs}
        assert len(await started(cluster, "worker-0", Role.DECODE, config)) == 1
        assert groups.sizes() == {"pd-default/worker-0": [BUNDLE]}
    assert "worker-0: needs 1 CPU and 2 GPU for each of 2 ranks, and gives back 1 CPU and 2 GPU" in caplog.text


async def test_a_role_that_changes_after_a_unit_was_placed_is_no_start(groups):
    cluster, setup = module.RayCluster(CONFIG), Setup(0, sized("data_parallel_size=3"), Path("c"))
    await cluster.placed("worker-1", lambda: (Role.PREFILL, setup))
    with pytest.raises(OSError, match="has 1 CPU and 2 GPU for each of 3 ranks, not 1 CPU and 2 GPU"):
        cluster.worker("worker-1", Role.DECODE, setup, lambda *_: None)
    processes = cluster.worker("worker-1", Role.PREFILL, setup, lambda *_: None).parts
    assert {part._order.ranks for part in processes} == {("worker-1", "worker-1.1", "worker-1.2")}


async def test_unwanted_placement_group_is_removed(monkeypatch, groups):
    cluster, asked, answered = module.RayCluster(CONFIG), threading.Event(), threading.Event()
    make = groups.placement_group

    def slowly(*args: object, **kwargs: object) -> Group:
        asked.set()
        assert answered.wait(DEADLINE_S)
        return make(*args, **kwargs)

    monkeypatch.setattr(places_module, "placement_group", slowly)
    waiting = asyncio.create_task(cluster.placed("worker-0", lambda: (Role.PREFILL, Setup(0, CONFIG, Path("c")))))
    assert await asyncio.to_thread(asked.wait, DEADLINE_S)
    await cancelled(waiting)
    given_back = asyncio.create_task(cluster.give_back("worker-0"))
    await asyncio.sleep(0)
    answered.set()
    await given_back
    assert not groups.there and len(groups.removed) == 1


async def test_a_cluster_that_does_not_answer_keeps_nobody_waiting(monkeypatch, groups, caplog):
    """Neither other units, on which it does, nor what else the launcher does in threads."""
    monkeypatch.setattr(places_module, "_ANSWERS_WITHIN_S", 0.01)
    find, answers = groups.get_placement_group, threading.Event()
    silent = [f"worker-{number}" for number in range(1, 65)]

    def slowly(name: str) -> Group:
        if name.removeprefix("f/") in silent:
            answers.wait(2 * DEADLINE_S)
        return find(name)

    monkeypatch.setattr(places_module, "get_placement_group", slowly)
    places = places_module.Places("f/")
    try:
        assert not any(await asyncio.gather(*(places.has(unit, [BUNDLE]) for unit in silent)))
        assert not await places.has("worker-1", [BUNDLE]), "nor is it asked twice at once"
        assert threading.active_count() < 2 * len(silent)
        await asyncio.to_thread(lambda: None)
        monkeypatch.setattr(places_module, "_ANSWERS_WITHIN_S", DEADLINE_S)
        assert await places.has("worker-0", [BUNDLE])
        monkeypatch.setattr(places_module, "_ANSWERS_WITHIN_S", 0.01)
        await asyncio.gather(*map(places.give_back, silent[:32]))
        assert "worker-1: no answer from the cluster" in caplog.text
        answers.set()
        while asking := list(places._asking.values()):
            await asyncio.wait(asking)
    finally:
        answers.set()
    made = {f"f/{unit}" for unit in ["worker-0", *silent[32:]]}
    assert groups.there.keys() == made, "an answer that is late makes what is wanted by then"


async def test_groups_are_read_once_for_all_that_is_taken_over(monkeypatch, groups):
    units = [f"worker-{number}" for number in range(8)]
    for unit in units:
        await started(module.RayCluster(CONFIG), unit, Role.DECODE)
    runners(monkeypatch, dict.fromkeys(units, "decode"))
    read, table = [], groups.placement_group_table
    monkeypatch.setattr(places_module, "placement_group_table", lambda: read.append(1) or table())
    taken = await module.RayCluster(CONFIG).take_over(dict.fromkeys(units))
    assert taken == dict.fromkeys(units, Role.DECODE) and len(read) == 1


async def test_what_runs_is_not_ended_because_the_cluster_cannot_tell(monkeypatch, groups):
    monkeypatch.setattr(module, "_ANSWERS_WITHIN_S", 0.01)
    answers = threading.Event()
    monkeypatch.setattr(places_module, "placement_group_table", lambda: answers.wait(DEADLINE_S) and {})
    monkeypatch.setattr(module, "left_running", list)
    cluster = module.RayCluster(CONFIG)
    try:
        for asked in (cluster.left_running(), cluster.take_over({"worker-0": None})):
            with pytest.raises(
                ConfigError, match=r"launcher.address: the cluster does not tell .*see whether its head"
            ):
                await asked
    finally:
        answers.set()


async def test_failed_placement_is_retried(monkeypatch, groups):
    cluster, find = module.RayCluster(CONFIG), groups.get_placement_group
    answers = [ray.exceptions.RaySystemError("no head")]

    def sometimes(name: str) -> Group:
        if answers:
            raise answers.pop()
        return find(name)

    monkeypatch.setattr(places_module, "get_placement_group", sometimes)
    assert await started(cluster, "worker-0", Role.PREFILL) == ["worker-0"]


class Actors:
    """The runners of a cluster, in place of Ray's calls. It makes them once it `answers`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there: dict[str, Any] = {}
        self.asked = 0
        self.answers, self.killed = threading.Event(), queue.Queue[Any]()
        monkeypatch.setattr(process_module.ray, "remote", lambda runner: SimpleNamespace(options=self.options))
        monkeypatch.setattr(process_module.ray, "get_actor", self.get_actor)
        monkeypatch.setattr(process_module.ray, "kill", self.kill)

    def options(self, name: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda: self.make(name))

    def make(self, name: str) -> Any:
        self.asked += 1
        assert self.answers.wait(DEADLINE_S)
        reply = AsyncMock(return_value=encode(Started(1, "i")))
        silent = SimpleNamespace(remote=lambda *_: asyncio.Event().wait())
        runner = SimpleNamespace(name=name, start=SimpleNamespace(remote=reply), wait=silent, lines=silent)
        return self.there.setdefault(name, runner)

    def get_actor(self, name: str) -> Any:
        if name not in self.there:
            raise ValueError("Failed to look up actor")
        return self.there[name]

    def kill(self, runner: Any) -> None:
        self.killed.put(self.there.pop(runner.name))


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Actors]:
    made = Actors(monkeypatch)
    yield made
    made.answers.set()


def process_of(runners: Runners) -> RayProcess:
    return RayProcess(Order(CONFIG, "worker-0", 0, Role.DECODE), dict, lambda name, line: None, runners)


async def given_up(monkeypatch: pytest.MonkeyPatch, actors: Actors, runners: Runners) -> None:
    """A start that the cluster has not answered."""
    with monkeypatch.context() as patch:
        patch.setattr(process_module, "_START_DEADLINE_S", 0.01)
        with pytest.raises(OSError, match="no answer from its node within 0.01 s"):
            await process_of(runners).start()
    await until(lambda: actors.asked == 1, "the cluster is asked")


async def test_a_runner_that_is_there_late_is_ended(monkeypatch, actors):
    """It is detached: nobody else would end it."""
    await given_up(monkeypatch, actors, runners := Runners())
    actors.answers.set()
    assert (await asyncio.to_thread(actors.killed.get, timeout=DEADLINE_S)).name == "worker-0"
    await until(lambda: not runners._asking, "the call is done")
    assert not actors.there


async def test_a_runner_that_is_there_late_is_used_by_who_asks_for_it_again(monkeypatch, actors):
    await given_up(monkeypatch, actors, runners := Runners())
    again = process_of(runners)
    starting = asyncio.create_task(again.start())
    await until(lambda: bool(runners._wanted), "it is asked for again")
    actors.answers.set()
    await starting
    assert again.running and actors.asked == 1 and actors.killed.empty()
    again._pump.cancel()


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_runner_that_does_not_answer_is_given_up_once_its_process_is_to_end(monkeypatch, actors, end):
    """It is frozen, and its node is not: Ray finds nothing wrong with it."""
    actors.answers.set()
    await (process := process_of(Runners())).start()
    waiting = asyncio.create_task(process.wait())
    process._runner.stop, process._runner.kill = process._runner.wait, SimpleNamespace(remote=lambda: None)
    monkeypatch.setattr(process_module, "_ENDS_WITHIN_S", 0.01)
    if end == "kill":
        process.kill()
    else:
        await process.stop(0.01)
    assert await waiting == process_module.NODE_LOST
    assert process.lost and not process.running and "has ended" in process.last_lines[-1]
    assert (await asyncio.to_thread(actors.killed.get, timeout=DEADLINE_S)).name == "worker-0"


async def test_a_process_that_its_runner_could_not_end_is_lost(monkeypatch, actors):
    """It may hold its devices: it is not started again in the same place."""
    actors.answers.set()
    await (process := process_of(Runners())).start()
    ended = encode(Ended(-9, lost=True))
    process._runner.wait = SimpleNamespace(remote=AsyncMock(return_value=ended))
    assert await process.wait() == -9 and process.lost


async def test_nodes_are_asked_for_once_at_a_time_and_nobody_waits_for_long(monkeypatch, caplog):
    answers, asked = threading.Event(), []

    def nodes() -> list[object]:
        asked.append(1)
        assert answers.wait(DEADLINE_S)
        return []

    monkeypatch.setattr(module, "_ANSWERS_WITHIN_S", 0.01)
    monkeypatch.setattr(module.ray, "nodes", nodes)
    cluster = module.RayCluster(CONFIG)
    try:
        for _ in range(5):
            await cluster.refresh()
        assert cluster.frontend_nodes() is None and len(asked) == 1
        assert "the nodes of the cluster are not known: no answer within 0.01 s" in caplog.text
    finally:
        answers.set()

    async def told() -> bool:
        await cluster.refresh()
        return cluster.frontend_nodes() == []

    await until(told, "the head has answered")


async def test_a_registered_unit_is_no_less_there_where_the_head_does_not_answer(monkeypatch, groups):
    """That says nothing about its ranks: neither that they run, nor that what is left of them is to end."""
    await started(module.RayCluster(CONFIG), "worker-0", Role.DECODE)
    answers = threading.Event()
    monkeypatch.setattr(module.ray, "get_actor", lambda name: answers.wait(DEADLINE_S))
    monkeypatch.setattr(module, "_ANSWERS_WITHIN_S", 0.01)
    try:
        with pytest.raises(ConfigError, match="the cluster does not tell what it runs"):
            await module.RayCluster(CONFIG).take_over({"worker-0": Role.DECODE})
    finally:
        answers.set()


async def test_a_runner_that_is_only_unavailable_is_told_again_to_stop(monkeypatch):
    """Else its process runs on, and whoever has told it waits for its end."""
    monkeypatch.setattr(process_module, "_ASK_AGAIN_S", 0.01)
    told: list[float] = []

    class Stop:
        async def remote(self, timeout_s: float) -> None:
            told.append(timeout_s)
            if len(told) == 1:
                raise ray.exceptions.ActorUnavailableError("the network is away", b"a" * 16)

    class Runner:
        stop = Stop()

    process = process_of(Runners())
    process._runner = Runner()
    await process.stop(3.0)
    assert told == [3.0, 3.0]
