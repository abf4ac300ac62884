"""The first token from prefill: handed over once, in every order of arrival, and never taken back."""

import asyncio
import time

import msgspec
import pytest
from support_bench import Bench, FakeRequest, counted

from orchestrator.router.request import State
from orchestrator.router.router import HELD_S
from orchestrator.types import FinishReason, PrefixEvents
from orchestrator.wire.messages import Abort, Prefilled, PrefillFailed

STOP, LENGTH = 0, 1


async def transferring(**request) -> tuple[Bench, str]:
    """A request that prefill computes and a decode worker waits for."""
    bench = Bench(**{"first_token": "prefill", **request.pop("routing", {})})
    bench.prefixes.take_events(PrefixEvents("d0", 1, stored=[999]), 0.0)  # without any, nobody looks at keys
    await bench.router.submit(FakeRequest("r", **request))
    bench.claim("r")
    return bench, bench.bound_to()


def prefilled(bench, token=5, finish=LENGTH, attempt=1, worker="p0", payload=None):
    if payload is None:
        payload = [msgspec.msgpack.encode([["r", [token], finish]])]
    bench.say(worker, Prefilled("r", attempt, 0.2, sent_at=1.0), payload)


def mismatches():
    return counted("pd_first_token_mismatches")


async def test_prefill_token_is_sent_and_decode_duplicate_dropped():
    bench, decode = await transferring()
    prefilled(bench)
    active = bench.router.requests["r"]
    assert bench.received() == [("r", [5], None)] and active.state is State.TRANSFERRING
    assert active.answer.first_token_at is not None and active.answer.decoding_at is None
    bench.tokens(decode, "r", [5])
    assert bench.received() == [] and active.state is State.DECODING
    assert active.answer.decoding_at >= active.answer.first_token_at
    bench.tokens(decode, "r", [5])  # the same token again, as the second one
    bench.tokens(decode, "r", [6], finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [6], LENGTH)] and active.answer.tokens == [5, 5, 6]
    bench.assert_no_leaks()


async def test_first_of_several_decode_tokens_is_dropped():
    bench, decode = await transferring()
    prefilled(bench)
    bench.tokens(decode, "r", [5, 6, 7], finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [6, 7], LENGTH)]
    bench.assert_no_leaks()


async def test_finish_with_dropped_token_is_delivered():
    bench, decode = await transferring()
    prefilled(bench)
    bench.tokens(decode, "r", [5], finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [], LENGTH)]
    bench.assert_no_leaks()


async def test_earlier_decode_token_wins():
    bench, decode = await transferring()
    bench.tokens(decode, "r", [5])
    prefilled(bench)
    prefilled(bench, token=9)
    bench.tokens(decode, "r", [6], finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [6], LENGTH)]
    bench.assert_no_leaks()


async def test_repeated_prefilled_message_is_used_once():
    bench, decode = await transferring()
    prefilled(bench)
    prefilled(bench)
    bench.tokens(decode, "r", [5, 6], finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [6], LENGTH)]


@pytest.mark.parametrize(
    "request_",
    [
        {"routing": {"first_token": "decode"}},
        {"early": False},  # sampled without a seed, say
        {"max_new_tokens": 1},  # decode's answer is complete with it
    ],
)
async def test_uncertain_token_waits_for_decode(request_):
    bench, decode = await transferring(**request_)
    prefilled(bench)
    assert bench.received() == []
    bench.tokens(decode, "r", [8], finish=LENGTH)
    assert bench.received() == [("r", [8], LENGTH)]
    bench.assert_no_leaks()


@pytest.mark.parametrize("payload", [[], [b"\xc1 not outputs"]], ids=["none", "unreadable"])
async def test_unreadable_token_waits_for_decode(payload):
    bench, decode = await transferring()
    prefilled(bench, payload=payload)
    bench.tokens(decode, "r", [5], finish=LENGTH)
    assert bench.received() == [("r", [5], LENGTH)]
    bench.assert_no_leaks()


