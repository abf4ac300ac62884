"""Data-parallel groups on a Ray cluster: with ranks on several nodes they start, scale, restart and end as one.

The nodes are faked on this machine. Engines are real in the first test, and simulated in the others, most of which one
fleet goes through, in this order.
"""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from support_client import nobody_fails
from support_experts import EXPERTS, experts
from support_fleet import START_TIMEOUT_S, RunningFleet, running_fleet, token_prompt, with_operators_key
from support_ray import FakeCluster, fake_cluster, on_ray, processes_of
from support_redis import Server

from orchestrator.store.client import connect
from orchestrator.store.registry import Registry

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.topology, pytest.mark.timeout(600)]

GPUS = 3  # of a node; a rank takes one
NODES, SIZE, SHAPE = 2, 2, (2, 4)  # 1 prefill group and 2 decode groups: one of the three is on both nodes
PROMPTS = [token_prompt(200 + 300 * seed, seed) for seed in range(6)]
MAX_TOKENS, USERS = 60, 4


@pytest.fixture(scope="module")
def cluster(server: Server) -> Iterator[FakeCluster]:
    with fake_cluster(server.url, NODES, GPUS) as cluster:
        yield cluster


class Fleets:
    """Launchers of one namespace, one after the other. A rank takes a GPU unless `sets` say otherwise."""

    def __init__(self, server: Server, cluster: FakeCluster, config: str, *sets: str) -> None:
        self._cluster, self._config = cluster, config
        self._sets = [*on_ray(server, cluster), "ratio.mode=off", "security.trust_network=true", *sets]
        self.now = self._up("")

    def up_again(self, *sets: str) -> None:
        self._sets += sets
        self.now = self._up(self.now.namespace)

    def _up(self, namespace: str) -> RunningFleet:
        # Not forked: Ray reads its variables when it is imported.
        return with_operators_key(RunningFleet(self._config, *self._sets, namespace=namespace, forked=False))

    def kill_launcher(self) -> None:
        self.now.process.kill()
        self.now.process.wait(30)
        self.now.http.close()

    def units(self) -> list[str]:
        """Those that serve. Each has a place on the cluster, and nothing else has one."""
        units = sorted({worker["unit"] for worker in self.now.workers()})
        assert self._cluster.places(self.now.namespace) == units
        return units

    def end(self) -> None:
        self.now.http.close()
        self.now.stop()
        assert processes_of(self.now.namespace) == [], "`up` ends everything on every node"
        assert self._cluster.places(self.now.namespace) == [], "and gives all places back"


def test_real_engines_share_their_experts_over_nodes(
    server: Server, cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sets = [*EXPERTS, experts(tmp_path_factory.mktemp("model")), "workers.prefill.replicas=0"]
    sets += ["workers.decode.replicas=1", "workers.engine_args.max_num_seqs=8"]
    with running_fleet("demo-1p1d-cpu.yaml", *sets) as fleet:
        truth = asyncio.run(fleet.ask_all(PROMPTS, concurrency=USERS))
    sets += [f"workers.engine_args.data_parallel_size={SIZE}", "workers.engine_args.enable_expert_parallel=true"]
    sets.append(f"launcher.gpus_per_rank={GPUS - 1}")  # a node has room for one rank
    on_ray = Fleets(server, cluster, "demo-1p1d-cpu.yaml", *sets)
    try:
        fleet = on_ray.now
        fleet.until(lambda: fleet.shape() == (0, SIZE), "both ranks are ready", START_TIMEOUT_S)
        assert len({worker["host"] for worker in fleet.workers()}) == SIZE
        answers = asyncio.run(fleet.ask_all(PROMPTS, concurrency=USERS))
        assert [answer.error for answer in truth + answers if not answer.ok] == []
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in truth]
        fleet.assert_no_leaks()
    finally:
        on_ray.end()


def test_each_role_has_groups_of_its_size_and_a_group_that_starts_again_is_of_its_role(
    server: Server, cluster: FakeCluster
) -> None:
    fleets = Fleets(
        server, cluster, "sim-2p2d.yaml", "workers.decode.engine_args.data_parallel_size=2", "workers.timeout_s=2",
        "workers.prefill.replicas=1", "workers.decode.replicas=1",
    )  # fmt: skip
    try:
        fleet = fleets.now
        fleet.until(lambda: fleet.shape() == (1, 2), "one prefills, a group of two decodes")
        (moved,) = (worker["id"] for worker in fleet.workers("prefill"))

        def moves_and_dies(role: str, before: tuple[int, int], after: tuple[int, int]) -> None:
            fleet.cli("role", moved, role)
            fleet.until(lambda: fleet.shape() == before, f"it is of the {role} role, as it is")
            fleet.until(lambda: asyncio.run(held_as(fleet, moved)) == role, "its launcher has read so")
            os.kill(ranks(fleet)[moved][2], signal.SIGKILL)
            fleet.until(lambda: fleet.shape() == after, "it starts again as that role is")
            assert moved in fleets.units()

        moves_and_dies("decode", (0, 3), (0, 4))
        moves_and_dies("prefill", (2, 2), (1, 2))
        before = ranks(fleet)
        fleets.kill_launcher()
        fleets.up_again("workers.decode.engine_args.data_parallel_size=3")
        fleet = fleets.now
        assert ranks(fleet) == before, "what runs is taken over as it is"
        fleet.cli("restart")
        fleet.until(lambda: fleet.shape() == (1, 3), "and is of the new size once it starts again")
        answers = asyncio.run(fleet.ask_all(PROMPTS, concurrency=6))
        assert all(answer.ok for answer in answers), answers
        assert len(fleets.units()) == 2
    finally:
        fleets.end()


