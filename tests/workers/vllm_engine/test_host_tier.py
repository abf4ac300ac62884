"""The host tier with real engines: what a small device cache evicts is loaded, tokens stay right, and nothing leaks."""

import asyncio
import multiprocessing
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support_models import MODELS, special_model
from support_vllm import BLOCK_SIZE, Driver, counted_steps, engine_pid, frames, tiny_model
from support_wait import DEADLINE_S, until

from orchestrator.config.settings import KVConfig
from orchestrator.policy.prefix_keys import reusable_keys

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

# What ends a wait here comes earlier than the time-out.
TIER = KVConfig(transfer_timeout_s=120.0, verify=True, host_tier_bytes=64 << 20)
SMALL = 4 << 20  # a device cache of 127 blocks of the tiny model
PROMPT = 600
QUIET_S = 0.6  # in which an engine that polls takes dozens of steps


def prompt(length: int, seed: int | str) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=length)


def whole_blocks(tokens: int) -> int:
    return (tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.fixture(scope="module", autouse=True)
def pinned_in_host_memory() -> Any:
    """An engine utility for these tests: the tier's blocks that may not be evicted. Engines are forked from here."""
    from vllm.v1.engine.core import EngineCore

    def pinned(engine: Any) -> int:
        tier = engine.scheduler.get_kv_connector().host_tier
        return int(tier.num_cpu_blocks - 1 - tier.cpu_block_pool.get_num_free_blocks())

    EngineCore.test_pinned = pinned
    yield
    del EngineCore.test_pinned


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model: Path, pinned_in_host_memory: Any) -> AsyncIterator[tuple[Driver, Driver]]:
    """A prefill and a decode engine with small device caches. Every test leaves all blocks free."""
    drivers = [
        await Driver.start(model, name=name, kv=TIER, kv_cache_memory_bytes=SMALL) for name in ("prefill", "decode")
    ]
    yield tuple(drivers)
    for driver in drivers:
        await driver.stop()


def host_hits(driver: Driver) -> int:
    return int(driver.engine.kv_totals["pd_host_hit_tokens"])


async def local(driver: Driver, key: str, tokens: list[int], count: int = 8) -> list[int]:
    await driver.decode(key, frames(tokens, count))
    return await driver.done(key)


