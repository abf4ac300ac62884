"""A fleet on a Ray cluster of three nodes that are faked on this machine: real Ray, real processes, simulated engines.

One fleet goes through all of it, in this order. Roles, and launchers that are killed: `test_ray_real.py`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_fleet import RunningFleet, token_prompt, with_operators_key
from support_ray import FakeCluster, fake_cluster, processes_of

from orchestrator.launch.host.redis_server import EmbeddedRedis

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.topology, pytest.mark.timeout(600)]

GPUS = 3  # of a node; a worker takes one
PROMPTS = [token_prompt(200 + 300 * seed, seed) for seed in range(6)]
ADDRESSES = ("127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis()
    asyncio.run(server.start(tmp_path_factory.mktemp("redis")))
    yield server
    asyncio.run(server.stop())


@pytest.fixture(scope="module")
def cluster(store: EmbeddedRedis) -> Iterator[FakeCluster]:
    with fake_cluster(store.url) as cluster:
        assert (cluster.add(GPUS), cluster.add(GPUS)) == ADDRESSES
        yield cluster


@pytest.fixture(scope="module")
def fleet(store: EmbeddedRedis, cluster: FakeCluster) -> Iterator[RunningFleet]:
    sets = (
        f"redis.url={store.url}",
        "redis.timeout_s=5",
        "launcher.kind=ray",
        f"launcher.address={cluster.address}",
        "launcher.gpus_per_rank=1",
    )
    running = with_operators_key(
        RunningFleet("sim-2p2d.yaml", *sets, forked=False)
    )  # Ray reads its variables when it is imported
    assert processes_of(running.namespace)
    yield running
    running.http.close()
    running.stop()
    assert processes_of(running.namespace) == [], "`up` ends everything on every node"


def pids(fleet: RunningFleet) -> dict[str, int]:
    return {worker["id"]: worker["pid"] for worker in fleet.workers()}


def test_workers_are_spread_over_the_nodes_and_answer(fleet):
    fleet.until(lambda: fleet.shape() == (2, 2), "2P2D")
    assert {worker["host"] for worker in fleet.workers()} == set(ADDRESSES)
    answers = asyncio.run(fleet.ask_all(PROMPTS, concurrency=3))
    assert all(answer.ok for answer in answers), answers


def test_a_node_dies_under_load_and_another_comes(fleet, cluster):
    """Nobody but those who were connected to its frontend notices. What has no room waits until a node has some."""
    here = fleet.url.split("//")[1].split(":")[0]
    victim = next(address for address in ADDRESSES if address != here)

    async def under_load() -> None:
        async with fleet.under_load(PROMPTS, concurrency=4, max_tokens=100) as answers:
            await asyncio.sleep(2)
            await asyncio.to_thread(cluster.kill, victim)
            killed_at = time.monotonic()
            await fleet.soon(lambda: len([w for w in fleet.workers() if w["host"] == here]) == GPUS, "the room is used")
            print(f"replaced after {time.monotonic() - killed_at:.1f} s")
            await asyncio.to_thread(fleet.wait_for_line, r"waits for a node that has 1 CPU and 1 GPU free", 60)
            added = cluster.add(GPUS)  # Ray sets signal handlers, which only the main thread may
            added_at = time.monotonic()
            await fleet.soon(lambda: sum(fleet.shape()) == 4, "four workers")
            print(f"the new node {added} used after {time.monotonic() - added_at:.1f} s")
        assert answers and all(answer.ok for answer in answers), [answer for answer in answers if not answer.ok]
        assert {worker["host"] for worker in fleet.workers()} == {here, added}

    asyncio.run(under_load())


def test_the_head_is_lost_and_serving_goes_on(fleet, cluster):
    before = pids(fleet)
    cluster.kill_head()
    answers = asyncio.run(fleet.ask_all(PROMPTS, concurrency=3))
    assert all(answer.ok for answer in answers), answers
    cluster.start_head_again()
    fleet.cli("scale", "prefill=1", "decode=3")
    fleet.until(lambda: fleet.shape() == (1, 3), "1P3D")
    assert pids(fleet).keys() == before.keys()
    fleet.cli("scale", "prefill=2", "decode=2")
    fleet.until(lambda: fleet.shape() == (2, 2), "2P2D again")


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["redis.url=embedded"], "redis.url: launcher.kind: ray needs a Redis that every node reaches"),
        (["redis.url=redis://127.0.0.1:1", "launcher.address=127.0.0.1:1"], "launcher.address: no Ray cluster"),
    ],
)
def test_impossible_start_is_one_line(sets: list[str], said: str):
    command = [sys.executable, "-m", "orchestrator.cli.main", "up", "configs/sim-2p2d.yaml", "--set=launcher.kind=ray"]
    command += [f"--set={item}" for item in ["namespace=no-ray", *sets]]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], text=True, capture_output=True, timeout=120)
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1]