@pytest.fixture(scope="module")
def fleets(server: Server, cluster: FakeCluster) -> Iterator[Fleets]:
    sets = (f"workers.engine_args.data_parallel_size={SIZE}", "workers.timeout_s=2")
    shape = ("workers.prefill.replicas=1", "workers.decode.replicas=2")
    fleets = Fleets(server, cluster, "sim-2p2d.yaml", *sets, *shape)
    yield fleets
    fleets.end()


def ranks(fleet: RunningFleet) -> dict[str, tuple[str, str, int]]:
    """Unit, host and process of each rank."""
    return {w["id"]: (w["unit"], w["host"], w["pid"]) for w in fleet.workers()}


async def held_as(fleet: RunningFleet, unit: str) -> str | None:
    """The role in which its launcher would start it again."""
    async with await connect(fleet.redis_url(), 5) as redis:
        launchers = await Registry(redis, fleet.namespace).launchers()
    return next((launcher.workers[unit].value for launcher in launchers.values() if unit in launcher.workers), None)


def pids(fleet: RunningFleet) -> set[int]:
    return {pid for _, _, pid in ranks(fleet).values()}


def test_ranks_on_several_nodes_serve(fleets: Fleets) -> None:
    fleet = fleets.now
    fleet.until(lambda: fleet.shape() == SHAPE, "all are ready")
    hosts = {unit: {host for each, host, _ in ranks(fleet).values() if each == unit} for unit in ranks(fleet)}
    assert max(map(len, hosts.values())) == NODES, "the last group has no node of its own"
    answers = asyncio.run(fleet.ask_all(PROMPTS, concurrency=6))
    assert all(answer.ok for answer in answers), answers


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_dies_and_its_group_starts_again_as_one(fleets: Fleets, rank: int) -> None:
    fleet = fleets.now
    before = ranks(fleet)
    unit = fleet.workers("decode")[0]["unit"]
    group = {name: pid for name, (its, _, pid) in before.items() if its == unit}
    async with nobody_fails([fleet], PROMPTS, USERS, MAX_TOKENS):
        os.kill(list(group.values())[rank], signal.SIGKILL)
        await fleet.soon(lambda: not {*group.values()} & pids(fleet), "both are gone")
        await fleet.soon(lambda: fleet.shape() == SHAPE, "the group is back")
    after = ranks(fleet)
    assert after.keys() == before.keys(), "it has its id"
    assert {name for name in before if before[name] != after[name]} == group.keys()


async def test_orders_are_of_whole_groups(fleets: Fleets) -> None:
    fleet = fleets.now
    async with nobody_fails([fleet], PROMPTS, USERS, MAX_TOKENS):
        await asyncio.to_thread(fleet.cli, "scale", "decode=1")
        await fleet.soon(lambda: fleet.shape() == (2, 2), "a group has drained")
        await asyncio.to_thread(fleet.cli, "scale", "decode=2")
        await fleet.soon(lambda: fleet.shape() == SHAPE, "a group has come")
        before = ranks(fleet)
        done = await asyncio.to_thread(fleet.cli, "restart")
        await fleet.soon(lambda: fleet.shape() == SHAPE, "all are ready")
    assert "3 workers restarted" in done.stdout
    after = ranks(fleet)
    assert after.keys() == before.keys() and all(after[name] != before[name] for name in before)


def test_a_launcher_is_killed_and_the_next_one_takes_the_groups_over(fleets: Fleets) -> None:
    before = ranks(fleets.now)
    fleets.kill_launcher()
    fleets.up_again()
    assert ranks(fleets.now) == before and len(fleets.units()) == 3


async def test_a_node_dies_and_its_groups_start_again_as_one(fleets: Fleets, cluster: FakeCluster) -> None:
    fleet = fleets.now
    before, here = ranks(fleet), fleet.url.split("//")[1].split(":")[0]
    victim = next(host for _, host, _ in before.values() if host != here)
    broken = {unit for unit, host, _ in before.values() if host == victim}
    gone = {pid for unit, _, pid in before.values() if unit in broken}
    async with nobody_fails([fleet], PROMPTS, USERS, MAX_TOKENS):
        await asyncio.to_thread(cluster.kill, victim)
        await fleet.soon(lambda: not gone & pids(fleet), "all of their ranks are gone")
        cluster.add(GPUS)  # Ray sets signal handlers, which only the main thread may
        await fleet.soon(lambda: fleet.shape() == SHAPE, "others are there")
    assert len(pids(fleet)) == sum(SHAPE) and not gone & pids(fleet)
    fleet.assert_no_leaks()


def test_a_launcher_dies_with_the_node_of_a_first_rank_and_nothing_is_left_behind(
    fleets: Fleets, cluster: FakeCluster
) -> None:
    """The other rank's runner holds its GPU, and nobody can tell what it was for."""
    before = ranks(fleets.now)
    hosts = {unit: [host for each, host, _ in before.values() if each == unit] for unit, _, _ in before.values()}
    victim = next(its[0] for its in hosts.values() if len(set(its)) == NODES)
    fleets.kill_launcher()
    cluster.kill(victim)
    cluster.add(GPUS)
    fleets.up_again()
    fleet = fleets.now
    fleet.until(lambda: fleet.shape() == SHAPE, "all are there again, and have room")
    assert len(fleets.units()) == 3
    answers = asyncio.run(fleet.ask_all(PROMPTS, concurrency=6))
    assert all(answer.ok for answer in answers), answers
    fleet.assert_no_leaks()
