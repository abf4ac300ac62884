"""The life of a request against scripted workers: every way it can be placed, bound, retried, fenced and ended."""

import asyncio
import time
from operator import attrgetter
from types import SimpleNamespace
from unittest.mock import AsyncMock

import msgspec
import pytest
from support_bench import Bench, FakeCodec, FakeRequest, counted, defective
from support_wait import DEADLINE_S, until

from orchestrator.fleet.membership import mark_silent_quiet
from orchestrator.frontend.edge import Objectives, read_objectives
from orchestrator.policy import placement
from orchestrator.policy.policies import LATE_OBJECTIVES
from orchestrator.policy.predict.estimates import LATE_IN_A_ROW
from orchestrator.process.tasks import cancelled
from orchestrator.router import dispatch
from orchestrator.router.decider import Decider
from orchestrator.router.dispatch import LEAVING_S, SOUND_TOKENS
from orchestrator.router.lost import STALL_TIMEOUT_S
from orchestrator.router.request import SUCCESSORS, Failure, Overloaded, State
from orchestrator.types import FinishReason, JobState, Offered, PauseState, QueueDepth, Role, WorkerState
from orchestrator.wire.messages import (
    Abort,
    EngineCrashed,
    MessageError,
    Outputs,
    Prefilled,
    PrefillFailed,
    Rejected,
    unpack_frames,
)
from orchestrator.wire.sockets import Sent


async def test_a_short_prompt_is_prefilled_where_it_decodes():
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    ((worker, submit),) = bench.submits()
    assert worker in ("d0", "d1") and submit.kv_source is None and not bench.queue.jobs
    bench.tokens(worker, "r", [7])
    bench.tokens(worker, "r", [8], finish=1)
    assert bench.received() == [("r", [7], None), ("r", [8], 1)]
    bench.assert_no_leaks()


async def test_a_long_prompt_is_queued_and_bound_only_when_claimed():
    bench = await Bench.asked(FakeRequest("r"))
    assert not bench.submits() and bench.queue.jobs[0].request_id == "r"
    assert bench.router.requests["r"].state is State.QUEUED
    bench.claim("r")
    ((worker, submit),) = bench.submits()
    assert submit.kv_source.key == "r#1"
    bench.say("p0", Prefilled("r", 1, 0.2))
    bench.tokens(worker, "r", [1, 2], finish=0)
    assert bench.received() == [("r", [1, 2], 0)]
    bench.assert_no_leaks()


@pytest.mark.parametrize("reason", ["queue_unavailable", "queue_full"])
async def test_refused_enqueue_prefills_locally(reason):
    bench = Bench()
    bench.queue.refuses = reason
    await bench.router.submit(FakeRequest("r"))
    assert bench.submits()[0][1].kv_source is None
    assert bench.router.requests["r"].placed.reason == reason


async def test_refused_enqueue_counts_a_tenants_share_and_an_adapters_demand_once():
    asked = []
    for refuses in (None, "queue_full"):
        bench = Bench(limits={"shares": {"*": 1}})
        bench.queue.refuses = refuses
        for tenant in ("a", "b"):
            await bench.router.submit(FakeRequest(tenant, own=Objectives(tenant=tenant), adapter=5))
        policies = bench.router._decider._policies
        asked.append((policies.adapters.preferred(5, 0), policies._shares.lead_s("a", time.monotonic())))
    (demand, lead_s), (refused_demand, refused_lead_s) = asked
    assert refused_demand == demand and 0 < refused_lead_s < 1.5 * lead_s


async def test_a_job_that_comes_into_the_queue_after_its_attempt_was_given_up_is_removed():
    """And the attempt after it is placed by nobody else."""
    bench = Bench(fallback="refuse")
    slow, enqueue = asyncio.Event(), bench.queue.enqueue

    async def enqueue_slowly(job):
        await slow.wait()
        return await enqueue(job)

    bench.queue.enqueue = enqueue_slowly
    submitted = asyncio.create_task(bench.router.submit(FakeRequest("r")))
    await asyncio.sleep(0)
    bench.queue.enqueue = enqueue
    bench.router.requests["r"].suspect = True
    bench.router._dispatch._place_again = held = AsyncMock()  # as of a suspect that waits for its trial
    bench.router._dispatch.retry(bench.router.requests["r"], "claimer_unheard")
    await bench.settle()
    assert bench.queue.cancelled == [("r", 1)] and held.await_count == 1
    slow.set()
    await submitted
    await bench.settle()
    assert bench.queue.cancelled == [("r", 1), ("r", 1)] and [job.attempt for job in bench.queue.jobs] == [1]
    assert bench.router.requests["r"].state is State.PLACING and not bench.submits()


@pytest.mark.parametrize("reason", ["queue_unavailable", "queue_full"])
async def test_refused_enqueue_refuses_where_prompts_must_not_go_local(reason):
    bench = Bench(fallback="refuse")
    bench.queue.refuses = reason
    with pytest.raises(Overloaded) as refused:
        await bench.router.submit(FakeRequest("r"))
    assert (refused.value.reason, refused.value.status) == (reason, 503) and refused.value.retry_after_s > 0
    bench.queue.refuses = "job_too_large"  # no later attempt would be taken either
    await bench.router.submit(FakeRequest("s"))
    assert bench.router.requests["s"].placed.reason == "job_too_large" and bench.submits()[0][1].kv_source is None


async def test_a_request_that_nobody_claims_is_refused_where_it_must_not_go_local():
    bench = await Bench.asked(FakeRequest("r"), claim_timeout_s=0.05, fallback="refuse")
    before = counted("pd_placements", decision="reject", reason="claim_timeout")
    bench.router.check(time.monotonic() + 0.06)
    await bench.settle()
    assert bench.queue.cancelled == [("r", 1)] and not bench.submits()
    assert bench.received() == [("r", [], FinishReason.ERROR)]
    refused = Overloaded(bench.codec.failures["r"].rejected)
    assert (refused.reason, refused.status) == ("claim_timeout", 503)
    assert counted("pd_placements", decision="reject", reason="claim_timeout") == before + 1
    bench.assert_no_leaks()


async def test_a_lost_prefill_is_done_by_another_worker_or_refused_where_it_must_not_go_local():
    bench = Bench(fallback="refuse")
    bench.add_worker("p1", Role.PREFILL)
    await bench.submit("r", "s", prompt_tokens=1000)
    bench.claim("r")
    bench.claim("s")
    bench.lose("p0")
    await bench.settle()
    assert [job.attempt for job in bench.queue.jobs] == [1, 1, 2, 2] and len(bench.submits()) == 2
    bench.claim("r", 2, "p1")
    bench.lose("p1")
    await bench.settle()
    assert {bench.codec.failures[name].rejected.reason for name in ("r", "s")} == {"no_prefill_worker"}
    bench.assert_no_leaks()


@pytest.mark.parametrize("fallback", ["local", "refuse"])
async def test_strict_pairing_without_a_decode_worker_falls_back(fallback):
    bench = Bench(fallback=fallback, pairing="strict:rack")
    bench.add_worker("d2", Role.DECODE, pairs_within="r1")
    for name, rack in (("p1", "r1"), ("p2", "r2")):
        bench.add_worker(name, Role.PREFILL, pairs_within=rack)
    await bench.submit("near", "far", prompt_tokens=1000)
    bench.claim("near", worker="p1")
    assert bench.bound_to() == "d2"
    bench.claim("far", worker="p2")
    await bench.settle()
    if fallback == "refuse":
        refused = Overloaded(bench.codec.failures["far"].rejected)
        assert (refused.reason, refused.status) == ("no_paired_worker", 503) and len(bench.submits()) == 1
    else:
        assert bench.router.requests["far"].placed.reason == "no_paired_worker"
        assert bench.submits()[1][1].kv_source is None


async def test_transfers_teach_how_fast_each_kind_of_link_is():
    bench = Bench()
    bench.add_worker("p1", Role.PREFILL, host="elsewhere")
    for turn in range(6):  # the first between two workers is not counted
        for worker in ("p0", "p1"):
            name = f"r{turn}{worker}"
            await bench.router.submit(FakeRequest(name))
            bench.claim(name, worker=worker)
            bench.say(worker, Prefilled(name, 1, 0.2))
            bench.tokens(bench.bound_to(), name, [1], finish=0)
    samples = {link: line.samples for link, line in bench.router.learning.predictor.links.lines.items()}
    assert set(samples) == {("host",), ()} and all(2 <= count <= 5 for count in samples.values())


async def test_an_unheard_claim_is_not_tried_again_for_ever():
    bench = await Bench.asked(FakeRequest("r"), fallback="refuse")
    bench.queue.known["r"] = JobState.CLAIMED
    for attempt in range(1, 5):
        assert bench.router.requests["r"].attempt == attempt
        bench.router.requests["r"].moved_at -= 2
        await bench.router.check_queue(time.monotonic())
        await bench.router.check_queue(time.monotonic())
        await bench.settle()
    assert "4 attempts failed" in bench.codec.failures["r"].why
    bench.assert_no_leaks()


