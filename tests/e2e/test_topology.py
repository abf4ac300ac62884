"""Engines of several ranks and pipeline stages, on a CPU: whatever their numbers, tokens are those of one engine.

Slow: each rank is a process. `make test-topology` runs it, `make test` does not.
"""

import asyncio
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from async_on_cpu.async_on_cpu import install as async_on_cpu
from support_fleet import running_fleet, small_model, token_prompt
from support_vllm import Driver, engine_pid, frames, tiny_model
from support_wait import DEADLINE_S, until
from vllm.v1.engine.core import EngineCore

from orchestrator.config.settings import KVConfig

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.topology,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
AHEAD = {**TP2, "async_scheduling": True}  # with `tests/async_on_cpu`
TOPOLOGIES = {
    "TP2-TP2": (TP2, TP2, "chunk"),
    "TP1-TP2": ({}, TP2, "layer"),  # the last chunk comes by layer, and is sent with the others
    "TP2-TP1": (TP2, {}, "layer"),
    "PP2-PP1": (PP2, {}, "chunk"),
    "TP2-TP2-ahead": (AHEAD, AHEAD, "chunk"),
    "TP2-TP1-ahead": (AHEAD, {"async_scheduling": True}, "layer"),
}
CORES = sorted(os.sched_getaffinity(0))[:2]
TIMEOUT_S = 120.0  # an engine's first step may take 20 s here, and twice that beside others
COUNT = itertools.count()


def prompt(length: int) -> list[int]:
    """Never the same twice."""
    return random.Random(next(COUNT)).choices(range(3, 500), k=length)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(model: Path) -> AsyncIterator[Driver]:
    engine = await Driver.start(model, name="reference", enable_prefix_caching=False)
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TOPOLOGIES)
async def pair(model: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Driver, Driver]]:
    prefill_args, decode_args, by = TOPOLOGIES[request.param]
    kv = KVConfig(transfer=by, transfer_timeout_s=TIMEOUT_S)
    EngineCore.test_batches = lambda engine: engine.batch_queue_size  # engines are forked from here
    with pytest.MonkeyPatch.context() as patch:
        if "async_scheduling" in prefill_args:
            async_on_cpu(patch.setattr)
        prefill = await Driver.start(model, name="prefill", kv=kv, **prefill_args)
        decode = await Driver.start(model, name="decode", kv=kv, **decode_args)
    yield prefill, decode
    await prefill.stop()
    await decode.stop()


async def transfer(prefill: Driver, decode: Driver, key: str, body: list[bytes]) -> None:
    await prefill.prefill(key, body)
    await decode.decode(key, body, prefill.source(key))


async def assert_no_leaks(*drivers: Driver) -> None:
    for driver in drivers:
        await driver.idle()


async def test_steps_begin_ahead_where_asked(pair, request) -> None:
    """One more than there are pipeline stages."""
    asked = TOPOLOGIES[request.node.callspec.params["pair"]][:2]
    begun = [1 + args.get("async_scheduling", args.get("pipeline_parallel_size", 1) - 1) for args in asked]
    assert [await driver.engine.call_engine("test_batches") for driver in pair] == begun


async def test_tokens_are_those_of_one_engine(pair, reference) -> None:
    """Prompts within a block, at its edge, of several chunks (256 tokens), and several at once."""
    prefill, decode = pair
    bodies = {f"many-{next(COUNT)}#1": frames(prompt(length)) for length in (5, 32, 33, 100, 256, 700, 1500)}
    await asyncio.gather(*(transfer(prefill, decode, key, body) for key, body in bodies.items()))
    for key, body in bodies.items():
        assert await decode.done(key, 60) == await reference.alone(body), key
        assert decode.stats[key].num_external_cached_tokens > 0, "the KV came by transfer"
    await assert_no_leaks(prefill, decode)


async def test_prefix_hits_on_both_sides(pair, reference) -> None:
    prefill, decode = pair
    shared = prompt(320)
    for number in range(3):
        key, body = f"hit-{next(COUNT)}#1", frames(shared + prompt(90))
        await transfer(prefill, decode, key, body)
        assert await decode.done(key, 60) == await reference.alone(body)
        assert decode.stats[key].num_local_cached_tokens == (320 if number else 0)
        assert decode.stats[key].num_external_cached_tokens == (90 if number else 410)
    await assert_no_leaks(prefill, decode)


async def test_a_prefix_is_lent_where_kv_can_go_block_by_block(pair, reference) -> None:
    prefill, decode = pair
    if prefill.info.kv.pp_size > 1:
        assert not prefill.info.lends and decode.info.lends
        return
    assert prefill.info.lends and decode.info.lends
    held = prompt(640)
    for holder, asker in ((prefill, decode), (decode, prefill)):
        key, body, asked = f"held-{next(COUNT)}", frames(held), frames(held + prompt(60))
        await holder.decode(key, body)
        await holder.done(key, 60)
        await asker.engine.call("reset_prefix_cache", [], {})
        await asker.decode(f"{key}~", asked, holder.source(f"{key}~"), prefix_tokens=640)
        await holder.engine.lend(f"{key}~", asked, 640)
        await asker.done(f"{key}~", 60)
        assert asker.stats[f"{key}~"].num_external_cached_tokens == 640
        await asker.decode(f"{key}+", asked)
        assert await asker.done(f"{key}+", 60) == await reference.alone(asked)
        assert asker.stats[f"{key}+"].num_local_cached_tokens == 640
    await assert_no_leaks(prefill, decode)