async def flood(driver: Driver, name: str) -> None:
    """Requests that take all blocks of the device, one after the other."""
    for number in range(driver.info.blocks_total * BLOCK_SIZE // 1800 + 2):
        await local(driver, f"{name}-{number}", prompt(1800, f"{name}-{number}"), 1)


async def assert_no_leaks(*drivers: Driver) -> None:
    for driver in drivers:
        await driver.idle()
        assert await driver.engine.call_engine("test_pinned") == 0
        assert not driver.engine.kv_totals["pd_corrupt"]


async def test_a_conversation_that_was_evicted_is_loaded_by_both_roles(pair, reference: Driver) -> None:
    """Turn 1 is pushed and generated; turn 2 comes once as a push, once as a local request."""
    prefill, decode = pair
    first = prompt(PROMPT, 1)
    await prefill.prefill("c1", frames(first, 60))
    await decode.decode("c1", frames(first, 60), prefill.source("c1"))
    answer = await decode.done("c1")
    assert answer == await local(reference, "c1", first, 60)
    for driver in pair:
        await flood(driver, "between")
    before = [host_hits(driver) for driver in pair]

    second = [*first, *answer, *prompt(30, 2)]
    expected = await local(reference, "c2", second)
    await prefill.prefill("c2", frames(second))
    await decode.decode("c2", frames(second), prefill.source("c2"))
    assert await decode.done("c2") == expected
    assert prefill.stats["c2"].num_local_cached_tokens == whole_blocks(PROMPT), "from its own host memory"
    assert decode.stats["c2"].num_external_cached_tokens == len(second), "a push brings all that the device lacks"
    assert [host_hits(driver) - was for driver, was in zip(pair, before, strict=True)] == [whole_blocks(PROMPT), 0]

    await flood(decode, "again")
    assert await local(decode, "c3", second) == expected
    held = whole_blocks(PROMPT + 60 + 30)
    assert decode.stats["c3"].num_local_cached_tokens == decode.stats["c3"].num_cached_tokens == held
    assert host_hits(decode) == before[1] + held, "generated tokens too"
    await assert_no_leaks(*pair)


async def test_what_is_in_host_memory_only_counts_as_cached_until_it_is_evicted_there(pair, model: Path) -> None:
    _, decode = pair
    tokens = prompt(PROMPT, 3)
    await local(decode, "held", tokens)
    await flood(decode, "evicts")
    keys = set(reusable_keys(tokens, BLOCK_SIZE))
    assert keys <= decode.prefix_keys
    assert len(decode.prefix_keys) > decode.info.blocks_total, "more than the device holds"
    small = KVConfig(host_tier_bytes=2 * SMALL)
    driver = await Driver.start(model, name="full", kv=small, kv_cache_memory_bytes=SMALL)
    try:
        await local(driver, "held", tokens)
        for number in range(3):
            await flood(driver, f"evicts-{number}")
        await until(lambda: not keys & driver.prefix_keys, "it is evicted from host memory too")
        await local(driver, "again", tokens)
        assert driver.stats["again"].num_cached_tokens == 0
        await assert_no_leaks(driver)
    finally:
        await driver.stop()


async def test_a_reset_empties_host_memory_also_while_blocks_are_copied_there(pair) -> None:
    _, decode = pair
    for number in range(3):
        await local(decode, f"reset-{number}", prompt(PROMPT, 4))
        assert decode.stats[f"reset-{number}"].num_cached_tokens == 0
        assert await decode.engine.call("reset_prefix_cache", [], {}), "what is being copied is waited for"
    await until(lambda: not decode.prefix_keys, "no worker is believed to hold it")
    await assert_no_leaks(decode)


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_pause_that_clears_caches_ends_while_blocks_are_copied(pair, reference: Driver, mode: str) -> None:
    _, decode = pair
    tokens, key = prompt(PROMPT, 10), f"paused-{mode}"
    await decode.decode(key, frames(tokens, 300))
    await until(lambda: len(decode.tokens.get(key, ())) > 40)
    await decode.engine.call("pause_scheduler", [], {"mode": mode, "clear_cache": True})
    await decode.engine.call("resume_scheduler", [], {})
    answer = await decode.done(key)
    assert answer == (await local(reference, key, tokens, 300))[: len(answer)]
    await assert_no_leaks(decode)


async def test_aborts_at_any_moment_leave_no_block_pinned(pair, reference: Driver) -> None:
    prefill, decode = pair
    tokens = prompt(PROMPT, 5)
    await local(decode, "warm", tokens)
    await local(prefill, "warm", tokens)
    for number in range(10):
        for driver in pair:
            await flood(driver, f"abort-{number}") if number % 5 == 0 else None
        key, body = f"abort-{number}", frames([*tokens, *prompt(20, 60 + number)], 30)
        await prefill.prefill(key, body)
        await decode.decode(key, body, prefill.source(key) if number % 2 else None)
        await asyncio.sleep(0.004 * number)
        await decode.engine.abort([key])
        await prefill.engine.abort([key])
    await assert_no_leaks(*pair)
    assert await local(decode, "after", tokens) == await local(reference, "after", tokens)


async def test_preempted_requests_get_their_tokens_back(pair, reference: Driver) -> None:
    """Together they need more blocks than the device has."""
    _, decode = pair
    bodies = {f"crowd-{number}": prompt(400, 80 + number) for number in range(12)}
    for key, tokens in bodies.items():
        await decode.decode(key, frames(tokens, 120))
    for key, tokens in bodies.items():
        assert await decode.done(key, 60.0) == await local(reference, key, tokens, 120)
    assert decode.preempted
    await assert_no_leaks(decode)


async def fetch(holder: Driver, asker: Driver, key: str, body: list[bytes], tokens: int) -> None:
    await asker.decode(key, body, holder.source(key), prefix_tokens=tokens)
    await holder.engine.lend(key, body, tokens)


@pytest.mark.parametrize("seed, on_device", [(20, 0), (21, PROMPT // 2)])
async def test_what_only_host_memory_has_is_lent(pair, reference: Driver, seed: int, on_device: int) -> None:
    """All of the prefix, or what comes after the part that the device has again."""
    holder, asker = pair
    tokens, key, held = prompt(PROMPT, seed), f"lent-{seed}~", whole_blocks(PROMPT)
    await local(holder, f"own-{seed}", tokens)
    await flood(holder, f"evicts-{seed}")
    if on_device:
        await local(holder, f"begin-{seed}", tokens[:on_device])
    await holder.idle()
    loaded = holder.engine.kv_totals["pd_host_loaded_bytes"]
    loaded += (held - (whole_blocks(on_device) if on_device else 0)) * holder.info.kv_bytes_per_token
    await fetch(holder, asker, key, frames(tokens), held)
    await asker.done(key)
    assert asker.stats[key].num_external_cached_tokens == held
    await until(lambda: holder.engine.kv_totals["pd_host_loaded_bytes"] == loaded, "only what the device lacks")
    assert holder.engine.kv_totals["pd_host_load_seconds"] > 0
    assert await local(asker, f"after-{seed}", tokens) == await local(reference, f"after-{seed}", tokens)
    assert asker.stats[f"after-{seed}"].num_local_cached_tokens == held
    await assert_no_leaks(*pair)


async def test_what_is_loaded_to_be_lent_and_not_wanted_is_given_back(pair) -> None:
    holder, asker = pair
    tokens = prompt(PROMPT, 22)
    await local(holder, "own-22", tokens)
    for number in range(4):
        await flood(holder, f"evicts-22-{number}")
        key = f"unwanted-{number}~"
        await fetch(holder, asker, key, frames(tokens), whole_blocks(PROMPT))
        await (holder if number % 2 else asker).engine.abort([key])
        if number % 2:
            await asker.done(key)  # it hears that nothing comes, or all of it came
        await asker.engine.call("reset_prefix_cache", [], {})
    await holder.engine.lend("nobody~", frames(tokens), whole_blocks(PROMPT))
    await holder.engine.abort(["nobody~"])
    await assert_no_leaks(*pair)


async def test_a_holder_that_loads_and_is_stopped_or_dies_costs_no_token(model: Path, pair, reference: Driver) -> None:
    """Nor shared memory, which nobody else would remove."""
    _, asker = pair
    holder = await Driver.start(model, name="holder", kv=TIER, kv_cache_memory_bytes=SMALL)
    try:
        tokens = prompt(PROMPT, 23)
        expected = await local(reference, "expected", tokens)
        await local(holder, "own", tokens)
        await flood(holder, "evicts")
        os.kill(engine_pid(holder), signal.SIGSTOP)
        lent = asyncio.create_task(fetch(holder, asker, "stuck~", frames(tokens), whole_blocks(PROMPT)))
        await until(lambda: asker.loads and asker.loads[-1].waiting, "it waits for the prefix")
        await asker.engine.abort(["stuck~"])  # as its worker does, after MAX_WAIT_S at most
        assert await local(asker, "itself", tokens) == expected
        os.kill(engine_pid(holder), signal.SIGCONT)
        await lent
        await assert_no_leaks(holder, asker)
        await asker.engine.call("reset_prefix_cache", [], {})
        os.kill(engine_pid(holder), signal.SIGKILL)
        await until(lambda: holder.error is not None)
        await asker.decode("dead~", frames(tokens), holder.source("dead~"), prefix_tokens=whole_blocks(PROMPT))
        await asker.engine.fail_peer(holder.info.kv.engine_id)
        await asker.done("dead~")
        assert await local(asker, "again", tokens) == expected
        await assert_no_leaks(asker)
    finally:
        await holder.stop()
    assert not [name for name in os.listdir("/dev/shm") if holder.info.kv.engine_id in name]


async def test_what_has_not_been_loaded_yet_is_not_sent(
    model: Path, pair, reference: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder whose copies end late, as on a device that is busy."""
    from connectors import lending
    from connectors.host import memory

    copies, copy = multiprocessing.get_context("fork").Event(), memory._Memmove.copy
    copies.set()

    def copied_late(self: Any, *blocks: Any) -> None:
        assert copies.wait(DEADLINE_S)
        copy(self, *blocks)

    monkeypatch.setattr(memory._Memmove, "copy", copied_late)
    monkeypatch.setattr(lending, "_LOAD_S", DEADLINE_S)
    _, asker = pair
    holder = await Driver.start(model, name="busy", kv=TIER, kv_cache_memory_bytes=SMALL)
    try:
        tokens, held = prompt(PROMPT, 25), whole_blocks(PROMPT)
        await local(holder, "own", tokens)
        await flood(holder, "evicts")
        await assert_no_leaks(holder)
        copies.clear()
        await fetch(holder, asker, "busy~", frames(tokens), held)
        await until(lambda: asker.loads and asker.loads[-1].waiting, "it waits for the prefix")
        free = (await holder.engine.load()).blocks_free
        assert free == holder.info.blocks_total - held // BLOCK_SIZE, "it is being loaded"
        assert "busy~" not in asker.finished
        copies.set()
        await asker.done("busy~")
        assert asker.stats["busy~"].num_external_cached_tokens == held
        assert await local(asker, "after-25", tokens) == await local(reference, "after-25", tokens)
        await assert_no_leaks(holder, asker)
    finally:
        copies.set()
        await holder.stop()


async def test_a_load_that_comes_too_late_is_not_waited_for(
    model: Path, pair, reference: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder whose loads are all late: the other engine hears so, and computes."""
    from connectors import lending

    monkeypatch.setattr(lending, "_LOAD_S", 0.0)
    _, asker = pair
    holder = await Driver.start(model, name="late", kv=TIER, kv_cache_memory_bytes=SMALL)
    try:
        tokens = prompt(PROMPT, 24)
        await local(holder, "own", tokens)
        await flood(holder, "evicts")
        await fetch(holder, asker, "late~", frames(tokens), whole_blocks(PROMPT))
        await asker.done("late~")
        assert asker.stats["late~"].num_external_cached_tokens == 0
        assert await local(asker, "late", tokens) == await local(reference, "late", tokens)
        await assert_no_leaks(holder, asker)
    finally:
        await holder.stop()


async def test_the_hooks_of_our_plugin_work(pair) -> None:
    """Each reaches the connector by its name, and does nothing where that has none. The last test of this pair: decode
    asks an engine that was declared dead for nothing, for a while."""
    prefill, decode = pair
    assert decode.info.identity.attention_backend and decode.info.lends
    body = frames(prompt(PROMPT, 6), 4)
    await prefill.prefill("dropped", body)
    await prefill.done("dropped")
    await prefill.engine.abort(["dropped"])  # an ended prefill, which has a lease
    await prefill.idle()
    await prefill.engine.lend("lent~", body, whole_blocks(PROMPT))
    await decode.decode("lent~", body, prefill.source("lent~"), prefix_tokens=whole_blocks(PROMPT))
    await decode.done("lent~")
    assert decode.stats["lent~"].num_external_cached_tokens == whole_blocks(PROMPT)
    waits = frames(prompt(PROMPT, 7), 4)
    await decode.decode("waits", waits, prefill.source("waits"))
    await decode.engine.fail_peer(prefill.info.kv.engine_id)
    await decode.done("waits")
    await assert_no_leaks(*pair)


async def test_an_idle_engine_takes_no_steps_and_copies_wake_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real engine, forked from this process, that nothing but an event wakes for a minute."""
    steps = counted_steps(monkeypatch)
    driver = await Driver.start(model, name="quiet", kv=TIER, kv_cache_memory_bytes=SMALL)
    try:
        tokens = prompt(PROMPT, 9)
        await local(driver, "stored", tokens)
        await driver.idle()
        await flood(driver, "evicts")
        await local(driver, "loaded", tokens)
        assert host_hits(driver) == whole_blocks(PROMPT)
        await driver.idle()

        async def is_quiet() -> bool:
            before = steps.value
            await asyncio.sleep(QUIET_S)
            return steps.value == before

        await until(is_quiet)
    finally:
        await driver.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["some-windows", "mtp", "two ranks"])
async def test_models_and_engines_of_other_kinds(tmp_path: Path, kind: str) -> None:
    model = special_model(tmp_path / kind, kind) if kind in MODELS else tiny_model(tmp_path / "tiny")
    ranks = 2 if kind == "two ranks" else 1
    arguments: dict[str, Any] = {"tensor_parallel_size": ranks, "max_model_len": 1024}
    if kind == "mtp":
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    reference = await Driver.start(model, name="plain", enable_prefix_caching=False, **arguments)
    room = 40 * BLOCK_SIZE * reference.info.kv_bytes_per_token // ranks
    driver = await Driver.start(model, name="tier", kv=TIER, **arguments, kv_cache_memory_bytes=room)
    try:
        said: list[list[int]] = [[] for _ in range(4)]
        for turn in range(2):
            for number, before in enumerate(said):
                tokens = [*before, *prompt(PROMPT if turn == 0 else 30, 100 * turn + number)]
                answer = await local(driver, f"{turn}-{number}", tokens, 12)
                assert answer == await local(reference, f"{turn}-{number}", tokens, 12)
                said[number] = [*tokens, *answer]
        # A drafter computes the last block again.
        assert host_hits(driver) >= 2 * (whole_blocks(PROMPT) - BLOCK_SIZE)
        await assert_no_leaks(driver)
    finally:
        await driver.stop()
        await reference.stop()