@pytest.mark.parametrize("early", [True, False])
async def test_a_stream_that_has_started_is_never_refused(early):
    bench = await Bench.asked(FakeRequest("r"), claimed=True, fallback="refuse")
    if early:  # the client has the prefill worker's token, and decode none yet
        bench.say("p0", Prefilled("r", 1, 0.2), [msgspec.msgpack.encode([["r", [5], FinishReason.LENGTH]])])
    else:
        bench.say("p0", Prefilled("r", 1, 0.2))
        bench.tokens(bench.bound_to(), "r", [5])
    assert bench.received() == [("r", [5], None)]
    bench.lose("p0")
    bench.lose(bench.bound_to())
    await bench.settle()
    (again,) = (message for _, message in bench.submits()[1:])
    assert again.kv_source is None and again.resume_tokens == [5]


async def test_requests_that_cannot_go_remote_stay_local():
    bench = await Bench.asked(FakeRequest("r", local_only="prompt_logprobs"))
    assert bench.router.requests["r"].placed.reason == "prompt_logprobs" and not bench.queue.jobs


async def test_claim_timeout_prefills_locally():
    bench = await Bench.asked(FakeRequest("r"), claim_timeout_s=0.05)
    bench.router.check(time.monotonic())
    assert bench.router.requests["r"].state is State.QUEUED  # not yet
    bench.router.check(time.monotonic() + 0.06)
    await bench.settle()
    assert bench.queue.cancelled == [("r", 1)]
    assert bench.submits()[0][1].attempt == 2 and bench.submits()[0][1].kv_source is None
    bench.claim("r", attempt=1)  # the claim comes late: its worker is told to forget it
    assert ("p0", Abort("r", 1)) in bench.transport.sent
    assert len(bench.submits()) == 1


@pytest.mark.parametrize("fallback", ["local", "refuse"])
async def test_lost_redis_moves_queued_requests_to_local_or_refuses_them(fallback):
    bench = await Bench.asked(FakeRequest("r"), fallback=fallback)
    bench.queue.depth = None
    bench.router.lost.queue_lost()
    await bench.settle()
    if fallback == "local":
        assert bench.submits()[0][1].attempt == 2
        assert bench.router.requests["r"].retries == ["queue_unavailable"]
    else:
        assert bench.codec.failures["r"].rejected.reason == "queue_unavailable"
        bench.assert_no_leaks()


async def test_lost_prefill_workers_move_queued_requests_to_local():
    bench = Bench()
    bench.add_worker("p1", Role.PREFILL)
    await bench.router.submit(FakeRequest("r"))
    bench.lose("p1")
    assert bench.router.requests["r"].state is State.QUEUED  # p0 will claim it
    bench.lose("p0")
    await bench.settle()
    assert bench.queue.cancelled == [("r", 1)]
    assert bench.submits()[0][1].attempt == 2 and bench.submits()[0][1].kv_source is None
    assert bench.router.requests["r"].placed.reason == "no_prefill_worker"


@pytest.mark.parametrize("gone", [{"state": WorkerState.DRAINING}, {"role": Role.DECODE}])
async def test_queued_requests_go_local_when_no_worker_claims(gone, monkeypatch):
    monkeypatch.setattr("orchestrator.router.router.CHECK_S", 0.01)
    bench = await Bench.asked(FakeRequest("r"))
    view = bench.fleet.workers["p0"]
    running = asyncio.create_task(bench.router.run())
    try:
        view.note_connected(False)  # for a moment: it claims through Redis all the same
        await asyncio.sleep(0.05)
        assert bench.router.requests["r"].state is State.QUEUED
        view.note_info(msgspec.structs.replace(view.info, **gone))
        await until(bench.submits)
    finally:
        running.cancel()
    assert bench.router.requests["r"].retries == ["no_prefill_worker"]


async def test_duplicate_claims_bind_once():
    bench = await Bench.asked(FakeRequest("r"), claimed=True)
    bench.claim("r")
    assert len(bench.submits()) == 1
    bench.add_worker("p1", Role.PREFILL)
    bench.claim("r", worker="p1")  # its lease had expired and another worker claimed it too: one of them must stop
    assert ("p1", Abort("r", 1)) in bench.transport.sent
    assert len(bench.submits()) == 1


async def test_a_worker_that_computes_a_prompt_and_takes_decodes_now_does_not_get_its_own_kv():
    bench = await Bench.asked(FakeRequest("r"))
    view = bench.fleet.workers["p0"]
    view.note_info(msgspec.structs.replace(view.info, role=Role.DECODE))
    for name in ("d0", "d1"):  # by load it would be the choice
        bench.report(name, blocks_free=0, running=50, waiting=50)
    bench.claim("r")
    assert bench.bound_to() in ("d0", "d1")


async def test_who_computes_a_prompt_gets_all_of_the_request_and_who_gets_its_kv_what_it_then_needs():
    bench = await Bench.asked(FakeRequest("r"), claimed=True)
    assert unpack_frames(bench.queue.jobs[0].body) == [b"r"] and bench.transport.payloads == [[b"less"]]
    bench.say("p0", Prefilled("r", 1, 0.2))
    bench.tokens(bench.bound_to(), "r", [5])
    bench.tokens(bench.bound_to(), "r", [], finish=FinishReason.ERROR)  # the engine lacks what it has not got
    await bench.settle()
    (submit,) = (message for _, message in bench.submits()[1:])
    assert submit.kv_source is None and submit.resume_tokens == [5] and bench.transport.payloads[-1] == [b"r"]
    bench.tokens(bench.bound_to(), "r", [6], attempt=2, finish=FinishReason.LENGTH)
    assert bench.received() == [("r", [5], None), ("r", [6], FinishReason.LENGTH)]
    bench.assert_no_leaks()


async def test_failed_prefill_is_retried_locally_and_fenced():
    bench = await Bench.asked(FakeRequest("r"), claimed=True)
    first = bench.bound_to()
    bench.say("p0", PrefillFailed("r", 1, "out of memory"))
    await bench.settle()
    assert (first, Abort("r", 1)) in bench.transport.sent
    second, submit = bench.submits()[-1]
    assert submit.attempt == 2 and submit.kv_source is None
    bench.tokens(first, "r", [99], attempt=1)
    assert bench.received() == []
    bench.tokens(second, "r", [1], attempt=2, finish=1)
    assert bench.received() == [("r", [1], 1)]
    bench.assert_no_leaks()


async def test_a_prefill_goes_on_whoever_else_gives_it_up_or_takes_its_claims_for_dead():
    """A second worker gets its job where the lease of the first has run out, and may change its role at once."""
    bench = await Bench.asked(FakeRequest("r"), claimed=True)
    bench.say("p1", PrefillFailed("r", 1, "given back"))
    bench.router.lost.job_failed("r", 1)
    await bench.settle()
    assert bench.transport.of(Abort) == [] and bench.router.requests["r"].state is State.TRANSFERRING
    bench.say("p0", PrefillFailed("r", 1, "out of memory"))
    await bench.settle()
    assert [submit.attempt for _, submit in bench.submits()] == [1, 2]
    unheard = await Bench.asked(FakeRequest("r"))  # nobody has said that he has claimed it
    unheard.say("p1", PrefillFailed("r", 1, "its claims died too often"))
    await unheard.settle()
    assert [submit.attempt for _, submit in unheard.submits()] == [2]


async def test_who_decodes_a_request_and_claims_its_job_once_more_is_left_to_decode_it():
    """It became a prefill worker, and the lease of the first claim has run out: an abort would end both."""
    bench = await Bench.asked(FakeRequest("r"), claimed=True)
    bench.claim("r", worker=bench.bound_to())
    assert bench.transport.of(Abort) == []
    bench.add_worker("p1", Role.PREFILL)
    bench.claim("r", worker="p1")
    assert bench.transport.of(Abort) == [("p1", Abort("r", 1))]


async def test_a_rejected_submission_goes_to_another_worker():
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    first = bench.bound_to()
    bench.say(first, Rejected("r", 1, "draining"))
    await bench.settle()
    assert bench.bound_to() != first


async def test_a_request_that_no_worker_takes_fails_in_the_words_of_the_last():
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    attempt = 0
    while not bench.codec.failures:
        attempt += 1
        bench.say(bench.bound_to(), Rejected("r", attempt, f"no adapter {attempt}"))
        await bench.settle()
    failure = bench.codec.failures["r"]
    assert failure.why.endswith(f"rejected; the last: no adapter {attempt}") and not failure.by_client
    bench.assert_no_leaks()