async def test_an_abort_frees_both_sides_and_harms_nobody(pair, reference) -> None:
    prefill, decode = pair
    doomed, other = f"aborted-{next(COUNT)}#1", f"other-{next(COUNT)}#1"
    body = frames(prompt(600))
    await transfer(prefill, decode, doomed, frames(prompt(1500)))
    await transfer(prefill, decode, other, body)
    await decode.engine.abort([doomed])
    await prefill.engine.abort([doomed])
    assert await decode.done(other, 60) == await reference.alone(body)
    await assert_no_leaks(prefill, decode)


async def test_a_killed_rank_ends_its_engine_and_no_request(pair, reference) -> None:
    """The last test of a pair: it takes one engine with it."""
    prefill, decode = pair
    doomed, survivor = (prefill, decode) if len(ranks(prefill)) > 1 else (decode, prefill)
    key, body = f"orphan-{next(COUNT)}#1", frames(prompt(1500))
    await transfer(prefill, decode, key, body)
    os.kill(victim := ranks(doomed)[-1], signal.SIGKILL)
    await until(lambda: doomed.error is not None, "the news that the engine died", timeout_s=DEADLINE_S)
    assert f"the process {victim} of one of its ranks" in str(doomed.error), "not only once vLLM has ended the others"
    await survivor.engine.fail_peer(doomed.info.kv.engine_id)
    if survivor is decode:
        assert await decode.done(key, 60) == await reference.alone(body), "decode computes it"
    await assert_no_leaks(survivor)


@pytest.mark.skipif(len(CORES) < 2, reason="a core for each of two ranks")
async def test_ranks_are_forked_and_compute_on_their_own_cores(model: Path) -> None:
    engine = await Driver.start(model, name="pinned", cores=CORES, **TP2)
    assert [psutil.Process(rank).cpu_affinity() for rank in ranks(engine)] == [[core] for core in CORES]
    # A program that is executed is mapped at an address of its own, a forked process at that of its parent.
    family = [os.getpid(), engine_pid(engine), *ranks(engine)]
    assert len({Path(f"/proc/{pid}/maps").read_text().partition("-")[0] for pid in family}) == 1
    key, body = f"pinned-{next(COUNT)}", frames(prompt(700))
    await engine.decode(key, body)
    assert len(await engine.done(key, 60)) == 8
    await engine.stop()


async def test_workers_of_several_ranks_hear_each_other_on_few_cores(tmp_path: Path) -> None:
    """Two workers of two ranks each: no worker is taken for lost, and prompts are prefilled remotely, except where
    that is predicted to wait too long: an engine's first step may take 20 s here, and reports may be late."""
    model = small_model(tmp_path / "small")
    prompts = [token_prompt(length, seed=length) for length in (300, 420, 512, 700, 900, 1100, 1500, 2000)]
    reference = await Driver.start(Path(model), name="reference", max_model_len=4096, kv_cache_memory_bytes=256 << 20)
    truth = [await reference.alone(frames(prompt_ids)) for prompt_ids in prompts]
    await reference.stop()
    settings = (
        f"model={model}",
        "workers.engine_args.dtype=float32",
        "workers.engine_args.block_size=32",
        "workers.engine_args.kv_cache_memory_bytes=402653184",
        "workers.engine_args.tensor_parallel_size=2",
        "workers.engine_args.enable_prefix_caching=false",
    )
    with running_fleet("demo-1p1d-cpu.yaml", *settings) as fleet:
        for _ in range(2):  # with prefix hits the second time
            answers = await fleet.ask_all(prompts, concurrency=4, max_tokens=8)
            assert [answer.error for answer in answers if not answer.ok] == []
            assert [answer.tokens for answer in answers] == truth
        remote = fleet.metric("pd_placements_total", decision="remote")
        local = [request["reason"] for request in fleet.request_lines() if request["decision"] == "local"]
        assert remote + len(local) == 2 * len(prompts) and remote >= len(prompts), (remote, local)
        assert set(local) <= {"no_prefill_worker", "queue_full"}
        assert fleet.metric("pd_retries_total") == fleet.metric("pd_kv_transfer_failures_total") == 0
        lost = [line for line in fleet.process_lines() if "is gone" in line or "is dead" in line]
        assert lost == []
        fleet.assert_no_leaks()


def ranks(driver: Driver) -> list[int]:
    """Processes of an engine's ranks; none where it computes in its core's process."""
    children = psutil.Process(engine_pid(driver)).children(recursive=True)
    return sorted(child.pid for child in children if "Worker" in " ".join(child.cmdline()))
