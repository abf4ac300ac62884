"""The simulated engine: deterministic tokens, block accounting, hand-over between engines, and every way it can end."""

import pytest
from support_sim import FAST, SimFixture, collect, expected, request_of, wire_of
from support_wait import until

from orchestrator.config.settings import KVConfig
from orchestrator.config.simulated import Simulated
from orchestrator.types import FinishReason
from workers.engine import EngineRequest, InvalidEngineRequest, Phase
from workers.sim.codec import SimCodec, WireRequest, WireSampling
from workers.sim.request import TokenStream

PROMPT = list(range(100, 180))


async def test_steps_report_remaining_prompt_tokens(sims: SimFixture) -> None:
    engine, _ = await sims.start(Simulated(speed=20, max_num_batched_tokens=100))
    await engine.submit(request_of("a#1", list(range(350)), max_tokens=2))
    steps = [await engine.next_step() for _ in range(5)]
    assert [step.tokens_left for step in steps] == [{"a#1": 250}, {"a#1": 150}, {"a#1": 50}, {}, {}]


async def test_resumes_the_same_sequence_where_it_was_left(sims: SimFixture) -> None:
    engine, _ = await sims.start()
    tokens = expected(PROMPT, 12)
    await engine.submit(request_of("a#2", PROMPT, max_tokens=12, resume=tokens[:5]))
    assert (await collect(engine, "a#2")).tokens == tokens[5:]


async def test_prefill_hands_its_kv_over(sims: SimFixture) -> None:
    prefill, decode, source = await sims.pair()
    # Registered before prefill has even begun.
    await decode.submit(request_of("a#1", PROMPT, max_tokens=6, source=source))
    await prefill.submit(request_of("a#1", PROMPT, phase=Phase.PREFILL))
    assert (await collect(prefill, "a#1")).tokens == expected(PROMPT, 1)
    result = await collect(decode, "a#1")
    assert result.tokens == expected(PROMPT, 6)
    assert result.stats is not None and result.stats.num_external_cached_tokens == len(PROMPT)
    await sims.assert_no_leaks()
    load = await prefill.load()
    assert load.kv.transfers == 1
    assert load.kv.bytes_sent == len(PROMPT) * FAST.kv_bytes_per_token


@pytest.mark.parametrize("transfer", ["whole", "chunk", "layer", "auto"])
async def test_every_transfer_mode_sends_each_byte_once(sims: SimFixture, transfer: str) -> None:
    kv = KVConfig(transfer=transfer)  # type: ignore[arg-type]
    prefill, decode, source = await sims.pair(kv=kv)
    prompt = list(range(3000))
    await prefill.submit(request_of("a#1", prompt, phase=Phase.PREFILL))
    await decode.submit(request_of("a#1", prompt, max_tokens=2, source=source))
    assert (await collect(decode, "a#1")).tokens == expected(prompt, 2)
    await sims.assert_no_leaks()
    kv_totals = (await prefill.load()).kv
    assert kv_totals.bytes_sent == 3000 * FAST.kv_bytes_per_token
    assert kv_totals.link_bytes_per_s == pytest.approx(FAST.link_gb_per_s * 1e9 * FAST.speed)