async def test_leaving_workers_cost_no_attempt_and_take_turns():
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    asked = []
    for attempt in range(1, 8):  # more than `MAX_ATTEMPTS`
        asked.append(bench.bound_to())
        bench.say(asked[-1], Rejected("r", attempt, "draining", leaving=True))
        await asyncio.sleep(0 if attempt < 3 else 1.5 * LEAVING_S)
        await bench.settle()
    assert len(bench.submits()) == 8 and set(asked[::2]).isdisjoint(asked[1::2])
    last = bench.bound_to()
    bench.tokens(last, "r", [1], attempt=8, finish=1)
    assert bench.received() == [("r", [1], 1)]
    bench.assert_no_leaks()


async def test_what_a_prefill_engine_refuses_fails_with_what_a_decode_engine_says_of_it():
    """Also where prompts must not go local: prefill workers would refuse it again and again."""
    bench = await Bench.asked(FakeRequest("r"), claimed=True, fallback="refuse")
    bench.say("p0", PrefillFailed("r", 1, "invalid: no such parameter", refused=True))
    await bench.settle()
    assert [(submit.attempt, submit.kv_source is None) for _, submit in bench.submits()] == [(1, False), (2, True)]
    bench.say(bench.bound_to(), Rejected("r", 2, "no such parameter", final=True))
    assert bench.codec.failures == {"r": Failure("no such parameter", by_client=True)}
    bench.assert_no_leaks()


async def test_invalid_request_fails_at_once():
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    bench.say(bench.bound_to(), Rejected("r", 1, "no such parameter", final=True))
    assert bench.received() == [("r", [], FinishReason.ERROR)] and len(bench.submits()) == 1
    assert bench.codec.failures == {"r": Failure("no such parameter", by_client=True)}
    bench.assert_no_leaks()


async def test_dead_decode_worker_request_continues_from_sent_tokens():
    bench = await Bench.asked(FakeRequest("r"), claimed=True)
    first = bench.bound_to()
    bench.say("p0", Prefilled("r", 1, 0.2))
    bench.tokens(first, "r", [5, 6])
    bench.lose(first)
    await bench.settle()
    second, submit = bench.submits()[-1]
    assert second != first and submit.resume_tokens == [5, 6] and submit.attempt == 2 and submit.kv_source is None
    bench.tokens(second, "r", [7], attempt=2, finish=1)
    assert bench.received() == [("r", [5, 6], None), ("r", [7], 1)]
    bench.assert_no_leaks()


@pytest.mark.parametrize("each", [1, SOUND_TOKENS])
async def test_a_long_answer_may_lose_many_workers_on_its_way(each):
    """An hour of it on machines that are taken back. One that loses each after a few tokens may be the reason."""
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    for attempt in range(1, 7):
        if bench.codec.failures:
            break
        bench.tokens(bench.bound_to(), "r", [5] * each, attempt=attempt)
        bench.add_worker(f"d{attempt + 1}", Role.DECODE)
        bench.lose(bench.bound_to())
        await bench.settle()
    assert ("r" in bench.codec.failures) is (each == 1)
    if each > 1:
        bench.tokens(bench.bound_to(), "r", [7], attempt=7, finish=1)
        assert bench.received()[-1] == ("r", [7], 1)
    bench.assert_no_leaks()


async def test_stop_string_ends_answer_during_retry():
    """The token that completed it was on its way to the client when its worker was lost."""
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    worker = bench.bound_to()
    bench.tokens(worker, "r", [5])
    bench.lose(worker)
    assert bench.router.requests["r"].state is State.PLACING
    bench.router.abort(["r"], to=State.FINISHED)
    await bench.settle()
    assert len(bench.submits()) == 1 and bench.received() == [("r", [5], None)]
    bench.assert_no_leaks()


@pytest.mark.parametrize("computed", [False, True])
async def test_request_does_not_wait_for_dead_prefill_worker(computed):
    bench = await Bench.asked(FakeRequest("r"), claimed=True)
    if computed:  # its KV may have been on its way
        bench.say("p0", Prefilled("r", 1, 0.2))
    bench.lose("p0")
    await bench.settle()
    assert bench.router.requests["r"].attempt == (1 if computed else 2)  # where it was computed KV may be there already
    bench.router.check(time.monotonic())
    await bench.settle()
    assert computed or bench.queue.cancelled == [("r", 1)]  # nobody prefills again what is prefilled locally
    assert bench.router.requests["r"].retries == ["prefill_worker_lost"] and bench.router.requests["r"].charged == []
    assert bench.submits()[-1][1].kv_source is None
    bench.tokens(bench.bound_to(), "r", [1], attempt=2, finish=1)
    assert bench.received() == [("r", [1], 1)]


@pytest.mark.parametrize("computed", [False, True])
async def test_request_does_not_wait_for_quiet_prefill_worker(computed):
    bench = await Bench.asked(FakeRequest("r"), claimed=True)
    if computed:  # its KV is not there
        bench.say("p0", Prefilled("r", 1, 0.2))
    bench.router.check(time.monotonic() + 1.0)
    assert bench.router.requests["r"].state is State.TRANSFERRING
    bench.silence("p0")
    await bench.settle()
    assert bench.router.requests["r"].retries == ["prefill_worker_quiet"]
    assert bench.submits()[-1][1].attempt == 2 and bench.submits()[-1][1].kv_source is None
    assert "p0" in bench.fleet.workers  # silence is no death


@pytest.mark.parametrize("why", ["prefill_worker_quiet", "prefill_worker_lost"])
async def test_request_does_not_wait_for_a_silent_worker_that_has_claimed_it_unheard(why):
    bench = await Bench.asked(FakeRequest("r"))
    bench.add_worker("p1", Role.PREFILL)
    await bench.router.submit(FakeRequest("waits"))
    bench.queue.claims = {"p0": ["r", "another frontend's"]}
    bench.silence("p0") if why == "prefill_worker_quiet" else bench.lose("p0")
    await bench.settle()
    assert [bench.router.requests[name].retries for name in ("r", "waits")] == [[why], []]
    assert bench.queue.cancelled == [("r", 1)] and bench.submits()[-1][1].kv_source is None


async def test_queued_requests_go_local_when_all_prefill_workers_are_quiet():
    bench = await Bench.asked(FakeRequest("r"))
    bench.silence("p0")
    await bench.settle()
    assert bench.router.requests["r"].retries == ["no_prefill_worker"]
    await bench.router.submit(FakeRequest("s"))
    assert bench.router.requests["s"].placed.reason == "no_prefill_worker"


async def test_requests_leave_quiet_decode_worker():
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    quiet = bench.bound_to()
    bench.tokens(quiet, "r", [1, 2])
    bench.silence(quiet)
    await bench.settle()
    active = bench.router.requests["r"]
    assert active.retries == ["decode_worker_quiet"] and active.charged == []
    assert active.decode_worker != quiet and bench.submits()[-1][1].resume_tokens == [1, 2]


async def test_quiet_worker_gets_no_request_until_it_reports():
    bench = Bench()
    bench.fleet.workers["d0"].mark_quiet()
    await bench.submit("a", "b", "c")
    assert {worker for worker, _ in bench.submits()} == {"d1"}
    bench.report("d0", blocks_free=1000)
    assert mark_silent_quiet(bench.fleet, time.monotonic(), DEADLINE_S) == []
    await bench.submit("d")
    assert bench.bound_to() == "d0"


@pytest.mark.parametrize("told", ["worker_lost", "worker_quiet"])
async def test_requests_of_workers_that_go_together_are_looked_through_once(told, monkeypatch):
    bench = Bench()
    await bench.submit("a", "b", "c", "d")
    assert {worker for worker, _ in bench.submits()} == {"d0", "d1"}
    bench.add_worker("d2", Role.DECODE)
    looks, theirs = [], bench.router._requests.of
    monkeypatch.setattr(bench.router._requests, "of", lambda *workers: looks.append(1) or theirs(*workers))
    for worker_id in ("d0", "d1"):
        bench.fleet.remove(worker_id) if told == "worker_lost" else bench.fleet.workers[worker_id].mark_quiet()
    getattr(bench.router.lost, told)("d0", "d1")
    assert len(looks) == 1
    await bench.settle()
    assert {active.decode_worker for active in bench.router.requests.values()} == {"d2"}


async def test_requests_stay_when_all_decode_workers_are_quiet():
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    for worker_id in ("d0", "d1"):
        bench.fleet.workers[worker_id].mark_quiet()
    for worker_id in ("d0", "d1"):
        bench.router.lost.worker_quiet(worker_id)
    await bench.submit("s")
    assert bench.router.requests["r"].attempt == 1
    assert bench.fleet.ready(Role.DECODE) == 2