async def test_final_token_waits_for_decode():
    bench, decode = await transferring()
    prefilled(bench, token=2, finish=STOP)
    assert bench.received() == []
    bench.tokens(decode, "r", [2], finish=STOP)
    assert bench.received() == [("r", [2], STOP)]
    bench.assert_no_leaks()


async def test_token_of_other_prefill_worker_is_ignored():
    bench, decode = await transferring()
    prefilled(bench, token=9, worker="p1")
    bench.tokens(decode, "r", [5], finish=LENGTH)
    assert bench.received() == []
    prefilled(bench)
    assert bench.received() == [("r", [5], LENGTH)]


async def test_diverged_answer_continues_on_same_worker(monkeypatch):
    monkeypatch.setattr("orchestrator.router.dispatch.MAX_ATTEMPTS", 1)
    bench, decode = await transferring(keys=list(range(1, 62 + 1)), priority=1)
    before, delay_s = mismatches(), bench.router.requests["r"].placed.delay_s
    prefilled(bench)
    bench.tokens(decode, "r", [6])
    await bench.settle()
    worker, submit = bench.submits()[-1]
    assert mismatches() == before + 1
    assert (worker, submit.attempt, submit.resume_tokens, submit.kv_source) == (decode, 2, [5], None)
    assert submit.cached_tokens == 62 * 16, "decode has the prompt, and computes little"
    assert delay_s - 1 < submit.behind_s <= delay_s and bench.router.requests["r"].placed.cached_tokens == 0
    assert (decode, Abort("r", 1)) in bench.transport.sent and ("p0", Abort("r", 1)) in bench.transport.sent
    bench.tokens(decode, "r", [7], attempt=1)  # of the attempt that went another way
    bench.tokens(decode, "r", [5], attempt=2)  # the second token, though equal to the first
    bench.tokens(decode, "r", [8], attempt=2, finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [5], None), ("r", [8], LENGTH)]
    bench.assert_no_leaks()


@pytest.mark.parametrize("gone", ["unreachable", "left"])
async def test_diverged_answer_continues_on_other_worker(gone):
    bench, decode = await transferring()
    prefilled(bench)
    if gone == "left":
        bench.fleet.remove(decode)
    else:
        bench.transport.unreachable = {decode}
    bench.tokens(decode, "r", [6])
    assert bench.router.requests["r"].placed is None
    await bench.settle()
    worker, submit = bench.submits()[-1]
    assert worker != decode and submit.resume_tokens == [5]
    bench.tokens(worker, "r", [7], attempt=2, finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [7], LENGTH)]
    bench.assert_no_leaks()


async def test_dead_decode_worker_is_replaced_after_hand_over():
    bench, decode = await transferring()
    prefilled(bench)
    bench.lose(decode)
    await bench.settle()
    worker, submit = bench.submits()[-1]
    assert worker != decode and submit.resume_tokens == [5] and submit.attempt == 2
    prefilled(bench)  # of the old attempt
    bench.tokens(worker, "r", [5], attempt=2)
    bench.tokens(worker, "r", [6], attempt=2, finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [5], None), ("r", [6], LENGTH)]
    assert bench.codec.dropped == [0], "the prompt was told of once, and when an engine took it and began it"
    bench.assert_no_leaks()


@pytest.mark.parametrize("failure", ["prefill_failed", "engine_error"])
async def test_a_failure_after_the_hand_over_continues_after_it(failure):
    bench, decode = await transferring()
    prefilled(bench)
    if failure == "prefill_failed":
        bench.say("p0", PrefillFailed("r", 1, "given back"))
    else:
        bench.tokens(decode, "r", [], finish=FinishReason.ERROR)
    await bench.settle()
    assert bench.submits()[-1][1].resume_tokens == [5]
    bench.tokens(bench.bound_to(), "r", [6], attempt=2, finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [6], LENGTH)]
    bench.assert_no_leaks()


