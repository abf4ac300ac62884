"""Prefixes from other workers' caches or from host memory, on real vLLM engines: turns are prefilled where the device
has not their history. Tokens are those of one engine that keeps all of them, also while workers are stopped and killed
and clients go away. PD_FETCH_REQUESTS=300 compares so many answers of each fleet.
"""

import asyncio
import itertools
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support_fleet import START_TIMEOUT_S, RunningFleet, descendants, running_fleet, token_prompt
from support_second_host import THERE, HandWorker, redis_between, running_second_host
from support_vllm import Driver, frames

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK_SIZE, CACHE_BYTES = 32, 134_217_728
# The prefill worker has room for one conversation, so its cache has no history of another by the next turn.
SETTINGS = (
    "workers.engine_args.dtype=float32",
    f"workers.engine_args.block_size={BLOCK_SIZE}",
    f"workers.engine_args.kv_cache_memory_bytes={CACHE_BYTES}",
    "workers.engine_args.max_model_len=2048",
    "workers.prefill.engine_args.kv_cache_memory_bytes=9437184",
    "workers.decode.replicas=2",
    "routing.remote_prefill_min_tokens=64",
    "routing.decode_choice=round_robin",
    "kv.fetch=auto",
    "kv.verify=true",
    "kv.transfer_timeout_s=5",
)
CONVERSATIONS, TURNS, MAX_TOKENS, FIRST_TOKENS, MORE_TOKENS = 4, 3, 24, 1600, 120
LONGEST = FIRST_TOKENS + TURNS * (MAX_TOKENS + MORE_TOKENS)
ROUNDS = max(2, -(-int(os.environ.get("PD_FETCH_REQUESTS", 0)) // (CONVERSATIONS * TURNS)))
FIRST_SEEDS = range(0, 100 * ROUNDS, 100)  # of the prompts of a round without faults, and of those with them
Said = list[list[list[int]]]  # tokens, by turn and conversation


async def converse(ask: Callable[[list[int]], Awaitable[list[int]]], seed: int) -> Said:
    """All conversations in turns; the answers."""
    said: Said = []
    histories = [token_prompt(FIRST_TOKENS, seed=seed + number) for number in range(CONVERSATIONS)]
    for turn in range(TURNS):
        said.append([])
        for number, history in enumerate(histories):
            answer = await ask(history)
            assert len(answer) == MAX_TOKENS, (turn, number)
            said[-1].append(answer)
            history += answer + token_prompt(MORE_TOKENS, seed=1000 + 10 * turn + number)
    return said


@pytest.fixture(scope="module")
def truths(model: str) -> list[Said]:
    return asyncio.run(said_by_one_engine(model))


async def said_by_one_engine(model: str) -> list[Said]:
    """For each of FIRST_SEEDS."""
    engine = await Driver.start(
        Path(model), block_size=BLOCK_SIZE, max_model_len=LONGEST, kv_cache_memory_bytes=CACHE_BYTES
    )

    said = [await converse(lambda prompt: engine.alone(frames(prompt, MAX_TOKENS)), seed) for seed in FIRST_SEEDS]
    await engine.stop()
    return said


async def said_by(fleet: RunningFleet, seed: int, aborts: bool = False) -> Said:
    """`aborts`: before each request another client asks for the same history, and goes away at some moment."""
    moments = itertools.cycle(range(10))
    async with fleet.client() as client:

        async def ask(prompt: list[int]) -> list[int]:
            if aborts:
                unwanted = asyncio.create_task(fleet.ask(client, [*prompt, *token_prompt(MORE_TOKENS)], MAX_TOKENS))
                await asyncio.wait({unwanted}, timeout=0.05 * next(moments))
                unwanted.cancel()
            answer = await fleet.ask(client, prompt, MAX_TOKENS)
            assert answer.ok, answer.error
            return answer.tokens

        return await converse(ask, seed)


def fetches(fleet: RunningFleet, outcome: str) -> float:
    return fleet.metric("pd_kv_fetches_total", outcome=outcome)


async def test_fetched_history_gives_the_same_answers_and_holders_may_fail(model, truths):
    with running_fleet("demo-1p1d-cpu.yaml", *SETTINGS, f"model={model}") as fleet:
        assert await said_by(fleet, FIRST_SEEDS[0]) == truths[0]
        fleet.until(lambda: fetches(fleet, "fetched") >= (TURNS - 1) * CONVERSATIONS / 2, "most turns are fetched")
        assert fleet.metric("pd_kv_fetched_tokens_total") > fetches(fleet, "fetched") * FIRST_TOKENS / 2
        assert fleet.metric("pd_kv_transfer_failures_total") == 0, "what arrived is what was sent"
        fleet.assert_no_leaks()
        await said_beside_faults(fleet, truths, fail_holders)


async def test_history_in_host_memory_gives_the_same_answers_and_its_worker_may_be_killed(model, truths):
    tier = ("kv.fetch=off", "workers.decode.replicas=1", f"kv.host_tier_bytes={CACHE_BYTES}", f"model={model}")
    with running_fleet("demo-1p1d-cpu.yaml", *SETTINGS, *tier) as fleet:
        assert await said_by(fleet, FIRST_SEEDS[0]) == truths[0]
        later_turns = (TURNS - 1) * CONVERSATIONS * FIRST_TOKENS
        fleet.until(lambda: fleet.metric("pd_kv_host_hit_tokens_total") > later_turns / 2, "most histories are loaded")
        assert fleet.metric("pd_kv_transfer_failures_total") == 0, "what arrived is what was sent"
        fleet.assert_no_leaks()
        await said_beside_faults(fleet, truths, kill_prefill)


@pytest.mark.topology
async def test_history_in_another_hosts_memory_is_fetched(model, truths, tmp_path_factory, monkeypatch):
    """The prefill worker is on the other host, and started anew before the second turn, so that it has no history. The
    decode worker's device has room for two conversations, its host memory for all. A step of 32 tokens costs the same
    as one of many, so that a history takes 50 steps to compute and two to fetch, on whatever machine."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # the hosts have one kernel, so UCX would share memory
    sets = ("workers.prefill.replicas=0", "workers.decode.replicas=1", f"kv.host_tier_bytes={CACHE_BYTES}")
    sets += ("workers.decode.engine_args.kv_cache_memory_bytes=18874368", "workers.bind=auto")
    sets += ("workers.prefill.engine_args.max_num_batched_tokens=32", "security.trust_network=true", f"model={model}")
    with running_second_host() as there, redis_between(tmp_path_factory.mktemp("redis")) as url:
        with running_fleet("demo-1p1d-cpu.yaml", *SETTINGS, *sets, f"redis.url={url}") as fleet:
            far = HandWorker(fleet, "far", there, role="prefill")
            asked = itertools.count()
            try:
                async with fleet.client() as client:

                    async def ask(prompt: list[int]) -> list[int]:
                        if (number := next(asked)) == CONVERSATIONS:
                            await asyncio.to_thread(far.stop)
                            far.start()
                        if number in (0, CONVERSATIONS):
                            await asyncio.to_thread(far.until_joined, fleet, START_TIMEOUT_S)
                        answer = await fleet.ask(client, prompt, MAX_TOKENS)
                        assert answer.ok, answer.error
                        return answer.tokens

                    assert await converse(ask, FIRST_SEEDS[0]) == truths[0]
                assert {w["id"]: w["host"] for w in fleet.workers("prefill")} == {"far": THERE}
                fleet.until(lambda: fetches(fleet, "fetched") > 2, "more than the decode worker's device has")
                assert fleet.metric("pd_kv_transfer_failures_total") == 0, "what arrived is what was sent"
                fleet.assert_no_leaks()
            finally:
                far.stop()


async def said_beside_faults(
    fleet: RunningFleet, truths: list[Said], fail: Callable[[RunningFleet], Awaitable[None]]
) -> None:
    shape = fleet.shape()
    for seed, truth in zip(FIRST_SEEDS[1:], truths[1:], strict=True):
        await fleet.soon(lambda: fleet.shape() == shape, "whoever was killed is back", START_TIMEOUT_S)
        failing = asyncio.ensure_future(fail(fleet))
        assert await said_by(fleet, seed, aborts=True) == truth
        await failing
    fleet.assert_no_leaks()


async def kill_prefill(fleet: RunningFleet) -> None:
    """Once it loads histories of this load."""
    (worker,) = fleet.workers("prefill")
    loaded = fleet.metric("pd_kv_host_hit_tokens_total")
    await fleet.soon(lambda: fleet.metric("pd_kv_host_hit_tokens_total") > loaded, "histories are loaded")
    for pid in [*descendants(worker["pid"]), worker["pid"]]:
        os.kill(pid, signal.SIGKILL)


async def fail_holders(fleet: RunningFleet) -> None:
    """A decode worker and its engine are stopped for a while, then the other one is killed, while turns go on."""
    stopped, killed = fleet.workers("decode")
    asked = fetches(fleet, "fetched")
    await fleet.soon(lambda: fetches(fleet, "fetched") > asked, "fetches go on")
    family = [stopped["pid"], *descendants(stopped["pid"])]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(3)
    for pid in family:
        os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(1)
    for pid in [*descendants(killed["pid"]), killed["pid"]]:
        os.kill(pid, signal.SIGKILL)