async def test_reset_connection_restarts_its_requests():
    """A token that was on its way is nowhere: the answer goes on from those that came."""
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    worker = bench.bound_to()
    bench.tokens(worker, "r", [1])
    bench.router.lost.connection_reset(worker)
    await bench.settle()
    assert bench.router.requests["r"].retries == ["connection_reset"] and bench.router.requests["r"].charged == []
    bench.tokens(worker, "r", [3])  # of the attempt before
    assert bench.submits()[-1][1].resume_tokens == [1] and bench.received() == [("r", [1], None)]


@pytest.mark.parametrize("event", ["connection_reset", "worker_quiet", "worker_lost", "engine_crashed"])
async def test_what_happens_to_a_worker_looks_at_its_requests_alone(event, monkeypatch):
    """A frontend may have a hundred thousand of others: to look at each takes 60 ms, for each worker of a rack."""
    bench = Bench()
    await bench.submit("r0", "r1", "r2", "r3")
    requests, worker = bench.router.requests, bench.router.requests["r0"].decode_worker
    theirs = {name for name, active in requests.items() if active.decode_worker == worker}
    assert 0 < len(theirs) < len(requests)
    monkeypatch.setattr(bench.router._requests, "all", lambda: pytest.fail("it looks at all"))
    if event == "engine_crashed":
        bench.router.lost.engine_crashed(worker, EngineCrashed("it died"))
    else:
        getattr(bench.router.lost, event)(worker)
    await bench.settle()
    assert {name for name, active in requests.items() if active.retries} == theirs
    monkeypatch.undo()
    for name, active in list(requests.items()):
        bench.tokens(active.decode_worker, name, [1], active.attempt, finish=1)
        await bench.settle()  # a suspect waits until the one before has ended
    assert not bench.codec.failures
    bench.assert_no_leaks()


OF_A_WORKER = ("connection_reset", "worker_quiet", "worker_lost", "engine_crashed")
OF_THE_QUEUE = ("queue_lost", "job_failed", "deadline", "job_lost", "claimer_unheard", "claimer_lost", "recalled")


@pytest.mark.parametrize("event", [*OF_A_WORKER, *OF_THE_QUEUE])
async def test_a_defect_that_one_request_meets_keeps_no_other_with_what_is_lost(event, monkeypatch):
    """Another would wait ten minutes for its next token. The defect is there also when that request is ended for it."""
    bench, names = Bench(), ("r0", "r1", "r2")
    router, now = bench.router, time.monotonic()
    await bench.submit_to_d0(*names, prompt_tokens=10 if event in OF_A_WORKER else 1000)
    monkeypatch.setattr(router._dispatch, "withdraw", defective(router._dispatch.withdraw, "r1"))
    if event == "engine_crashed":
        router.lost.engine_crashed("d0", EngineCrashed("it died"))
    elif event == "job_failed":
        for name in names:
            router.lost.job_failed(name, 1)
    elif event == "deadline":
        router.check(now + 1000)
    elif event in ("job_lost", "claimer_unheard"):
        state = JobState.ABSENT if event == "job_lost" else JobState.CLAIMED
        bench.queue.known = dict.fromkeys(names, state)
        for _ in range(2):
            await router.check_queue(now + 2)
    elif event == "claimer_lost":
        bench.queue.claims = {"p0": names}
        router.lost.worker_lost("p0")
    elif event == "recalled":
        monkeypatch.setattr(router._decider, "recalled", lambda queued: queued)
        router.check(now)
    else:
        getattr(router.lost, event)(*["d0"] if event in OF_A_WORKER else [])
    await bench.settle()
    assert router.requests.keys() == {"r0", "r2"} and bench.codec.failures["r1"].why == "it met a defect"
    assert all(active.attempt == 2 for active in router.requests.values())