async def test_a_prefill_worker_that_dies_after_the_hand_over_changes_nothing():
    bench, decode = await transferring()
    prefilled(bench)
    bench.lose("p0")
    bench.tokens(decode, "r", [5, 6], finish=LENGTH)  # recomputed there
    assert bench.received() == [("r", [5], None), ("r", [6], LENGTH)]


@pytest.mark.parametrize("to", [State.ABORTED, State.FINISHED])
async def test_client_abort_between_tokens_frees_both_sides(to):
    bench, decode = await transferring()
    prefilled(bench)
    bench.router.abort(["r"], to=to)
    assert (decode, Abort("r", 1)) in bench.transport.sent and ("p0", Abort("r", 1)) in bench.transport.sent
    bench.tokens(decode, "r", [5])
    assert bench.received() == [("r", [5], None)]
    bench.assert_no_leaks()


async def test_decode_tokens_measure_transfer_and_itl():
    bench, decode = await transferring()
    predictor = bench.router.learning.predictor
    prior_s = predictor.coefficients().transfer_s

    async def transfer(request, wait_s):
        payload = [msgspec.msgpack.encode([[request, [5], LENGTH]])]
        bench.say("p0", Prefilled(request, 1, 0.2, sent_at=1.0), payload)
        ended = time.monotonic()
        await asyncio.sleep(wait_s)
        began = time.monotonic()
        bench.tokens(decode, request, [5])
        decoding = time.monotonic()
        bench.tokens(decode, request, [6], finish=LENGTH)
        return began - ended, decoding - ended, time.monotonic() - began

    *_, first_decoded_s = await transfer("r", 0.01)
    assert predictor.coefficients().transfer_s == prior_s, "the first one also waits for the connection"
    bench.lose("d1" if decode == "d0" else "d0")
    await bench.router.submit(FakeRequest("s"))
    bench.claim("s")
    assert bench.bound_to() == decode
    least_s, most_s, decoded_s = await transfer("s", 0.05)
    fitted = predictor.coefficients()
    fixed_s, s_per_token = fitted.transfer_s
    # From the end of prefill, just before `least_s` begins, to decode's first token.
    assert least_s <= fixed_s + 1000 * s_per_token <= most_s + 0.01
    assert fitted.itl_s[decode] <= max(first_decoded_s, decoded_s)  # from that to the second


async def test_cached_tokens_are_known_before_first_output():
    bench, decode = await transferring(early=False)
    bench.tokens(decode, "r", [5])  # over another connection, and sooner
    bench.tokens(decode, "r", [6], finish=LENGTH)
    assert bench.received() == []
    bench.say("p0", Prefilled("r", 1, 0.2, cached_tokens=64, created_cache_tokens=32))
    assert bench.received() == [("r", [5], None), ("r", [6], LENGTH)]
    assert bench.codec.prompts == [(64, 32)]
    bench.assert_no_leaks()


async def test_silent_prefill_delays_nothing_and_reports_no_cache():
    bench, decode = await transferring(early=False)
    bench.tokens(decode, "r", [5])
    bench.router.check(time.monotonic() + HELD_S / 2)
    assert bench.received() == []
    bench.router.check(time.monotonic() + HELD_S + 0.1)
    assert bench.received() == [("r", [5], None)]
    bench.tokens(decode, "r", [6], finish=LENGTH)
    assert bench.received() == [("r", [6], LENGTH)]
    assert bench.codec.prompts == [(0, 0)]
    bench.assert_no_leaks()


async def test_held_outputs_of_old_attempt_are_dropped():
    bench, decode = await transferring(early=False)
    bench.tokens(decode, "r", [5])
    bench.lose(decode)
    await bench.settle()
    worker, submit = bench.submits()[-1]
    assert (submit.attempt, submit.resume_tokens) == (2, [])
    bench.tokens(worker, "r", [5], attempt=2, finish=LENGTH)
    assert bench.received() == [("r", [5], LENGTH)]
    bench.assert_no_leaks()
