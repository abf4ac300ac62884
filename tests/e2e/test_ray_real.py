"""Real engines on a Ray cluster of three nodes that are faked on this machine: 1P1D, each engine on a node of its own.

One fleet goes through all of it, in this order.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support_client import Answer, FleetClient
from support_fleet import START_TIMEOUT_S, RunningFleet, operators_key, token_prompt, with_operators_key
from support_ray import FakeCluster, fake_cluster, on_ray, processes_of
from support_redis import Server

from orchestrator.store.client import connect
from orchestrator.store.registry import Registry

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.topology, pytest.mark.timeout(600)]

GPUS = 1  # that a node offers, and a worker takes
PROMPTS = [token_prompt(length, seed=length) for length in (300, 420, 513, 700)]
MAX_TOKENS, LONG = 16, 400
# Without prefix caches every remote prefill moves all of its prompt's KV, and a prompt that is asked for again, too.
ENGINE = {
    "dtype": "float32",
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "enable_prefix_caching": False,
}
LOCAL = {"prompt_logprobs": 0}  # a prompt whose logprobs are asked for is prefilled where it is decoded


class RayFleet:
    """1P1D, and the frontend on the node where prompts are prefilled at first, which stays."""

    def __init__(self, sets: list[str], server: Server) -> None:
        self._sets, self._url = sets, server.url
        self.launcher = with_operators_key(RunningFleet("demo-1p1d-cpu.yaml", *sets, forked=False))  # see test_ray.py
        self.launcher.until(lambda: self.launcher.shape() == (1, 1), "1P1D")
        (prefill,), (decode,) = self.launcher.workers("prefill"), self.launcher.workers("decode")
        self.stays, self.victim = prefill["host"], decode["host"]
        url, key = asyncio.run(self._frontend_on(self.stays)), operators_key(self.launcher)
        self.frontend = FleetClient(url, self.launcher.namespace, key)

    def up_again(self) -> None:
        again = RunningFleet("demo-1p1d-cpu.yaml", *self._sets, namespace=self.launcher.namespace, forked=False)
        self.launcher = with_operators_key(again)

    def where(self) -> dict[str, tuple[str, str, int]]:
        """Role, host and process of each worker."""
        return {w["id"]: (w["role"], w["host"], w["pid"]) for w in self.frontend.workers()}

    async def _frontend_on(self, host: str) -> str:
        async with await connect(self._url, 5) as redis:
            frontends = await Registry(redis, self.launcher.namespace).frontends()
            return next(frontend.url for frontend in frontends.values() if f"//{host}:" in frontend.url)

    async def ask(self, prompts: list[Any], max_tokens: int, **more: Any) -> list[list[int]]:
        return tokens_of(await self.frontend.ask_all(prompts, concurrency=2, max_tokens=max_tokens, **more))

    def placed(self, decision: str) -> float:
        return self.frontend.metric("pd_placements_total", decision=decision)


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    assert [(answer.status, answer.error) for answer in answers if not answer.ok] == []
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def cluster(server: Server) -> Iterator[FakeCluster]:
    with fake_cluster(server.url, 2, GPUS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def fleet(server: Server, cluster: FakeCluster, model: str) -> Iterator[RayFleet]:
    sets = [
        f"model={model}",
        *on_ray(server, cluster),
        "routing.remote_prefill_min_tokens=32",
        "workers.engine_args.enable_prefix_caching=false",
        *(f"workers.engine_args.{name}={value}" for name, value in ENGINE.items()),
    ]
    fleet = RayFleet(sets, server)
    try:
        yield fleet
    finally:
        fleet.launcher.http.close()
        fleet.launcher.stop()
        left = processes_of(fleet.launcher.namespace)
    assert left == [], "`up` ends everything on every node"


@pytest.fixture(scope="module")
def truth(fleet: RayFleet) -> list[list[int]]:
    """What the decode engine answers by itself, without KV of another."""
    right = asyncio.run(fleet.ask(PROMPTS, LONG, **LOCAL))
    assert fleet.placed("remote") == 0
    return right


async def test_kv_passes_between_engines_of_two_nodes(fleet: RayFleet, truth: list[list[int]]) -> None:
    assert fleet.stays != fleet.victim
    assert await fleet.ask(PROMPTS, MAX_TOKENS) == [tokens[:MAX_TOKENS] for tokens in truth]
    assert fleet.placed("remote") == len(PROMPTS)
    assert fleet.frontend.metric("pd_retries_total") == fleet.frontend.metric("pd_kv_transfer_failures_total") == 0


async def test_engines_swap_their_roles(fleet: RayFleet, truth: list[list[int]]) -> None:
    """The one that sent KV receives it, and the other way round. Meanwhile both prefill what they decode."""
    frontend, before = fleet.frontend, fleet.where()
    roles = {role: name for name, (role, _, _) in before.items()}
    for worker, role, shape in ((roles["prefill"], "decode", (0, 2)), (roles["decode"], "prefill", (1, 1))):
        remote = fleet.placed("remote")
        await asyncio.to_thread(fleet.launcher.cli, "role", worker, role)
        await frontend.soon(lambda shape=shape: frontend.shape() == shape, f"{shape}")
        assert await fleet.ask(PROMPTS, MAX_TOKENS) == [tokens[:MAX_TOKENS] for tokens in truth]
        assert fleet.placed("remote") == remote + (len(PROMPTS) if shape[0] else 0)
    other = {"prefill": "decode", "decode": "prefill"}
    assert fleet.where() == {name: (other[role], host, pid) for name, (role, host, pid) in before.items()}
    for worker, role, shape in ((roles["decode"], "decode", (0, 2)), (roles["prefill"], "prefill", (1, 1))):
        await asyncio.to_thread(fleet.launcher.cli, "role", worker, role)
        await frontend.soon(lambda shape=shape: frontend.shape() == shape, f"{shape}")
    assert fleet.where() == before


async def test_the_head_and_the_launcher_are_lost_and_up_takes_over_what_runs(
    fleet: RayFleet, cluster: FakeCluster, truth: list[list[int]]
) -> None:
    before, remote = fleet.where(), fleet.placed("remote")
    cluster.kill_head()
    fleet.launcher.process.kill()
    await asyncio.to_thread(fleet.launcher.process.wait, 30)
    assert await fleet.ask(PROMPTS, MAX_TOKENS) == [tokens[:MAX_TOKENS] for tokens in truth]
    assert fleet.placed("remote") == remote + len(PROMPTS), "the fleet serves on"
    cluster.start_head_again()
    fleet.launcher.http.close()
    await asyncio.to_thread(fleet.up_again)
    assert fleet.where() == before, "the same processes"


async def test_a_stream_outlives_the_node_that_decodes_it(
    fleet: RayFleet, cluster: FakeCluster, truth: list[list[int]]
) -> None:
    """The prefill engine goes on with it from the tokens that are out. What has no room waits for a node that has some,
    and KV passes again when one comes."""
    frontend = fleet.frontend
    streams = asyncio.create_task(frontend.ask_all(PROMPTS, concurrency=len(PROMPTS), max_tokens=LONG))
    (decode,) = frontend.workers("decode")
    await frontend.soon(
        lambda: frontend.metric("pd_worker_requests", worker=decode["id"], state="running") == len(PROMPTS),
        "all are decoded there",
    )
    await asyncio.to_thread(cluster.kill, fleet.victim)
    assert tokens_of(await streams) == truth
    assert frontend.metric("pd_retries_total") >= len(PROMPTS), "they were not done before"
    await asyncio.to_thread(fleet.launcher.wait_for_line, r"waits for a node that has 1 CPU and 1 GPU free", 60)
    added = cluster.add(GPUS)  # Ray sets signal handlers, which only the main thread may
    await frontend.soon(lambda: frontend.shape() == (1, 1), "replaced", START_TIMEOUT_S)
    assert {worker["host"] for worker in frontend.workers()} == {fleet.stays, added}
    remote = fleet.placed("remote")
    assert await fleet.ask(PROMPTS, MAX_TOKENS) == [tokens[:MAX_TOKENS] for tokens in truth]
    assert fleet.placed("remote") == remote + len(PROMPTS)
    frontend.assert_no_leaks()


async def test_scale_ends_an_engine_and_starts_one_in_its_place(fleet: RayFleet, truth: list[list[int]]) -> None:
    frontend, before = fleet.frontend, fleet.where()
    (stays,) = frontend.workers("decode")
    await asyncio.to_thread(fleet.launcher.cli, "scale", "prefill=0")
    await frontend.soon(lambda: fleet.where().keys() == {stays["id"]}, "one is drained")
    await asyncio.to_thread(fleet.launcher.cli, "scale", "prefill=1")
    await frontend.soon(lambda: frontend.shape() == (1, 1), "another is there", START_TIMEOUT_S)
    after, remote = fleet.where(), fleet.placed("remote")
    assert after[stays["id"]] == before[stays["id"]]
    assert {host for _, host, _ in after.values()} == {host for _, host, _ in before.values()}
    assert await fleet.ask(PROMPTS, MAX_TOKENS) == [tokens[:MAX_TOKENS] for tokens in truth]
    assert fleet.placed("remote") == remote + len(PROMPTS)
    frontend.assert_no_leaks()


async def test_node_added_while_requests_stream_is_used(
    fleet: RayFleet, cluster: FakeCluster, truth: list[list[int]]
) -> None:
    frontend, before = fleet.frontend, fleet.where()
    async with frontend.under_load(PROMPTS, concurrency=3, max_tokens=LONG) as answers:
        await asyncio.to_thread(fleet.launcher.cli, "scale", "decode=2")
        added = cluster.add(GPUS)
        await frontend.soon(lambda: frontend.shape() == (1, 2), "it has a decode worker", START_TIMEOUT_S)
        (new,) = (worker for worker in frontend.workers() if worker["id"] not in before)
        assert new["host"] == added
        running = {"worker": new["id"], "state": "running"}
        await frontend.soon(lambda: frontend.metric("pd_worker_requests", **running) > 0, "it decodes")
    assert [(answer.status, answer.error) for answer in answers if not answer.ok] == []
    assert all(answer.tokens == truth[PROMPTS.index(answer.prompt)] for answer in answers)
    await asyncio.to_thread(fleet.launcher.cli, "scale", "decode=1")
    await frontend.soon(lambda: frontend.shape() == (1, 1), "one is drained")
    frontend.assert_no_leaks()