async def test_a_request_whose_client_cannot_be_told_of_its_defect_keeps_no_other_with_a_lost_worker(monkeypatch):
    bench = Bench()
    await bench.submit_to_d0("r0", "r1", "r2")
    monkeypatch.setattr(bench.router._dispatch, "withdraw", defective(bench.router._dispatch.withdraw, "r1"))
    monkeypatch.setattr(bench.codec, "failure", lambda *_: 1 // 0)
    bench.router.lost.worker_lost("d0")
    await bench.settle()
    assert {name: active.attempt for name, active in bench.router.requests.items()} == {"r0": 2, "r2": 2}


@pytest.mark.parametrize("told", ["of a defect", "nothing"])
async def test_a_request_ends_though_its_client_cannot_be_told_why(told, monkeypatch):
    """Its client may wait on, with what the request holds."""
    bench = Bench()
    await bench.submit_to_d0("r0", "r1")
    tell = bench.codec.failure

    def failure(parsed, why):
        if told == "nothing" or why.why != "it met a defect":
            raise ValueError(why)
        return tell(parsed, why)

    monkeypatch.setattr(bench.codec, "failure", failure)
    bench.say("d0", Rejected("r0", 1, "no such parameter", final=True))
    assert bench.router.requests.keys() == {"r1"}
    assert ("r0" in bench.codec.failures) is (told == "of a defect")
    bench.tokens("d0", "r1", [1], finish=1)
    await bench.settle()
    bench.assert_no_leaks()


async def test_a_defect_that_one_request_meets_keeps_no_other_that_its_client_has_left(monkeypatch):
    bench, names = Bench(), ("r0", "r1", "r2")
    await bench.submit(*names)
    monkeypatch.setattr(bench.router._dispatch, "withdraw", defective(bench.router._dispatch.withdraw, "r1"))
    bench.router.abort(names)
    assert {message.request_id for _, message in bench.transport.of(Abort)} == {"r0", "r2"}
    bench.assert_no_leaks()


# What is looked after again and again: the part of the router that has it, and its name there.
PARTS = {
    "held back": ("", "_release_late"),
    "deadlines": ("lost", "check"),
    "speed": ("learning.predictor", "set_prior"),
    "claimers": ("lost", "check_claimers"),
    "readiness": ("_decider", "look"),
    "recall": ("lost", "recall"),
    "suspects": ("lost", "check_suspects"),
}


@pytest.mark.parametrize("defective", PARTS)
async def test_a_defect_that_lasts_in_one_part_keeps_no_other_from_its_look(defective, monkeypatch, caplog):
    bench, looks = Bench(), []

    def look(part):
        looks.append(part)
        return 1 // 0 if part == defective else None

    for part, (path, name) in PARTS.items():
        there = attrgetter(path)(bench.router) if path else bench.router
        monkeypatch.setattr(there, name, lambda *_, part=part: look(part))
    for _ in range(2):
        bench.router.check(time.monotonic())
    assert looks == [*PARTS] * 2 and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("state", [State.LOCAL, State.TRANSFERRING, State.DECODING])
async def test_a_request_whose_decode_worker_is_not_there_any_more_goes_on_also_untold(state):
    prompt_tokens = 1000 if state is State.TRANSFERRING else 10
    bench = await Bench.asked(FakeRequest("r", prompt_tokens), claimed=state is State.TRANSFERRING)
    first = bench.bound_to()
    if state is State.DECODING:
        bench.tokens(first, "r", [7])
    active = bench.router.requests["r"]
    assert active.state is state
    bench.fleet.remove(first)
    bench.router.check(time.monotonic())
    await bench.settle()
    assert active.retries == active.charged == ["decode_worker_lost"] and active.decode_worker != first


async def test_an_answer_that_is_complete_but_held_back_is_not_computed_again():
    """Its deadline may be over in the very look that gives its tokens out."""
    bench = await Bench.asked(FakeRequest("r"), claimed=True)
    bench.tokens(bench.bound_to(), "r", [7], finish=1)
    assert bench.received() == []  # `Prefilled` is to come
    bench.fleet.remove("p0")
    bench.router.check(time.monotonic() + 1)
    await bench.settle()
    assert bench.received() == [("r", [7], 1)] and len(bench.submits()) == 1
    bench.assert_no_leaks()


@pytest.mark.parametrize("full", [False, True])
async def test_late_kv_is_retried_when_there_is_room(full):
    bench = await Bench.asked(FakeRequest("r"), claimed=True)
    worker = bench.bound_to()
    bench.report(worker, blocks_free=1 if full else 900)
    now = time.monotonic()
    bench.router.check(now + 10)
    assert bench.router.requests["r"].attempt == 1  # its prefill takes long
    bench.say("p0", Prefilled("r", 1, 0.2))
    bench.router.check(now + 3)
    assert bench.router.requests["r"].attempt == 1
    bench.router.check(now + 4)
    assert bench.router.requests["r"].retries == ([] if full else ["kv_late"])


async def test_of_kv_that_is_late_it_is_known_how_long_it_takes_at_least():
    """Else the next prompts would take the same link, which is too slow for each of them, for ever."""
    bench = Bench()
    bench.lose("d1")
    bench.report("d0")
    predictor, known_s = bench.router.learning.predictor, []
    for name in ("first", "second"):
        await bench.submit(name, prompt_tokens=1000)
        bench.claim(name)
        bench.say("p0", Prefilled(name, 1, 0.2))
        bench.router.check(time.monotonic() + 4)
        assert bench.router.requests[name].retries == ["kv_late"]
        known_s.append(predictor.transfer_s(1000))
    assert known_s[0] < 0.1, "the first one may have waited for the connection"
    assert 3.5 < known_s[1] < 5


@pytest.mark.parametrize("how", ["late", "refused", "refused, with images"])
async def test_a_pair_whose_kv_is_late_or_refused_again_and_again_gets_no_more_for_a_while(how):
    """One whose handshake is refused would compute each prompt twice, and be taken for a fast one. Where decode has no
    pixels to compute it from, it gives it back."""
    bench = Bench(first_token="decode")
    learning = bench.router.learning
    known_s = learning.predictor.transfer_s(1000)
    for worker in ("d0", "d1"):
        bench.report(worker)

    async def bound(name):
        await bench.submit(name, prompt_tokens=1000)
        bench.claim(name)
        await bench.settle()
        return bench.router.requests[name]

    late, first = [], ""
    while len(late) < LATE_IN_A_ROW:
        active = await bound(f"late-{len(late)}")
        first = first or active.decode_worker
        if active.decode_worker == first:
            late.append(active)
        bench.say("p0", Prefilled(active.id, 1, 0.2))
        if active.decode_worker == first and how == "refused":
            bench.tokens(first, active.id, [5], computed=1000)
            assert active.retries == [] and active.state is State.DECODING
        elif active.decode_worker == first and how == "late":
            bench.router.check(time.monotonic() + 4)
            assert active.retries == ["kv_late"]
        elif active.decode_worker == first:
            bench.tokens(first, active.id, [], finish=FinishReason.ERROR)
            assert active.retries == ["engine_error"]
    assert how == "late" or (learning.predictor.transfer_s(1000), dict(learning.recent.transferred)) == (known_s, {})
    other = {"d0", "d1"} - {first}
    assert {(await bound(f"n{number}")).decode_worker for number in range(6)} == other
    bench.lose(*other)
    alone = await bound("alone")
    assert (alone.state, alone.decode_worker, alone.retries) == (State.LOCAL, first, ["no_decode_worker"])


async def test_a_short_prompt_behind_a_long_one_that_waits_for_memory_is_not_late():
    """Its prompt would be computed once more, while prefill keeps the KV of both."""
    bench = Bench()
    bench.lose("d1")
    for name, prompt_tokens in (("long", 8000), ("short", 1000)):
        await bench.submit(name, prompt_tokens=prompt_tokens)
        bench.claim(name)
    bench.report("d0", blocks_free=400)
    for request_id in ("long", "short"):
        bench.say("p0", Prefilled(request_id, 1, 0.2))
    bench.router.check(time.monotonic() + 20)
    assert bench.router.requests["short"].retries == []


@pytest.mark.parametrize(
    ("state", "why"), [(JobState.ABSENT, "job_lost"), (JobState.CLAIMED, "claimer_unheard"), (JobState.WAITING, None)]
)
async def test_lost_jobs_and_unreported_claims_are_retried(state, why):
    bench = await Bench.asked(FakeRequest("r"))
    bench.queue.known["r"] = state
    now = time.monotonic()
    await bench.router.check_queue(now + 0.5)
    assert bench.router.requests["r"].attempt == 1  # young enough for news to be on its way
    for later_s in (1.5, 2.0):
        await bench.router.check_queue(now + later_s)
    assert bench.router.requests["r"].retries == ([why] if why else [])


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
async def test_engine_abort_is_retried(reason):
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    bench.tokens(bench.bound_to(), "r", [], finish=reason)
    await bench.settle()
    assert bench.received() == [] and bench.submits()[-1][1].attempt == 2


async def test_unreadable_outputs_leave_no_gap_in_answers(monkeypatch):
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    worker = bench.bound_to()
    bench.tokens(worker, "r", [5])

    def unreadable(*args):
        raise MessageError("not outputs")

    monkeypatch.setattr(FakeCodec, "decode_outputs", unreadable)
    bench.tokens(worker, "r", [6])
    monkeypatch.undo()
    bench.tokens(worker, "r", [7])  # of the old attempt: after the gap
    await bench.settle()
    assert bench.submits()[-1][1].resume_tokens == [5] and bench.submits()[-1][1].attempt == 2
    bench.tokens(bench.bound_to(), "r", [6], attempt=2, finish=1)
    assert bench.received() == [("r", [5], None), ("r", [6], 1)]
    bench.assert_no_leaks()


async def test_defect_in_retry_fails_request(monkeypatch):
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))

    def broken(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(Decider, "decide", broken)
    bench.say(bench.bound_to(), Rejected("r", 1, "draining"))
    await bench.settle()
    assert bench.received() == [("r", [], FinishReason.ERROR)]
    with pytest.raises(ZeroDivisionError):
        await bench.router.submit(FakeRequest("s"))
    bench.assert_no_leaks()


async def test_max_attempts_bounds_retries(monkeypatch):
    monkeypatch.setattr("orchestrator.router.dispatch.MAX_ATTEMPTS", 2)
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    for attempt in (1, 2):
        bench.tokens(bench.bound_to(), "r", [], attempt=attempt, finish=FinishReason.ERROR)
        await bench.settle()
    assert bench.received() == [("r", [], FinishReason.ERROR)]
    bench.assert_no_leaks()


@pytest.mark.parametrize(
    ("fails", "status"),
    [
        (["lost"] * 4, 503),
        (["error"] * 3 + ["lost"], 503),
        (["error"] * 4, None),
        (["prefill failed", "error", "error", "error"], None),
        (["prefill given back", "error", "error", "error"], 503),
        (["reset", "error", "error", "error", "error"], None),  # which does not count as an attempt that failed
        (["lost", "error after much", "error", "error", "error"], None),  # nor does what was before a sound one
        (["refused"] * 4, None),
        (["late"] * 4, 503),
        (["refused"] * 3 + ["late"], 503),
    ],
)
async def test_a_request_whose_workers_were_lost_may_be_asked_again(fails, status):
    """500 would say that something is wrong with it, or here. One engine that fails it may be wrong, four are not."""
    remote = fails[0].startswith("prefill")
    bench = await Bench.asked(FakeRequest("r") if remote else FakeRequest("r", prompt_tokens=10), claimed=remote)
    for attempt, how in enumerate(fails, 1):
        worker = bench.bound_to()
        if how == "lost":
            bench.lose(worker)
            bench.add_worker(worker, Role.DECODE)
        elif how.startswith("prefill"):
            bench.say("p0", PrefillFailed("r", attempt, how, by_engine=how == "prefill failed"))
        elif how == "reset":
            bench.router.lost.connection_reset(worker)
        elif how in ("refused", "late"):
            bench.say(worker, Rejected("r", attempt, "its adapter", late=how == "late"))
        else:
            if how == "error after much":
                bench.tokens(worker, "r", [5] * SOUND_TOKENS, attempt=attempt)
            bench.tokens(worker, "r", [], attempt=attempt, finish=FinishReason.ERROR)
        await bench.settle()
    failure = bench.codec.failures["r"]
    assert failure.why.startswith(f"{len(fails)} attempts failed: ") and not failure.by_client
    assert (Overloaded(failure.rejected).status if failure.rejected is not None else None) == status
    assert status is None or failure.rejected.retry_after_s > 0
    bench.assert_no_leaks()


async def test_an_accepted_request_waits_for_a_worker_to_come_back():
    bench = Bench()
    bench.fleet.remove("d1")
    await bench.submit("r")
    bench.lose("d0")
    assert bench.router.requests["r"].state is State.PLACING
    bench.add_worker("d0", Role.DECODE)
    await asyncio.wait_for(bench.settle(), DEADLINE_S)
    assert bench.submits()[-1][1].attempt == 2


async def test_wait_for_worker_times_out():
    """Its client reads what that of a new request would: it may ask again."""
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10), placement_timeout_s=0.01)
    for name in ("d0", "d1"):
        bench.fleet.remove(name)
    bench.router.lost.worker_lost(bench.bound_to())
    await asyncio.wait_for(bench.settle(), DEADLINE_S)
    assert bench.received() == [("r", [], FinishReason.ERROR)]
    assert Overloaded(bench.codec.failures["r"].rejected).status == 503
    bench.assert_no_leaks()