async def test_link_that_is_not_used_any_more_is_unknown(sims: SimFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.sim.transfers.LINK_AGE_S", 0.2)
    prefill, decode, source = await sims.pair()
    prompt = list(range(3000))
    await prefill.submit(request_of("a#1", prompt, phase=Phase.PREFILL))
    await decode.submit(request_of("a#1", prompt, max_tokens=2, source=source))
    await collect(decode, "a#1")
    loads = [await prefill.load()]

    async def is_unknown() -> bool:
        loads.append(await prefill.load())
        return loads[-1].kv.link_bytes_per_s == 0

    assert loads[0].kv.link_bytes_per_s > 0
    await until(is_unknown)
    assert loads[-1].kv.transfers == 1


async def test_registering_after_prefill_has_ended(sims: SimFixture) -> None:
    prefill, decode, source = await sims.pair()
    await prefill.submit(request_of("a#1", PROMPT, phase=Phase.PREFILL))
    await collect(prefill, "a#1")
    assert (await prefill.load()).blocks_free == FAST.blocks - 5  # held for whoever will ask
    await decode.submit(request_of("a#1", PROMPT, max_tokens=2, source=source))
    assert (await collect(decode, "a#1")).tokens == expected(PROMPT, 2)


async def test_unasked_kv_is_released_at_its_deadline(sims: SimFixture) -> None:
    prefill, p_info = await sims.start(kv=KVConfig(transfer_timeout_s=0.05))
    decode, _ = await sims.start()
    await prefill.submit(request_of("a#1", PROMPT, phase=Phase.PREFILL))
    await collect(prefill, "a#1")
    await sims.assert_no_leaks()
    # Who asks too late computes it.
    await decode.submit(request_of("a#1", PROMPT, max_tokens=2, source=sims.source(p_info, "a#1")))
    result = await collect(decode, "a#1")
    assert result.tokens == expected(PROMPT, 2)
    assert result.stats is not None and result.stats.num_external_cached_tokens == 0


async def test_decode_recomputes_what_does_not_arrive_in_time(sims: SimFixture) -> None:
    _, p_info = await sims.start()
    decode, _ = await sims.start(kv=KVConfig(transfer_timeout_s=0.05))
    await decode.submit(request_of("a#1", PROMPT, max_tokens=3, source=sims.source(p_info, "a#1")))
    assert (await collect(decode, "a#1")).tokens == expected(PROMPT, 3)
    await sims.assert_no_leaks()
    assert (await decode.load()).kv.failures == 1


async def test_decode_waits_for_long_running_prefill(sims: SimFixture) -> None:
    slow = Simulated(prefill_us_per_token=10_000.0, max_num_batched_tokens=8)  # 80 tokens: ten steps of 82 ms
    prefill, p_info = await sims.start(slow)
    decode, _ = await sims.start(kv=KVConfig(transfer_timeout_s=0.25))
    await prefill.submit(request_of("a#1", PROMPT, phase=Phase.PREFILL))
    await decode.submit(request_of("a#1", PROMPT, max_tokens=3, source=sims.source(p_info, "a#1")))
    result = await collect(decode, "a#1")
    assert result.tokens == expected(PROMPT, 3)
    assert result.stats is not None and result.stats.num_external_cached_tokens == len(PROMPT)
    assert (await decode.load()).kv.failures == 0


@pytest.mark.parametrize("stage", ["unprefilled", "prefilling", "pushing"])
async def test_abort_of_the_waiting_decode_side_frees_both(sims: SimFixture, stage: str) -> None:
    # 80 tokens of 1 MB over 1 GB/s: 80 ms in flight.
    slow = Simulated(kv_bytes_per_token=1_000_000, link_gb_per_s=1.0, prefill_us_per_token=500)
    prefill, decode, source = await sims.pair(slow, slow)
    await decode.submit(request_of("a#1", PROMPT, max_tokens=3, source=source))
    if stage != "unprefilled":
        await prefill.submit(request_of("a#1", PROMPT, phase=Phase.PREFILL))
    if stage == "pushing":
        await collect(prefill, "a#1")
    await sims.until(lambda load: load.blocks_free == slow.blocks - 5, decode)
    await decode.abort(["a#1"])
    if stage != "unprefilled":
        await prefill.abort(["a#1"])


async def test_abort_of_a_decode_that_waits_for_blocks_frees_the_prefill_side_at_once(sims: SimFixture) -> None:
    prefill, decode, source = await sims.pair(decode=Simulated(blocks=8, max_model_len=128))
    await prefill.submit(request_of("a#1", PROMPT, phase=Phase.PREFILL))
    await collect(prefill, "a#1")
    await decode.submit(request_of("long#1", PROMPT, max_tokens=40))
    await sims.until(lambda load: load.running == 1, decode)
    await decode.submit(request_of("a#1", PROMPT, max_tokens=3, source=source))
    assert (await decode.load()).waiting == 1
    await decode.abort(["a#1", "long#1"])
    await sims.assert_no_leaks()  # long before the lease ends


async def test_blocks_stay_reserved_while_a_write_may_land(sims: SimFixture) -> None:
    slow = Simulated(kv_bytes_per_token=1_000_000, link_gb_per_s=1.0)
    prefill, decode, source = await sims.pair(slow, slow)
    await decode.submit(request_of("a#1", PROMPT, max_tokens=3, source=source))
    await sims.until(lambda load: load.waiting == 1 and load.blocks_free == slow.blocks - 5, decode)
    await prefill.submit(request_of("a#1", PROMPT, phase=Phase.PREFILL))
    await collect(prefill, "a#1")
    await decode.abort(["a#1"])
    # The bytes take 80 ms; right after the abort neither side may have let go.
    load = await decode.load()
    assert load.blocks_free == slow.blocks - 5 and load.kv.withdrawing_blocks == 5
    assert (await prefill.load()).blocks_free == slow.blocks - 5
    await sims.assert_no_leaks()
    assert (await decode.load()).kv.withdrawing_blocks == 0


async def test_fail_peer_ends_both_halves(sims: SimFixture) -> None:
    slow = Simulated(prefill_us_per_token=2000, max_num_batched_tokens=16)
    prefill, p_info = await sims.start(slow)
    decode, d_info = await sims.start()
    await prefill.submit(request_of("a#1", PROMPT, phase=Phase.PREFILL))
    await decode.submit(request_of("a#1", PROMPT, max_tokens=3, source=sims.source(p_info, "a#1")))
    await sims.until(lambda load: load.kv.bytes_sent > 0, prefill)
    await decode.fail_peer(p_info.kv.engine_id)
    await prefill.fail_peer(d_info.kv.engine_id)
    result = await collect(decode, "a#1")
    assert result.tokens == expected(PROMPT, 3)
    assert result.stats is not None and result.stats.num_external_cached_tokens == 0


async def test_stops_at_the_end_of_sequence_only_when_asked(sims: SimFixture) -> None:
    engine, _ = await sims.start()
    at = TokenStream(PROMPT).eos_at
    free = WireSampling(max_tokens=400, _eos_token_id=2)
    await engine.submit(EngineRequest("a#1", Phase.DECODE, wire_of(PROMPT, free)))
    await engine.submit(
        EngineRequest(
            "b#1", Phase.DECODE, wire_of(PROMPT, WireSampling(max_tokens=400, _eos_token_id=2, ignore_eos=True))
        )
    )
    await engine.submit(
        EngineRequest(
            "c#1", Phase.DECODE, wire_of(PROMPT, WireSampling(max_tokens=400, _eos_token_id=2, min_tokens=300))
        )
    )
    results = await collect(engine, "a#1", "b#1", "c#1")
    assert len(results["a#1"].tokens) == at + 1
    assert results["a#1"].tokens[-1] == 2 and results["a#1"].finish is FinishReason.STOP
    assert len(results["b#1"].tokens) == 400
    assert len(results["c#1"].tokens) == 301


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"\xc1garbage"], "not an engine request"),
        ([], "no payload"),
        (wire_of([], WireSampling()), "no tokens"),
        (wire_of(list(range(40_000)), WireSampling()), "longest sequence"),
        (wire_of([1], WireSampling(logprobs=2)), "logprobs"),
        (SimCodec().encode_request(WireRequest("x", [1], pooling_params={})), "pooling"),
    ],
)
async def test_refuses_what_it_cannot_run(sims: SimFixture, frames: list[bytes], why: str) -> None:
    engine, _ = await sims.start()
    with pytest.raises(InvalidEngineRequest, match=why):
        await engine.submit(EngineRequest("a#1", Phase.DECODE, frames))
