"""The simulated engine's prefix cache: what it holds, what it says of it, and what it spares."""

from support_sim import SimFixture, collect, request_of

from orchestrator.config.simulated import Simulated
from orchestrator.policy.prefix_keys import prefix_keys, salt_of
from workers.engine import EngineRequest, Phase
from workers.sim.codec import SimCodec, WireRequest, WireSampling

PROMPT = list(range(100, 180))  # five blocks


async def test_a_repeated_prompt_is_computed_once(sims: SimFixture) -> None:
    engine, _ = await sims.start()
    await engine.submit(request_of("a#1", PROMPT))
    first = await collect(engine, "a#1")
    await engine.submit(request_of("b#1", [*PROMPT, 1, 2, 3]))
    second = await collect(engine, "b#1")
    await engine.submit(request_of("c#1", PROMPT))
    third = await collect(engine, "c#1")
    cached = [result.stats.num_cached_tokens for result in (first, second, third) if result.stats]
    assert cached == [0, 80, 64]  # the last token is always computed, so the last full block is as well
    assert second.stats is not None and second.stats.num_computed_tokens == 3


async def test_steps_report_stored_keys(sims: SimFixture) -> None:
    engine, _ = await sims.start()
    await engine.submit(request_of("a#1", PROMPT, max_tokens=1))
    stored: set[int] = set()
    while True:
        step = await engine.next_step()
        stored |= set(step.prefix.stored) if step.prefix else set()
        if step.outputs and step.outputs[0].finish_reason is not None:
            break
    assert stored == set(prefix_keys(PROMPT, 16))


async def test_received_kv_is_cached_as_well(sims: SimFixture) -> None:
    prefill, info = await sims.start()
    decode, _ = await sims.start()
    await decode.submit(request_of("a#1", PROMPT, source=sims.source(info, "a#1")))
    await prefill.submit(request_of("a#1", PROMPT, phase=Phase.PREFILL))
    await collect(decode, "a#1")
    await decode.submit(request_of("b#1", PROMPT))
    again = await collect(decode, "b#1")
    assert again.stats is not None and again.stats.num_cached_tokens == 64


async def test_salt_and_lora_separate_caches(sims: SimFixture) -> None:
    engine, _ = await sims.start()

    stored: set[int] = set()

    async def cached(key: str, **more: object) -> int:
        wire = WireRequest("ignored", PROMPT, sampling_params=WireSampling(max_tokens=1), **more)
        await engine.submit(EngineRequest(key, Phase.DECODE, SimCodec().encode_request(wire)))
        result = await collect(engine, key)
        stored.update(result.stored)
        assert result.stats is not None
        return result.stats.num_cached_tokens

    assert [await cached("a#1"), await cached("b#1", cache_salt="s"), await cached("c#1", cache_salt="s")] == [0, 0, 64]
    assert [await cached("d#1", lora_request=["l", 70_000, "/l"]), await cached("e#1")] == [0, 64]
    assert prefix_keys(PROMPT, 16, salt_of(None, "s"))[0] in stored


async def test_reset_is_reported_with_next_step(sims: SimFixture) -> None:
    engine, _ = await sims.start()
    await engine.submit(request_of("a#1", PROMPT))
    await collect(engine, "a#1")
    assert await engine.call("reset_prefix_cache", [], {}) is True
    await engine.submit(request_of("b#1", [7] * 40, max_tokens=1))
    step = await engine.next_step()
    assert step.prefix is not None and step.prefix.cleared
    assert set(step.prefix.stored) == set(prefix_keys([7] * 40, 16))


async def test_disabled_cache_reports_nothing(sims: SimFixture) -> None:
    off, _ = await sims.start(Simulated(speed=20, prefix_caching=False))
    for key in ("a#1", "b#1"):
        await off.submit(request_of(key, PROMPT))
        stats = (await collect(off, key)).stats
        assert stats is not None and stats.num_cached_tokens == 0
    await off.submit(request_of("c#1", PROMPT, max_tokens=1))
    assert (await off.next_step()).prefix is None