async def test_no_decode_worker_refuses_with_503_and_a_full_fleet_with_429(monkeypatch):
    monkeypatch.setattr(placement, "MAX_WAITING", 1)
    bench = Bench()
    bench.queue.depth = None
    for name in ("d0", "d1"):
        bench.report(name, blocks_free=0, running=9, waiting=1)
    with pytest.raises(Overloaded) as full:
        await bench.router.submit(FakeRequest("r"))
    assert full.value.status == 429 and full.value.retry_after_s > 0
    with pytest.raises(Overloaded):
        bench.router.check_admission()
    for name in ("d0", "d1", "p0"):
        bench.fleet.remove(name)
    with pytest.raises(Overloaded) as nobody:
        await bench.router.submit(FakeRequest("r2"))
    assert nobody.value.status == 503
    bench.assert_no_leaks()


async def test_requests_wait_while_workers_that_were_ready_a_moment_ago_start_again():
    bench = Bench()
    bench.router.check(time.monotonic())
    await bench.submit("accepted")
    for name in ("d0", "d1", "p0"):
        bench.lose(name)
    bench.router.check_admission()
    waiting = asyncio.create_task(bench.router.submit(FakeRequest("new", prompt_tokens=10)))
    await until(lambda: "new" in bench.router.requests)
    bench.add_worker("d0", Role.DECODE)
    await waiting
    await bench.settle()
    assert {submit.request_id for worker, submit in bench.submits() if worker == "d0"} >= {"accepted", "new"}
    assert not bench.codec.failures


async def test_nobody_waits_for_workers_that_were_not_ready_lately():
    bench = Bench(placement_timeout_s=30)
    bench.router.check(time.monotonic() - 31)
    for name in ("d0", "d1", "p0"):
        bench.lose(name)
    with pytest.raises(Overloaded) as nobody:
        await bench.router.submit(FakeRequest("r"))
    assert nobody.value.status == 503
    bench.assert_no_leaks()


@pytest.mark.parametrize("refused", [Sent.TOO_LARGE, Sent.NOT_READ])
async def test_what_a_worker_cannot_be_sent_says_nothing_of_the_worker(refused):
    bench = Bench(placement_timeout_s=0.3)
    bench.transport.refuses = {"d0": refused, "d1": refused}
    with pytest.raises(Overloaded):
        await bench.submit("large")
    assert all(view.connected for view in bench.fleet.workers.values())
    bench.transport.refuses = {}
    await bench.submit("r")
    assert bench.submits()[-1][1].request_id == "r"


@pytest.mark.parametrize("placed_by", [{}, {"remote_prefill_min_tokens": None}], ids=["length", "cost"])
@pytest.mark.parametrize("local_only", [None, "n"])
async def test_the_tightest_objectives_that_a_header_may_name_are_taken(placed_by, local_only):
    own = read_objectives([(b"x-slo-ttft-ms", b"0.001"), (b"x-slo-tpot-ms", b"0.001")])
    bench = await Bench.asked(FakeRequest("r", own=own, local_only=local_only), **placed_by)
    assert bench.submits() or bench.queue.jobs


@pytest.mark.parametrize(("own", "told_s"), [(Objectives(0.3), 0.3), (Objectives(), 0.0)])
async def test_a_job_tells_workers_the_objective_of_its_request(own, told_s):
    bench = await Bench.asked(FakeRequest("r", own=own))
    assert [job.ttft_s for job in bench.queue.jobs] == [told_s]


async def test_a_request_that_could_not_be_counted_is_left_nowhere(monkeypatch):
    bench = Bench()
    monkeypatch.setattr(bench.router.learning, "arrived", lambda active, block_size: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await bench.submit("r")
    ((worker, _),) = bench.submits()
    assert bench.transport.sent[-1] == (worker, Abort("r", 1))
    bench.assert_no_leaks()


@pytest.mark.parametrize("said", ["unreadable", "without its attempts"])
async def test_lost_outputs_leave_no_gap(said):
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    ((worker, _),) = bench.submits()
    bench.tokens(worker, "r", [7])
    bench.report("d1" if worker == "d0" else "d0", blocks_free=400)
    if said == "unreadable":
        bench.router.lost.outputs_lost(worker)
    else:
        bench.say(worker, Outputs([], 0.0), [msgspec.msgpack.encode([["r", [8], None]])])
    await bench.settle()
    before, (worker, again) = worker, bench.submits()[-1]
    assert (again.attempt, again.resume_tokens) == (2, [7]) and worker != before
    bench.tokens(worker, "r", [8], attempt=2, finish=FinishReason.LENGTH)
    assert bench.received() == [("r", [7], None), ("r", [8], FinishReason.LENGTH)]
    bench.assert_no_leaks()


class FewTimes(dict):
    """What becomes of messages, for so many of them."""

    asked = 0

    def get(self, worker_id):
        self.asked += worker_id in self
        assert self.asked < 20, "it is tried without end, and nothing else runs meanwhile"
        return super().get(worker_id)


@pytest.mark.parametrize("refused", [Sent.TOO_LARGE, Sent.NOT_READ])
async def test_what_no_decode_worker_can_be_sent_when_it_is_claimed_is_tried_once_on_each(refused):
    bench = await Bench.asked(FakeRequest("r"))
    bench.transport.refuses = FewTimes(d0=refused, d1=refused)
    bench.claim("r")
    assert bench.router.requests["r"].attempt == 2 and ("p0", Abort("r", 1)) in bench.transport.sent
    await asyncio.sleep(0)  # in which the next attempt finds that none takes it
    bench.transport.refuses = {}
    await bench.settle()
    ((worker, submit),) = bench.submits()
    assert submit.attempt == 2 and submit.kv_source is None
    bench.tokens(worker, "r", [1], attempt=2, finish=FinishReason.LENGTH)
    assert bench.received() == [("r", [1], FinishReason.LENGTH)]
    bench.assert_no_leaks()


async def test_of_many_that_wait_for_a_worker_each_asks_more_seldom(monkeypatch):
    monkeypatch.setattr(dispatch, "PLACE_AGAIN_S_EACH", 0.05)
    bench = Bench()
    await bench.submit(*(f"r{number}" for number in range(40)))
    asked, decide = [], Decider.decide
    monkeypatch.setattr(Decider, "decide", lambda self, active: asked.append(active.id) or decide(self, active))
    for worker_id in ("d0", "d1"):
        bench.lose(worker_id)
    await asyncio.sleep(0.95)
    assert 40 <= len(asked) < 3 * 40  # every 0.1 s it would be ten times
    monkeypatch.undo()
    bench.add_worker("d2", Role.DECODE)
    await bench.settle()
    assert {worker for worker, submit in bench.submits() if submit.attempt == 2} == {"d2"}


async def test_how_seldom_a_request_asks_does_not_put_off_its_deadline(monkeypatch):
    monkeypatch.setattr(dispatch, "PLACE_AGAIN_S_EACH", 3600.0)
    bench = Bench(placement_timeout_s=0.2)
    for worker_id in ("d0", "d1"):
        bench.lose(worker_id)
    with pytest.raises(Overloaded, match="no_decode_worker"):
        await bench.submit("r")


async def test_a_worker_that_is_not_connected_is_asked_no_more():
    bench = Bench()
    bench.transport.unreachable = {"d0"}
    await bench.submit("r0", "r1", "r2", "r3")
    assert {worker for worker, _ in bench.submits()} == {"d1"} and not bench.fleet.workers["d0"].connected


async def test_requests_wait_for_prefill_worker_that_becomes_decode():
    bench = Bench()
    for name in ("d0", "d1"):
        bench.fleet.remove(name)
    bench.router.check_admission()
    waiting = [asyncio.create_task(bench.router.submit(FakeRequest(name, prompt_tokens=10))) for name in ("a", "b")]
    await asyncio.sleep(0.15)
    assert not any(task.done() for task in waiting) and not bench.submits()
    waiting[1].cancel()
    view = bench.fleet.workers["p0"]
    view.note_info(msgspec.structs.replace(view.info, role=Role.DECODE))
    await waiting[0]
    assert [(worker, submit.request_id) for worker, submit in bench.submits()] == [("p0", "a")]
    bench.tokens("p0", "a", [7], finish=1)
    await asyncio.gather(*waiting, return_exceptions=True)
    bench.assert_no_leaks()


async def test_wait_for_decode_worker_times_out():
    bench = Bench(placement_timeout_s=0.15)
    for name in ("d0", "d1"):
        bench.fleet.remove(name)
    with pytest.raises(Overloaded) as late:
        await bench.router.submit(FakeRequest("r"))
    assert late.value.status == 503
    bench.assert_no_leaks()


async def test_request_does_not_wait_for_engine_that_cannot_decode():
    bench = Bench()
    for name in ("d0", "d1"):
        bench.fleet.remove(name)
    view = bench.fleet.workers["p0"]
    view.note_info(msgspec.structs.replace(view.info, kv=msgspec.structs.replace(view.info.kv, pp_size=2)))
    with pytest.raises(Overloaded):
        bench.router.check_admission()


async def test_unsent_request_is_not_counted_as_load():
    bench = Bench()
    bench.transport.unreachable = {"d0"}
    for number in range(3):
        bench.connect("d0")
        await bench.submit(f"r{number}")
        assert bench.fleet.workers["d0"].candidate.waiting == 0
    assert bench.fleet.workers["d1"].candidate.waiting == 3


@pytest.mark.parametrize("unreachable", [(), ("d0", "d1")])
async def test_an_adapter_is_expected_only_where_its_request_was_sent(unreachable):
    bench = Bench()
    for view in bench.fleet.workers.values():
        view.note_info(msgspec.structs.replace(view.info, adapter_slots=1))
        bench.report(view.info.id)
    await bench.router.submit(FakeRequest("r", adapter=7))
    bench.transport.unreachable = set(unreachable)
    bench.claim("r")
    bench.fleet.apply_changes()
    found = [bench.fleet.adapters.places[role].holders(7) for role in (Role.PREFILL, Role.DECODE)]
    assert found == ([None, None] if unreachable else [["p0"], [bench.bound_to()]])


async def test_abort_reaches_queue_and_both_workers():
    bench = await Bench.asked(FakeRequest("queued"))
    await bench.router.submit(FakeRequest("bound"))
    bench.claim("bound")
    decode = bench.bound_to()
    bench.router.abort(["queued", "bound", "unknown"])
    await bench.settle()
    assert bench.queue.cancelled == [("queued", 1), ("bound", 1)]
    assert (decode, Abort("bound", 1)) in bench.transport.sent and ("p0", Abort("bound", 1)) in bench.transport.sent
    bench.tokens(decode, "bound", [1])
    assert bench.received() == []
    bench.assert_no_leaks()


async def test_a_request_that_stalls_is_started_elsewhere(monkeypatch):
    monkeypatch.setattr("orchestrator.router.lost.STALL_TIMEOUT_S", 0.01)
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    first = bench.bound_to()
    watching = asyncio.create_task(bench.router.run())
    await until(lambda: len(bench.submits()) == 2)
    watching.cancel()
    assert bench.bound_to() != first


async def test_a_long_prompt_has_the_time_to_be_computed():
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=1_000_000, local_only="n"))
    took_s = bench.router.learning.predictor.prefill_s(1_000_000)
    assert took_s > STALL_TIMEOUT_S / 2
    now = time.monotonic()
    bench.router.check(now + 2 * took_s)
    assert bench.router.requests["r"].attempt == 1
    bench.router.check(now + 4 * took_s)
    assert bench.router.requests["r"].retries == ["stalled"]


