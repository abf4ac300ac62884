"""The first token from prefill: handed over once, in every order of arrival, and never taken back."""

import asyncio
import time

import msgspec
import pytest
from support_bench import Bench, FakeRequest, counted

from orchestrator.router.request import State
from orchestrator.router.router import HELD_S
from orchestrator.types import FinishReason
from orchestrator.wire.messages import Abort, Prefilled, PrefillFailed

STOP, LENGTH = 0, 1


async def transferring(**request) -> tuple[Bench, str]:
    """A request that prefill computes and a decode worker waits for."""
    options = {"first_token": "prefill", **request.pop("routing", {})}
    bench = Bench(**options)
    await bench.router.submit(FakeRequest("r", **request))
    bench.claim("r")
    return bench, bench.bound_to()


def prefilled(bench, token=5, finish=LENGTH, attempt=1, worker="p0", payload=None):
    if payload is None:
        payload = [msgspec.msgpack.encode([["r", [token], finish]])]
    bench.say(worker, Prefilled("r", attempt, worker, 0.2, sent_at=1.0), payload)


def mismatches():
    return counted("pd_first_token_mismatches")


async def test_prefills_token_goes_out_at_once_and_decodes_own_is_dropped():
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


async def test_several_tokens_in_decodes_first_step_lose_the_first_one():
    bench, decode = await transferring()
    prefilled(bench)
    bench.tokens(decode, "r", [5, 6, 7], finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [6, 7], LENGTH)]
    bench.assert_no_leaks()


async def test_an_end_that_comes_with_the_dropped_token_is_still_told():
    bench, decode = await transferring()
    prefilled(bench)
    bench.tokens(decode, "r", [5], finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [], LENGTH)]
    bench.assert_no_leaks()


async def test_decode_that_is_first_answers_alone():
    bench, decode = await transferring()
    bench.tokens(decode, "r", [5])
    prefilled(bench)
    prefilled(bench, token=9)
    bench.tokens(decode, "r", [6], finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [6], LENGTH)]
    bench.assert_no_leaks()


async def test_a_repeated_message_hands_over_once():
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
        {"resumable": False},  # could not go on where decode's differs
        {"max_new_tokens": 1},  # decode's answer is complete with it
    ],
)
async def test_what_is_not_certain_or_not_wanted_waits_for_decode(request_):
    bench, decode = await transferring(**request_)
    prefilled(bench)
    assert bench.received() == []
    bench.tokens(decode, "r", [8], finish=LENGTH)
    assert bench.received() == [("r", [8], LENGTH)]
    bench.assert_no_leaks()


@pytest.mark.parametrize("payload", [[], [b"\xc1 not outputs"]], ids=["none", "unreadable"])
async def test_a_token_that_cannot_be_read_waits_for_decode(payload):
    bench, decode = await transferring()
    prefilled(bench, payload=payload)
    bench.tokens(decode, "r", [5], finish=LENGTH)
    assert bench.received() == [("r", [5], LENGTH)]
    bench.assert_no_leaks()


async def test_a_token_that_ends_the_answer_is_left_to_decode():
    bench, decode = await transferring()
    prefilled(bench, token=2, finish=STOP)
    assert bench.received() == []
    bench.tokens(decode, "r", [2], finish=STOP)
    assert bench.received() == [("r", [2], STOP)]
    bench.assert_no_leaks()


async def test_another_worker_than_the_one_decode_listens_to_is_not_believed():
    bench, decode = await transferring()
    prefilled(bench, token=9, worker="p1")
    bench.tokens(decode, "r", [5], finish=LENGTH)
    assert bench.received() == []
    prefilled(bench)
    assert bench.received() == [("r", [5], LENGTH)]


async def test_where_decode_differs_the_answer_goes_on_after_what_was_sent_on_the_same_worker():
    bench, decode = await transferring(routing={"max_attempts": 1})
    before = mismatches()
    prefilled(bench)
    bench.tokens(decode, "r", [6])
    await bench.settle()
    worker, submit = bench.submits()[-1]
    assert mismatches() == before + 1
    assert (worker, submit.attempt, submit.resume_tokens, submit.kv_source) == (decode, 2, [5], None)
    assert (decode, Abort("r", 1)) in bench.transport.sent and ("p0", Abort("r", 1)) in bench.transport.sent
    bench.tokens(decode, "r", [7], attempt=1)  # of the attempt that went another way
    bench.tokens(decode, "r", [5], attempt=2)  # the second token, though equal to the first
    bench.tokens(decode, "r", [8], attempt=2, finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [5], None), ("r", [8], LENGTH)]
    bench.assert_no_leaks()


