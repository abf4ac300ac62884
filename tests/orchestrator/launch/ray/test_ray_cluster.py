"""A cluster that does not answer, or answers late. Real clusters: tests/e2e/test_ray.py."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import msgspec
import pytest
from support_wait import DEADLINE_S

from orchestrator.config.settings import parse_config
from orchestrator.launch.host.process import ProcessSpec
from orchestrator.launch.machines import Setup
from orchestrator.process.own_files import make_folder
from orchestrator.types import Role

pytestmark = pytest.mark.slow  # imports Ray

ray = pytest.importorskip("ray")
from orchestrator.launch.ray import cluster as module  # noqa: E402
from orchestrator.launch.ray import connection as connection_module  # noqa: E402
from orchestrator.launch.ray import process as process_module  # noqa: E402
from orchestrator.launch.ray import runner as runner_module  # noqa: E402
from orchestrator.launch.ray.process import RayProcess  # noqa: E402
from orchestrator.launch.ray.wire import NotStarted, RunWorker, Started, decode_reply, encode  # noqa: E402

CONFIG = parse_config(
    {"model": "m", "engine": "sim", "redis": {"url": "redis://h"}, "launcher": {"kind": "ray", "gpus_per_rank": 2}}
)


class Group:
    def __init__(self, has_place: bool) -> None:
        self.has_place = has_place

    def wait(self, timeout_s: float) -> bool:
        return self.has_place


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


async def test_a_foreign_actor_is_none_of_the_fleets_processes(monkeypatch, caplog):
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
    monkeypatch.setattr(connection_module, "list_named_actors", lambda: ours + foreign)
    assert await module.RayCluster(CONFIG).left_running() == ours[:-1], "a group is taken over as one"
    assert "counter" in caplog.text and "left alone" in caplog.text
    ended = []

    class Actor:
        class stop:
            remote = staticmethod(lambda timeout_s: None)

        def __init__(self, name: str) -> None:
            assert name in ours, "a foreign actor was asked to stop"
            self.name = name

    monkeypatch.setattr(connection_module, "connect", lambda config: "")
    monkeypatch.setattr(connection_module.ray, "get_actor", Actor)
    monkeypatch.setattr(connection_module.ray, "wait", lambda *_, **__: None)
    monkeypatch.setattr(connection_module.ray, "kill", lambda actor: ended.append(actor.name))
    monkeypatch.setattr(connection_module, "placement_group_table", dict)
    assert connection_module.end_fleet(CONFIG, 1.0) == ended == ours


async def test_a_worker_that_was_left_running_tells_its_role(monkeypatch, caplog):
    """Its name does not, and while it loads the registry does not know it."""
    said = {"worker-0": "decode", "worker-1": "", "worker-2": None}

    class Actor:
        def __init__(self, name: str) -> None:
            if (role := said[name]) is None:
                raise ValueError("Failed to look up actor")
            self.role = SimpleNamespace(remote=AsyncMock(return_value=role))

    monkeypatch.setattr(module.ray, "get_actor", Actor)
    cluster = module.RayCluster(CONFIG)
    assert [await cluster.started_as(name) for name in said] == [Role.DECODE, None, None]
    assert "worker-2: its role is not known: Failed to look up actor" in caplog.text


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
    reply = decode_reply(await runner.start(encode(RunWorker(CONFIG, "worker-0", Role.DECODE))))
    assert isinstance(reply, NotStarted) and f"{tmp_path / loose}: others than" in reply.reason
    assert file.read_text() == ""


async def test_a_runner_replaces_a_file_that_was_there(runner, tmp_path: Path):
    """Whoever made it may have it open."""
    folder = tmp_path / "pd-orchestrator" / "default@10.0.0.2"
    make_folder(folder)
    (file := folder / "worker-0.yaml").touch(mode=0o666)
    with file.open() as waiting:
        reply = decode_reply(await runner.start(encode(RunWorker(CONFIG, "worker-0", Role.DECODE))))
        assert isinstance(reply, Started) and waiting.read() == ""
    assert await runner.role() == "decode", "a launcher that comes later asks"
    await runner.wait()
    assert not folder.exists()


async def test_unwanted_placement_group_is_removed(monkeypatch):
    cluster, group = module.RayCluster(CONFIG), Group(has_place=False)
    asked, answered, removed = threading.Event(), threading.Event(), threading.Event()

    def make(name: str, bundles: list[dict[str, float]]) -> Group:
        assert bundles == [{"CPU": 1.0, "GPU": 2.0}]
        asked.set()
        assert answered.wait(DEADLINE_S)
        return group

    monkeypatch.setattr(module, "_find_or_make_group", make)
    monkeypatch.setattr(module, "remove_placement_group", lambda which: which is group and removed.set())
    cluster.take("worker-0", Role.PREFILL)
    waiting = asyncio.create_task(cluster.placed("worker-0"))
    assert await asyncio.to_thread(asked.wait, DEADLINE_S)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    cluster.give_back("worker-0")
    answered.set()
    assert await asyncio.to_thread(removed.wait, DEADLINE_S)


async def test_failed_placement_is_retried(monkeypatch):
    cluster = module.RayCluster(CONFIG)
    answers = [ray.exceptions.RaySystemError("no head"), Group(has_place=True)]

    def make(name: str, bundles: list[dict[str, float]]) -> Group:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(module, "_find_or_make_group", make)
    cluster.take("worker-0", Role.PREFILL)
    async with asyncio.timeout(DEADLINE_S):
        await cluster.placed("worker-0")
    assert answers == []


def test_a_group_has_a_place_for_each_rank_on_as_few_nodes_as_hold_them(monkeypatch):
    made = []
    monkeypatch.setattr(module, "get_placement_group", lambda name: (_ for _ in ()).throw(ValueError))
    monkeypatch.setattr(module, "placement_group", lambda bundles, strategy, **_: made.append((bundles, strategy)))
    tree = msgspec.to_builtins(CONFIG) | {"security": {"trust_network": True}}
    tree["workers"]["decode"]["engine_args"] = {"data_parallel_size": 3}
    cluster = module.RayCluster(config := parse_config(tree))
    for name, role in (("worker-0", Role.PREFILL), ("worker-1", Role.DECODE)):
        cluster.take(name, role)
        with contextlib.suppress(AttributeError):  # there is no group to wait for
            cluster._has_place(name)
    bundle = {"CPU": 1.0, "GPU": 2.0}
    assert made == [([bundle], "SPREAD"), ([bundle] * 3, "PACK")]
    processes = cluster.worker("worker-1", Role.DECODE, Setup(0, config, Path("c")), lambda *_: None).parts
    assert [part.name for part in processes] == ["worker-1", "worker-1.1", "worker-1.2"]
    assert {part._order.ranks for part in processes} == {("worker-1", "worker-1.1", "worker-1.2")}
    with pytest.raises(OSError, match="has 1 CPU and 2 GPU for each of 3 ranks, not 1 CPU and 2 GPU"):
        cluster.worker("worker-1", Role.DECODE, Setup(0, CONFIG, Path("c")), lambda *_: None)


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

    process = RayProcess(RunWorker(CONFIG, "worker-0", Role.DECODE), dict, lambda name, line: None)
    process._runner = Runner()
    async with asyncio.timeout(DEADLINE_S):
        await process.stop(3.0)
    assert told == [3.0, 3.0]