async def test_time_in_which_this_process_stood_still_is_no_time_of_workers(monkeypatch):
    """What they said meanwhile lies in the sockets. A process that stands still again and again has deadlines too."""
    bench = await Bench.asked(FakeRequest("r"), claimed=True)
    bench.report(bench.bound_to())
    bench.say("p0", Prefilled("r", 1, 0.2))
    clock, seen = SimpleNamespace(now=time.monotonic()), []

    async def ticks(_):
        for late_s in (5.0, 9.0, 1.0, 1.0, 1.0, 1.0):
            clock.now += 1 + late_s
            yield late_s
            seen.append(bench.router.requests["r"].retries == ["kv_late"])

    monkeypatch.setattr("orchestrator.router.router.time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr("orchestrator.router.router.ticks", ticks)
    await bench.router.run()
    assert seen == [False, False, False, True, True, True], "after the fourth second in which it ran"


async def test_a_defect_that_one_request_meets_costs_no_other_a_token(caplog):
    bench = await Bench.asked(FakeRequest("a", prompt_tokens=10))
    bench.lose("d1" if bench.bound_to() == "d0" else "d0")
    await bench.submit("b", "c")
    bench.router.learning.began = defective(bench.router.learning.began, "b")  # in the middle of what an output does
    step = msgspec.msgpack.encode([[name, [7], None] for name in "abc"])
    bench.say(bench.bound_to(), Outputs([1, 1, 1], 0.0), [step])
    assert bench.received() == [("b", [], FinishReason.ERROR), ("a", [7], None), ("c", [7], None)]
    assert list(bench.router.requests) == ["a", "c"] and "ZeroDivisionError" in caplog.text


async def test_a_defect_that_one_request_meets_costs_no_other_its_deadline(monkeypatch, caplog):
    bench = await Bench.asked(FakeRequest("a"), claim_timeout_s=0.05)
    await bench.router.submit(FakeRequest("b"))
    monkeypatch.setattr(bench.router.lost, "_claim_is_late", defective(bench.router.lost._claim_is_late, "a"))
    bench.router.check(time.monotonic() + 0.06)
    await bench.settle()
    assert bench.received() == [("a", [], FinishReason.ERROR)] and "ZeroDivisionError" in caplog.text
    assert bench.router.requests["b"].retries == ["claim_timeout"]
    assert ("a", 1) in bench.queue.cancelled


async def test_a_defect_in_what_was_held_back_fails_that_request_alone(caplog):
    """Decode's tokens that wait for `Prefilled` are given out when they have waited too long, and when it comes."""
    bench = Bench()
    for name in ("a", "b", "c"):
        await bench.router.submit(FakeRequest(name))
        bench.claim(name)
        bench.tokens(bench.bound_to(), name, [7])
    assert bench.received() == []
    for name in ("a", "b"):  # in the middle of what an output does
        bench.router.learning.began = defective(bench.router.learning.began, name)
    bench.say("p0", Prefilled("a", 1, 0.2))
    bench.router.check(time.monotonic() + 1)
    assert bench.received() == [("a", [], FinishReason.ERROR), ("b", [], FinishReason.ERROR), ("c", [7], None)]
    assert list(bench.router.requests) == ["c"] and "ZeroDivisionError" in caplog.text


async def test_no_deadline_waits_for_redis(monkeypatch):
    monkeypatch.setattr("orchestrator.router.router.CHECK_S", 0.02)
    bench, asked = await Bench.asked(FakeRequest("queued")), asyncio.Event()

    async def hangs(request_ids):
        asked.set()
        await asyncio.Event().wait()

    bench.queue.states = hangs
    bench.router.requests["queued"].moved_at -= 2
    running = asyncio.create_task(bench.router.run())
    await asked.wait()
    await bench.router.submit(FakeRequest("r"))
    bench.claim("r")
    bench.tokens(bench.bound_to(), "r", [7])
    await until(lambda: bench.received() == [("r", [7], None)])
    await cancelled(running)


async def test_who_cannot_be_told_of_an_end_takes_it_from_nobody(caplog):
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    bench.router.learning.ended = lambda *_: 1 // 0
    bench.tokens(bench.bound_to(), "r", [7], finish=FinishReason.LENGTH)
    assert bench.received() == [("r", [7], FinishReason.LENGTH)] and "ZeroDivisionError" in caplog.text
    bench.assert_no_leaks()


async def test_a_job_of_another_attempt_keeps_its_place():
    """The queue dates it anew, since the job of the attempt before has been removed."""
    bench = await Bench.asked(FakeRequest("r"), fallback="refuse")
    active = bench.router.requests["r"]
    active.accepted_at -= 30  # it has waited for so long
    bench.claim("r")
    bench.say("p0", PrefillFailed("r", 1, "defect"))
    await bench.settle()
    first, second = bench.queue.jobs
    assert second.attempt == 2 and first.delay_s - second.delay_s == pytest.approx(30, abs=5)
    assert second.arrived_at + second.delay_s == pytest.approx(first.arrived_at + first.delay_s)


@pytest.mark.parametrize("gone", [["{decode}"], ["p0", "{decode}"]])
async def test_a_job_that_is_computed_for_an_attempt_given_up_is_removed_before_the_next_one(gone):
    """Else the next job would have the arrival of this one, and go before all others by as long as it has waited; and
    of a prefill worker that is gone another would compute it again, for nobody."""
    bench = await Bench.asked(FakeRequest("r"), claimed=True, fallback="refuse")
    lost = [name.format(decode=bench.bound_to()) for name in gone]
    bench.add_worker("p1", Role.PREFILL)
    enqueue, before = bench.queue.enqueue, []

    async def enqueue_later(job):
        before.append(list(bench.queue.cancelled))
        return await enqueue(job)

    bench.queue.enqueue = enqueue_later
    for name in lost:
        bench.fleet.remove(name)
    bench.router.lost.worker_lost(*lost)
    await bench.settle()
    assert [job.attempt for job in bench.queue.jobs] == [1, 2] and before == [[("r", 1)]]


async def test_burst_spreads_over_workers():
    bench = Bench()
    for name, free in (("d0", 1000), ("d1", 990)):
        bench.report(name, blocks_free=free)
    await bench.submit(*(f"r{i}" for i in range(20)), prompt_tokens=90)
    placed = [worker for worker, _ in bench.submits()]
    assert 7 <= placed.count("d1") <= 13


async def test_stage_times_are_learned(monkeypatch):
    bench = Bench()
    predictor = bench.router.learning.predictor
    bench.report("p0", blocks_free=1000, prefill_tokens_per_s=250.0)
    for i in range(8):
        await bench.router.submit(FakeRequest(f"r{i}"))
        bench.claim(f"r{i}")
        bench.say("p0", Prefilled(f"r{i}", 1, 2.0, cached_tokens=500))
        bench.tokens(bench.bound_to(), f"r{i}", [1])
        bench.tokens(bench.bound_to(), f"r{i}", [1] * 9, finish=1)
    assert predictor.prefill_s(500) == pytest.approx(2.0) and predictor.output_tokens == pytest.approx(10)
    assert set(predictor.coefficients().itl_s) <= {"d0", "d1"}
    bench.router.lost.worker_lost("p0")
    assert "p0" not in predictor.coefficients().prefill_s


async def test_cost_placement_avoids_slow_queue():
    bench = Bench(remote_prefill_min_tokens=None)
    bench.queue.depth = QueueDepth(50, 20_000, 1)
    await bench.router.submit(FakeRequest("r"))
    assert bench.router.requests["r"].placed.reason == "cost" and bench.submits()
    bench.queue.depth = QueueDepth(0, 0, 0)
    for name in ("d0", "d1"):
        bench.report(name, running=9, waiting_tokens=500_000)
    await bench.router.submit(FakeRequest("s"))
    assert bench.router.requests["s"].placed.decision == "remote" and bench.router.requests["s"].placed.reason == "cost"


def _transfers_are_quick(bench):
    for tokens in range(100, 1100, 100):
        bench.router.learning.predictor.observe_transfer(tokens, 0.0)


async def test_a_queued_request_is_prefilled_locally_once_that_is_sooner():
    bench = Bench(remote_prefill_min_tokens=None)
    _transfers_are_quick(bench)
    await bench.router.submit(FakeRequest("r", 1000))
    bench.queue.depth = QueueDepth(1, 1000, 0)
    bench.router.check(time.monotonic())
    assert bench.router.requests["r"].state is State.QUEUED  # nobody is ahead of it
    bench.queue.depth = QueueDepth(20, 20_000, 0)
    bench.router.check(time.monotonic() + 0.5)
    assert bench.router.requests["r"].state is State.QUEUED  # looked at once a second
    bench.router.check(time.monotonic() + 1.5)
    await bench.settle()
    active = bench.router.requests["r"]
    assert active.state is State.LOCAL and active.retries == ["recalled"] and bench.queue.cancelled == [("r", 1)]
    bench.tokens(bench.bound_to(), "r", [1], attempt=2, finish=1)
    bench.assert_no_leaks()


async def test_recalled_requests_share_decode_workers():
    bench = Bench(remote_prefill_min_tokens=None)
    _transfers_are_quick(bench)
    await bench.submit(*(f"r{number}" for number in range(5)), prompt_tokens=1000)
    bench.queue.depth = QueueDepth(5, 5000, 0)
    bench.router.check(time.monotonic())
    await bench.settle()
    recalled = [active for active in bench.router.requests.values() if active.state is State.LOCAL]
    # Without the first that went to each, those behind would all have gone too.
    assert {active.decode_worker for active in recalled} == {"d0", "d1"} and 2 <= len(recalled) < 4


@pytest.mark.parametrize("admission", ["reject", "queue"])
async def test_late_request_is_refused_or_deferred_as_configured(admission):
    bench = Bench(slo={"ttft_s": 0.5, "admission": admission})
    bench.queue.depth = QueueDepth(50, 20_000, 1)
    if admission == "reject":
        with pytest.raises(Overloaded) as refused:
            await bench.router.submit(FakeRequest("r"))
        assert refused.value.reason == "slo_ttft" and refused.value.status == 429 and refused.value.retry_after_s > 1
        bench.assert_no_leaks()
    else:
        await bench.router.submit(FakeRequest("r"))
        assert bench.queue.jobs[0].delay_s > LATE_OBJECTIVES * 0.5


async def test_offered_load_counts_every_request_once(monkeypatch):
    monkeypatch.setattr(placement, "MAX_WAITING", 1)
    bench = await Bench.asked(FakeRequest("a", 300, max_new_tokens=40), claimed=True)
    bench.router.lost.worker_lost(bench.router.requests["a"].decode_worker)  # a second attempt is no second request
    await asyncio.sleep(0)
    expected = bench.router.learning.predictor.output_tokens
    await bench.router.submit(FakeRequest("b", 500, max_new_tokens=10**6))
    assert bench.router.learning.offered == Offered.one(300, 300, 40) + Offered.one(500, 500, expected)
    for name in ("d0", "d1", "p0"):
        bench.fleet.remove(name)
    with pytest.raises(Overloaded):
        await bench.router.submit(FakeRequest("c", 100, max_new_tokens=10))
    with pytest.raises(Overloaded):
        bench.router.check_admission()
    offered = bench.router.learning.offered
    assert (offered.requests, offered.prefill_tokens, offered.output_tokens) == (4, 900 + 300, 50 + 2 * expected)
    assert offered.prefill_tokens2 == 300.0**2 + 500**2 + 100**2 + 300**2


async def test_length_and_priority_set_queue_score():
    bench = Bench(slo={"ttft_s": 3.0, "admission": "off"})
    for request_id, prompt_tokens, priority in (("a", 1000, 0), ("b", 1000, -2), ("c", 3000, 0)):
        await bench.router.submit(FakeRequest(request_id, prompt_tokens, priority=priority))
    a, b, c = (job.delay_s for job in bench.queue.jobs)
    assert a - b == pytest.approx(6.0)
    assert c - a == pytest.approx(1.0)


async def test_length_and_priority_set_engine_delay():
    bench = Bench(slo={"ttft_s": 3.0, "admission": "off"})
    for request_id, prompt_tokens, priority in (("a", 20, 0), ("b", 20, -2), ("c", 90, 0)):
        await bench.router.submit(FakeRequest(request_id, prompt_tokens, priority=priority))
    await bench.router.submit(FakeRequest("remote", 1000))
    bench.claim("remote")
    a, b, c, remote = (submit.behind_s for _, submit in bench.submits())
    assert a - b == pytest.approx(6.0, abs=0.5) and 1.0 < c - a < 4.0
    assert -0.5 < remote < 0  # as long ago as it has arrived


def test_every_state_can_be_left_or_is_an_end():
    ends = {State.FINISHED, State.ABORTED, State.FAILED, State.INVALID, State.REJECTED}
    assert {state for state, successors in SUCCESSORS.items() if not successors} == ends
    reached = set().union(*SUCCESSORS.values())
    assert reached == set(State) and set(SUCCESSORS) == set(State)


async def test_frozen_fleet_stops_deadlines(monkeypatch):
    monkeypatch.setattr("orchestrator.router.lost.STALL_TIMEOUT_S", 5.0)
    bench = await Bench.asked(FakeRequest("frozen", prompt_tokens=10), claim_timeout_s=5.0)
    await bench.router.submit(FakeRequest("queued"))
    bench.tokens(bench.bound_to(), "frozen", [1])
    bench.fleet.pause.note("d0", PauseState(1, "keep"))
    bench.router.check(time.monotonic() + 60)
    assert [active.attempt for active in bench.router.requests.values()] == [1, 1]
    bench.fleet.pause.note("d0", PauseState(2))
    ended_at = bench.fleet.pause.ended_at = time.monotonic() + 60  # as if the pause had lasted a minute
    bench.router.check(ended_at + 4)
    assert [active.attempt for active in bench.router.requests.values()] == [1, 1]
    bench.router.check(ended_at + 6)
    assert [active.attempt for active in bench.router.requests.values()] == [2, 2]


async def test_frozen_fleet_stops_the_deadline_of_a_request_without_a_worker():
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10), placement_timeout_s=0.2)
    for name in ("d0", "d1"):
        bench.lose(name)
    bench.fleet.pause.note("p0", PauseState(1, "keep"))
    await asyncio.sleep(0.3)
    bench.fleet.pause.note("p0", PauseState(2))
    bench.add_worker("d2", Role.DECODE)
    await bench.settle()
    assert bench.bound_to() == "d2" and not bench.codec.failures


async def test_waiting_pause_keeps_deadlines(monkeypatch):
    monkeypatch.setattr("orchestrator.router.lost.STALL_TIMEOUT_S", 5.0)
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    bench.fleet.pause.note("d0", PauseState(1, "wait"))
    bench.router.check(time.monotonic() + 6)
    assert bench.router.requests["r"].attempt == 2