@pytest.mark.parametrize("gone", ["unreachable", "left"])
async def test_where_decode_differs_and_is_gone_another_goes_on(gone):
    bench, decode = await transferring()
    prefilled(bench)
    if gone == "left":
        bench.fleet.remove(decode)
    else:
        bench.transport.unreachable = {decode}
    bench.tokens(decode, "r", [6])
    await bench.settle()
    worker, submit = bench.submits()[-1]
    assert worker != decode and submit.resume_tokens == [5]
    bench.tokens(worker, "r", [7], attempt=2, finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [7], LENGTH)]
    bench.assert_no_leaks()


async def test_a_decode_worker_that_dies_after_the_hand_over_is_replaced_from_there():
    bench, decode = await transferring()
    prefilled(bench)
    bench.fleet.remove(decode)
    bench.router.worker_lost(decode)
    await bench.settle()
    worker, submit = bench.submits()[-1]
    assert worker != decode and submit.resume_tokens == [5] and submit.attempt == 2
    prefilled(bench)  # of the old attempt
    bench.tokens(worker, "r", [5], attempt=2)
    bench.tokens(worker, "r", [6], attempt=2, finish=LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [5], None), ("r", [6], LENGTH)]
    bench.assert_no_leaks()


@pytest.mark.parametrize("failure", ["prefill_failed", "engine_error"])
async def test_a_failure_after_the_hand_over_continues_after_it(failure):
    bench, decode = await transferring()
    prefilled(bench)
    if failure == "prefill_failed":
        bench.say("p0", PrefillFailed("r", 1, "p0", "given back"))
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
    bench.fleet.remove("p0")
    bench.router.worker_lost("p0")
    bench.tokens(decode, "r", [5, 6], finish=LENGTH)  # recomputed there
    assert bench.received() == [("r", [5], None), ("r", [6], LENGTH)]


@pytest.mark.parametrize("to", [State.ABORTED, State.FINISHED])
async def test_an_end_by_the_client_between_the_two_frees_both_sides(to):
    bench, decode = await transferring()
    prefilled(bench)
    bench.router.abort(["r"], to=to)
    assert (decode, Abort("r", 1)) in bench.transport.sent and ("p0", Abort("r", 1)) in bench.transport.sent
    bench.tokens(decode, "r", [5])
    assert bench.received() == [("r", [5], None)]
    bench.assert_no_leaks()


async def test_the_transfer_and_the_time_between_tokens_are_measured_by_decodes_own_tokens():
    bench, decode = await transferring()
    prefilled(bench)
    await asyncio.sleep(0.05)
    began = time.monotonic()
    bench.tokens(decode, "r", [5])
    bench.tokens(decode, "r", [6], finish=LENGTH)
    fitted = bench.router.learning.predictor.coefficients()
    fixed_s, s_per_token = fitted.transfer_s
    assert fixed_s + 1000 * s_per_token > 0.04  # from the end of prefill to decode's first token
    assert fitted.itl_s[decode] <= time.monotonic() - began  # from that to the second


async def test_what_prefill_had_cached_is_known_before_the_answer_begins():
    bench, decode = await transferring(early=False)
    bench.tokens(decode, "r", [5])  # over another connection, and sooner
    bench.tokens(decode, "r", [6], finish=LENGTH)
    assert bench.received() == []
    bench.say("p0", Prefilled("r", 1, "p0", 0.2, cached_tokens=64, created_cache_tokens=32))
    assert bench.received() == [("r", [5], None), ("r", [6], LENGTH)]
    assert bench.codec.prompts == [(64, 32)]
    bench.assert_no_leaks()


async def test_a_prefill_that_stays_silent_is_not_waited_for_and_nothing_is_said_of_its_cache():
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


async def test_what_was_held_of_an_attempt_that_is_given_up_is_not_told():
    bench, decode = await transferring(early=False)
    bench.tokens(decode, "r", [5])
    bench.fleet.remove(decode)
    bench.router.worker_lost(decode)
    await bench.settle()
    worker, submit = bench.submits()[-1]
    assert (submit.attempt, submit.resume_tokens) == (2, [])
    bench.tokens(worker, "r", [5], attempt=2, finish=LENGTH)
    assert bench.received() == [("r", [5], LENGTH)]
    bench.assert_no_leaks()
