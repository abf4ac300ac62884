"""A fleet on a Ray cluster of three nodes that are faked on this machine: real Ray, real processes, simulated engines.

One fleet goes through all of it, in this order. Roles, and launchers that are killed: `test_ray_real.py`.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_fleet import RunningFleet, token_prompt, with_operators_key
from support_ray import FakeCluster, fake_cluster, on_ray, processes_of
from support_redis import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.topology, pytest.mark.timeout(600)]

GPUS = 3  # of a node; a worker takes one
PROMPTS = [token_prompt(200 + 300 * seed, seed) for seed in range(6)]
ADDRESSES = ("127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="module")
def cluster(server: Server) -> Iterator[FakeCluster]:
    with fake_cluster(server.url) as cluster:
        assert (cluster.add(GPUS), cluster.add(GPUS)) == ADDRESSES
        yield cluster


@pytest.fixture(scope="module")
def fleet(server: Server, cluster: FakeCluster) -> Iterator[RunningFleet]:
    # Not forked: Ray reads its variables when it is imported.
    running = with_operators_key(RunningFleet("sim-2p2d.yaml", *on_ray(server, cluster), forked=False))
    assert processes_of(running.namespace)
    yield running
    running.http.close()
    running.stop()
    assert processes_of(running.namespace) == [], "`up` ends everything on every node"


def test_workers_are_spread_over_the_nodes_and_answer(fleet):
    fleet.until(lambda: fleet.shape() == (2, 2), "2P2D")
    assert {worker["host"] for worker in fleet.workers()} == set(ADDRESSES)
    answers = asyncio.run(fleet.ask_all(PROMPTS, concurrency=3))
    assert all(answer.ok for answer in answers), answers


def test_the_head_is_lost_and_serving_goes_on(fleet, cluster):
    before = fleet.pids()
    cluster.kill_head()
    answers = asyncio.run(fleet.ask_all(PROMPTS, concurrency=3))
    assert all(answer.ok for answer in answers), answers
    cluster.start_head_again()
    fleet.cli("scale", "prefill=1", "decode=3")
    fleet.until(lambda: fleet.shape() == (1, 3), "1P3D")
    assert fleet.pids().keys() == before.keys()
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
