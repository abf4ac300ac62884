"""Prefill jobs from the queue to their acknowledgement: hand-over, budget, leases, aborts, corrupt jobs, Redis away."""

import asyncio
import signal
import time

import msgspec
import pytest
from support_redis import claim_head
from support_steering import order_drain
from support_wait import DEADLINE_S, until
from support_workers import Workers, running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.policy.predict.predictor import PRIOR_S_PER_TOKEN
from orchestrator.store.queue import MAX_DELIVERIES, PrefillQueue
from orchestrator.types import FinishReason, JobState, Role
from orchestrator.wire.messages import Claimed, Prefilled, PrefillFailed
from workers.claims import claim_budget, claim_limits, claims_as
from workers.engine import AdapterLate, AdapterUnavailable, EngineRequest, EngineStep
from workers.sim.codec import WireOutput

PROMPT = list(range(100, 400))


async def test_claims_only_what_its_budget_allows(redis_server: EmbeddedRedis) -> None:
    async with running_workers(
        redis_server, sim={"max_num_batched_tokens": 1000, "prefill_us_per_token": 50}
    ) as workers:
        prefill, _, frontend = await workers.pair(speed=1.0)
        requests = [frontend.new([i, *PROMPT], max_tokens=2) for i in range(20)]

        def held_tokens() -> int:
            claimed = [r for r in requests if r.got(Claimed) and not r.got(Prefilled) and not r.got(PrefillFailed)]
            return sum(len(r.prompt) for r in claimed)

        await prefill.engine.call("pause_scheduler", [], {})  # it computes nothing until all are in the queue
        await frontend.enqueue(*requests)
        await until(lambda: held_tokens() > 1000, "more claims than one batch takes")
        await prefill.engine.call("resume_scheduler", [], {})
        most = 0
        while not all(r.finish for r in requests):
            most = max(most, held_tokens())
            await asyncio.sleep(0.002)
        # 2 batches of 1000 tokens; one of those claimed may be computed in part.
        assert most <= 2000 + 301


@pytest.mark.parametrize("named_by", ["the file", "requests"])
async def test_claims_no_more_than_the_tightest_objective_lets_others_wait_for(
    redis_server: EmbeddedRedis, named_by: str
) -> None:
    """0.6 of 0.3 s are 180 tokens."""
    slow = {"speed": 1.0, "prefill_us_per_token": 1000.0, "max_num_batched_tokens": 2048}
    classes = {"chat": {"ttft_s": 0.3}} if named_by == "the file" else {}
    async with running_workers(redis_server, sim=slow, slo={"ttft_s": 30.0, "classes": classes}) as workers:
        _, _, frontend = await workers.pair(**slow)
        own_s, before = (0.0, 0) if classes else (0.3, 8)  # an eighth of the latest jobs
        earlier, requests = (
            [frontend.new([i, *PROMPT[:n]], max_tokens=1) for i in range(k)] for n, k in ((9, before), (300, 6))
        )
        await frontend.enqueue(*earlier, ttft_s=own_s)
        await frontend.finished(*earlier)
        await frontend.enqueue(*requests, ttft_s=own_s)
        most = 0
        while not all(r.finish for r in requests):
            most = max(most, sum(bool(r.got(Claimed)) and not r.got(Prefilled) for r in requests))
            await asyncio.sleep(0.002)
        assert most == 1, "13 of them fit into two batches"


async def test_jobs_go_to_worker_with_their_prefix(workers: Workers) -> None:
    one, two, decode = [await workers.start(role) for role in (Role.PREFILL, Role.PREFILL, Role.DECODE)]
    frontend = await workers.frontend(one, two, decode, binds_to=decode)
    requests = [frontend.new([i, *PROMPT], max_tokens=1) for i in range(20)]
    for request in requests:
        await frontend.enqueue(request, cached={one.id: 16, two.id: 256})
        await frontend.finished(request)
    claimed = [request.claimed_by[0] for request in requests]
    assert claimed.count(two.id) >= 15  # all but those that the other one met when it looked by itself


async def test_cached_tokens_do_not_count_against_budget(redis_server: EmbeddedRedis) -> None:
    """500 tokens fit in no budget of 400 while another prompt is computed; 20 that are not cached do."""
    # There is room for them while the last chunk is computed, which takes 0.6 s.
    slow = {"speed": 1.0, "prefill_us_per_token": 3000.0, "max_num_batched_tokens": 200}
    async with running_workers(redis_server, sim=slow) as workers:
        prefill, _, frontend = await workers.pair()
        first, second = frontend.new([1, *range(799)]), frontend.new([2, *range(499)])
        await frontend.claimed(first)
        await frontend.claimed(second, cached={prefill.id: 480})
        assert not first.got(Prefilled)
        await frontend.finished(first, second)


@pytest.mark.slow
async def test_idle_worker_leaves_job_cached_elsewhere(
    redis_server: EmbeddedRedis,
) -> None:
    """The worker that has it cached computes a long prompt and has no room."""
    slow = {"speed": 1.0, "prefill_us_per_token": 2000.0, "max_num_batched_tokens": 150}
    async with running_workers(redis_server, sim=slow) as workers:
        home, decode = [await workers.start(role) for role in (Role.PREFILL, Role.DECODE)]
        frontend = await workers.frontend(home, decode, binds_to=decode)
        first, wanted = frontend.new([1, *range(3999)]), frontend.new([2, *range(999)])
        await frontend.claimed(first)
        idle = await workers.start(Role.PREFILL)
        await frontend.meet(idle.info)
        began = time.monotonic()
        await frontend.claimed(wanted, cached={home.id: 980})
        assert wanted.claimed_by[0] == idle.id
        assert time.monotonic() - began > 980 * PRIOR_S_PER_TOKEN
        await frontend.finished(first, wanted)


async def test_jobs_cached_on_draining_worker_are_claimed(workers: Workers) -> None:
    home, other, decode = [await workers.start(role) for role in (Role.PREFILL, Role.PREFILL, Role.DECODE)]
    frontend = await workers.frontend(home, other, decode, binds_to=decode)
    await order_drain(workers.registry, home.id)
    assert await home.stopped() == 0
    requests = [frontend.new([i, *PROMPT], max_tokens=1) for i in range(5)]
    await frontend.enqueue(*requests, cached={home.id: 300})
    await frontend.finished(*requests)
    assert {request.claimed_by[0] for request in requests} == {other.id}


@pytest.mark.parametrize(
    ("claimed", "held", "free", "expected"),
    [
        (0, 0, 10_000, 4096),
        (3000, 3, 10_000, 1096),
        (5000, 1, 10_000, -904),
        (0, 0, 0, 1),  # an idle engine takes one, which waits for memory in the engine
        (1000, 1, 1000, 0),
        (1000, 1, 3000, 2000),
    ],
)
def test_claim_budget(claimed: int, held: int, free: int, expected: int) -> None:
    assert claim_budget(4096, claimed, held == 0, free) == expected


@pytest.mark.parametrize(
    ("held", "claimed", "free", "lockstep", "expected"),
    [
        (0, 0, 0, False, "idle"),
        (1, 0, 10_000, False, "busy"),
        (1, 0, 10_000, True, "idle"),  # it only sends
        (1, 0, 1000, True, "busy"),
        (1, 100, 10_000, False, "busy"),
        (1, 100, 10_000, True, "ahead"),
        (1, 4000, 10_000, True, "ahead"),  # a full step, and the one after it is not full
        (1, 4096, 10_000, True, "busy"),
        (1, 100, 2100, True, "busy"),  # memory for no batch more
    ],
)
def test_claims_as(held: int, claimed: int, free: int, lockstep: bool, expected: str) -> None:
    assert claims_as(held, claimed, 2048, free, lockstep) == expected


async def test_a_rank_that_could_claim_ahead_leaves_jobs_to_idle_ones(redis_server: EmbeddedRedis) -> None:
    """It has room for many more of them."""
    async with running_workers(redis_server, sim={"max_num_batched_tokens": 2048}) as workers:
        rank, _, frontend = await workers.pair()
        rank.agent._claims._info = msgspec.structs.replace(rank.info, lockstep=True)
        await rank.engine.call("pause_scheduler", [], {})
        computes = frontend.new([*range(1500)])
        await frontend.claimed(computes)
        idle = [await workers.start(Role.PREFILL) for _ in range(3)]
        for worker in idle:
            await frontend.meet(worker.info)
        requests = [frontend.new([i, *PROMPT], max_tokens=1) for i in range(12)]
        for request in requests:
            await asyncio.sleep(0.1)  # longer than WAIT_S in all: it has begun to wait anew
            await frontend.claimed(request)
            await frontend.finished(request)
        assert rank.id not in {request.claimed_by[0] for request in requests}
        await rank.engine.call("resume_scheduler", [], {})
        await frontend.finished(computes)


@pytest.mark.parametrize("why", ["its role", "no room", "it drains", "its end"])
async def test_a_worker_that_may_not_claim_any_more_is_told_of_no_job(workers: Workers, why: str) -> None:
    """It says so, and waits for no deadline: other workers are told of jobs at once."""
    worker, _, frontend = await workers.pair()

    async def waits() -> bool:
        return await workers.redis.zscore(f"{workers.queue.keys.prefix}waiters", worker.id) is not None

    async def waits_no_more() -> bool:
        return not await waits()

    claims = worker.agent._claims
    if why == "no room":
        claims._info = msgspec.structs.replace(worker.info, lockstep=True)
        await worker.engine.call("pause_scheduler", [], {})
        computes = frontend.new(PROMPT)
        await frontend.claimed(computes)
    await until(waits, "it waits for jobs")
    match why:
        case "its role":
            worker.agent.life.role = Role.DECODE
            claims.wake()
        case "no room":
            claims._info = msgspec.structs.replace(claims._info, max_num_seqs=1)
        case "it drains":
            await order_drain(workers.registry, worker.id)
        case "its end":
            worker.agent._ended.set()
    await until(waits_no_more, "it has left")
    if why == "no room":
        await worker.engine.call("resume_scheduler", [], {})
        await frontend.finished(computes)


def test_a_worker_that_only_decodes_claims_one_job_that_fits_beside_that() -> None:
    assert claim_limits(0, 4096, False, 20_000, 7) == (20_000, 1)
    assert claim_limits(0, 4096, False, 20_000, 0) == (20_000, 0)
    assert claim_limits(0, 4096, True, 20_000, 7) == claim_limits(1, 4096, False, 20_000, 7) == (4096, 7)


async def test_a_job_longer_than_the_budget_is_prefilled_alone(redis_server: EmbeddedRedis) -> None:
    async with running_workers(redis_server, sim={"max_num_batched_tokens": 64}) as workers:
        _, _, frontend = await workers.pair()
        requests = [frontend.new([i, *range(1000)]) for i in range(3)]
        await frontend.enqueue(*requests)
        await frontend.finished(*requests)


async def test_the_next_job_is_claimed_before_a_long_one_has_ended(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its chunks are computed there is room, which is used at once: an engine without claims would idle."""
    for name in ("WAIT_S", "LEFT_WAIT_S", "MEMORY_WAIT_S"):
        monkeypatch.setattr(f"workers.claims.{name}", 30.0)
    # There is room while the last chunk is computed, which takes a second.
    slow = {"speed": 1.0, "prefill_us_per_token": 5000.0, "max_num_batched_tokens": 200}
    async with running_workers(redis_server, sim=slow) as workers:
        _, _, frontend = await workers.pair(**slow)
        long, fits = frontend.new([*range(600)]), frontend.new(PROMPT[:150])
        await frontend.claimed(long)
        await frontend.claimed(fits)
        assert not long.got(Prefilled)
        await frontend.finished(long, fits)


async def test_waiting_job_is_claimed_once_it_fits(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WAIT_S", "LEFT_WAIT_S"):
        monkeypatch.setattr(f"workers.claims.{name}", 30.0)
    # Two seconds a prompt, in which the others are enqueued and one of them claimed.
    slow = {"speed": 1.0, "prefill_us_per_token": 8000.0, "max_num_batched_tokens": 200}
    async with running_workers(redis_server, sim=slow) as workers:
        _, _, frontend = await workers.pair(**slow)
        first, second, third = [frontend.new([i, *PROMPT[:249]]) for i in range(3)]
        await frontend.claimed(first)
        await frontend.enqueue(second, third)
        await until(lambda: second.got(Claimed))
        assert not first.got(Prefilled)
        await frontend.finished(first, second, third)


async def test_nothing_is_claimed_where_no_decode_worker_may_get_the_kv(redis_server: EmbeddedRedis) -> None:
    places = {name: {"timeout_s": 1.0, "drain_timeout_s": 5.0, "labels": {"rack": name}} for name in ("r1", "r2")}
    async with running_workers(redis_server, routing={"pairing": "strict:rack"}, workers=places["r1"]) as workers:
        decode = await workers.start(Role.DECODE)
        workers.tree["workers"] = places["r2"]
        far = await workers.start(Role.PREFILL)
        await until(lambda: not far.agent._may_claim(), "word that no decode worker is in r2")
        frontend = await workers.frontend(far, decode, binds_to=decode)
        request = frontend.new(PROMPT)
        await frontend.enqueue(request)
        workers.tree["workers"] = places["r1"]
        near = await workers.start(Role.PREFILL)
        await frontend.meet(near.info)
        await frontend.finished(request)
        assert request.claimed_by == [near.id]


async def test_a_corrupt_job_fails_alone(workers: Workers) -> None:
    _, _, frontend = await workers.pair()
    frames, request, good = frontend.new(PROMPT), frontend.new(PROMPT), frontend.new(PROMPT)
    await frontend.enqueue(frames, body=b"\xc1 no frames")
    await frontend.enqueue(request, body=b"\x91\xc4\x02\xc1\xc1")  # frames, but no request in them
    await frontend.enqueue(good)
    await frontend.finished(good)
    await until(lambda: frames.got(PrefillFailed) and request.got(PrefillFailed))
    assert frames.got(PrefillFailed).why.startswith("invalid: not a framed request")
    assert request.got(PrefillFailed).why.startswith("invalid: not an engine request")
    assert request.got(PrefillFailed).refused, "by its engine, as any other would"
    # Decode, already bound to it, computes by itself once told; here the test's frontend gives it up.
    for bad in (frames, request):
        if bad.decode:
            frontend.abort(bad.decode, bad)


@pytest.mark.parametrize("stage", ["claimed", "prefilled"])
async def test_abort_frees_both_sides(workers: Workers, stage: str) -> None:
    slow = {"speed": 1.0, "prefill_us_per_token": 200.0, "kv_bytes_per_token": 1_000_000, "link_gb_per_s": 1.0}
    prefill, decode, frontend = await workers.pair(**slow)
    request = frontend.new(PROMPT)
    await frontend.enqueue(request)
    await until(lambda: request.got(Claimed if stage == "claimed" else Prefilled))
    frontend.abort(prefill.id, request)
    frontend.abort(decode.id, request)
    await workers.assert_no_leaks()
    assert request.finish is None


async def test_abort_reaches_kv_that_nobody_has_fetched(redis_server: EmbeddedRedis) -> None:
    async with running_workers(redis_server, kv={"transfer_timeout_s": 600.0}) as workers:
        prefill, frontend = await workers.served(Role.PREFILL)
        request = frontend.new(PROMPT)
        await frontend.enqueue(request)
        await until(lambda: request.got(Prefilled))
        await until(lambda: frontend.loads[prefill.id].blocks_free < frontend.loads[prefill.id].blocks_total)
        frontend.abort(prefill.id, request)


async def test_a_claim_for_an_unknown_frontend_is_released(workers: Workers) -> None:
    """The frontend is registered, but has not greeted this worker: its job waits for a worker that it knows."""
    prefill, decode = await workers.start(Role.PREFILL), await workers.start(Role.DECODE)
    frontend = await workers.frontend(decode, binds_to=decode)
    request = frontend.new(PROMPT)
    await frontend.enqueue(request)
    while not (await workers.queue.depth()).claimed:
        await asyncio.sleep(0.005)
    await frontend.meet(prefill.info)
    await frontend.finished(request)


async def test_jobs_of_an_absent_frontend_hold_up_no_other(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.prefills.GREETING_TIMEOUT_S", 2 * DEADLINE_S)
    async with running_workers(redis_server, sim={"max_num_batched_tokens": 200}) as workers:
        prefill, decode, here = await workers.pair()
        absent = await workers.frontend(decode, binds_to=decode)
        theirs = [absent.new([i, *PROMPT]) for i in range(5)]  # one of them is all that the worker may claim
        await absent.enqueue(*theirs)
        request = here.new(PROMPT)
        await here.enqueue(request)
        await here.finished(request)
        await absent.meet(prefill.info)
        await absent.finished(*theirs)


async def test_frontend_that_was_waited_for_once_is_left_to_other_workers(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("workers.prefills.GREETING_TIMEOUT_S", 0.01)
    async with running_workers(redis_server) as workers:
        prefill, decode, here = await workers.pair()
        absent = await workers.frontend(decode, binds_to=decode)
        theirs = absent.new(PROMPT)
        await absent.enqueue(theirs)
        await until(lambda: "is not connected" in caplog.text)
        requests = [here.new([i, *PROMPT], max_tokens=1) for i in range(5)]
        for request in requests:
            await here.enqueue(request)
            await here.finished(request)
        assert caplog.text.count("is not connected") == 1
        other = await workers.start(Role.PREFILL)
        await absent.meet(other.info)
        await absent.finished(theirs)
        assert theirs.claimed_by == [other.id]


async def test_kill_of_the_prefill_worker_while_decode_waits(redis_server: EmbeddedRedis) -> None:
    slow = {"speed": 1.0, "prefill_us_per_token": 3000.0}
    async with running_workers(redis_server, sim=slow, kv={"transfer_timeout_s": 60.0}) as workers:
        prefill, decode = await workers.spawn(Role.PREFILL), await workers.start(Role.DECODE, speed=20.0)
        frontend = await workers.frontend(prefill, decode, binds_to=decode)
        request = frontend.new(PROMPT)
        await frontend.enqueue(request)
        await until(lambda: request.got(Claimed) and frontend.loads[decode.id].waiting == 1)
        prefill.kill()
        await frontend.finished(request)  # decode recomputed it, long before the transfer would time out
        assert not request.got(Prefilled)
        # Its lease runs out, the sweep of the one that is left returns the job to the queue, where the frontend,
        # whose request has ended, cancels it.
        while await frontend.queue.cancel(request.id, request.attempt) == "claimed":
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_claims_of_dead_worker_return_before_lease_end(workers: Workers) -> None:
    """Killed between claiming a job and telling its frontend, which waits for a claim and knows of none."""
    dies, decode = await workers.spawn(Role.PREFILL), await workers.start(Role.DECODE)
    frontend = await workers.frontend(decode, binds_to=decode)
    request = frontend.new(PROMPT)
    dies.kill(signal.SIGSTOP)
    await frontend.enqueue(request)
    held = PrefillQueue(workers.redis, workers.config.namespace, lease_s=600.0)
    assert [claim.job.request_id for claim in await claim_head(held, dies.id, 1000, 1)] == [request.id]
    other = await workers.start(Role.PREFILL)
    await frontend.meet(other.info)
    dies.kill()
    await frontend.finished(request)
    assert request.claimed_by[0] == other.id


@pytest.mark.slow
async def test_a_stopped_prefill_worker_loses_its_claim_to_another(redis_server: EmbeddedRedis) -> None:
    """SIGSTOP: leases run out, another worker takes the job over; woken up, the first one gives way."""
    slow = {"speed": 1.0, "prefill_us_per_token": 2000.0}
    async with running_workers(redis_server, sim=slow) as workers:
        first = await workers.spawn(Role.PREFILL)
        decode = await workers.start(Role.DECODE, speed=20.0)
        frontend = await workers.frontend(first, decode)
        request = frontend.new(PROMPT)
        claim = await frontend.claimed(request)
        first.kill(signal.SIGSTOP)
        second = await workers.start(Role.PREFILL, speed=20.0)
        await frontend.meet(second.info)
        await until(lambda: second.id in request.claimed_by)
        claims = [event for event in request.events if isinstance(event, Claimed)]
        again = claims[request.claimed_by.index(second.id)]
        assert again.kv_source.key != claim.kv_source.key  # the two deliveries cannot be mistaken for each other
        frontend.submit_to(decode.id, request, again.kv_source)
        await frontend.finished(request)
        first.kill(signal.SIGCONT)
        # As the router answers a claim that it does not want.
        frontend.abort(first.id, request)


async def test_a_draining_prefill_worker_hands_over_what_it_computed(workers: Workers) -> None:
    slow = {"speed": 1.0, "kv_bytes_per_token": 1_000_000, "link_gb_per_s": 1.0}
    prefill, decode = await workers.start(Role.PREFILL, **slow), await workers.start(Role.DECODE)
    frontend = await workers.frontend(prefill, decode, binds_to=decode)
    request = frontend.new(PROMPT)
    await frontend.claimed(request)
    await order_drain(workers.registry, prefill.id)
    assert await prefill.stopped() == 0
    await frontend.finished(request)
    assert request.got(Prefilled)
    assert (await decode.engine.load()).kv.failures == 0  # the push, 300 ms long, was waited for


async def test_prefills_left_at_drain_deadline_are_given_back(redis_server: EmbeddedRedis) -> None:
    slow = {"speed": 1.0, "prefill_us_per_token": 20_000.0}
    async with running_workers(redis_server, workers={"drain_timeout_s": 0.2}) as workers:
        prefill, decode = await workers.start(Role.PREFILL, **slow), await workers.start(Role.DECODE)
        frontend = await workers.frontend(prefill, decode, binds_to=decode)
        request = frontend.new(PROMPT)
        await frontend.claimed(request)
        await order_drain(workers.registry, prefill.id)
        failed = await until(lambda: request.got(PrefillFailed))
        assert failed.why == "drained"
        await frontend.finished(request)  # decode was told through the KV link, and computed it


@pytest.mark.parametrize("how", [FinishReason.ERROR, FinishReason.ABORT, AdapterUnavailable, AdapterLate])
async def test_a_prefill_that_its_engine_failed_on_is_told_from_one_that_was_given_up(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, how: FinishReason | type[AdapterUnavailable]
) -> None:
    """`how`: its engine ended it, or could not take it."""
    prefill, frontend = await workers.served(Role.PREFILL, speed=1.0, prefill_us_per_token=20_000.0)
    submitted = asyncio.Event()

    async def submit(request: EngineRequest) -> None:
        submitted.set()
        if not isinstance(how, FinishReason):
            raise how("its adapter")

    monkeypatch.setattr(prefill.engine, "submit", submit)
    request = frontend.new(PROMPT)
    await frontend.enqueue(request)
    await submitted.wait()
    if isinstance(how, FinishReason):
        (attempt,) = prefill.agent._attempts.prefills()
        output = WireOutput(attempt.key, [], finish_reason=how)
        await prefill.agent._serving.deliver(EngineStep([output], None, 0.0))
    failed = await until(lambda: request.got(PrefillFailed))
    assert failed.by_engine is (how in (FinishReason.ERROR, AdapterUnavailable)) and not failed.refused


@pytest.mark.slow
async def test_redis_lost_its_data_while_a_prefill_runs(workers: Workers) -> None:
    _, _, frontend = await workers.pair(speed=1.0, prefill_us_per_token=2000.0)
    request = frontend.new(PROMPT)
    await frontend.claimed(request)
    for key in await workers.redis.execute_command("KEYS", f"{workers.queue.keys.prefix}*"):
        await workers.redis.execute_command("DEL", key)
    await frontend.finished(request)
    assert request.got(Prefilled)  # 0.6 s of work, across renewals that found nothing, were not thrown away


async def test_prefilled_job_that_redis_hands_out_again_is_acknowledged(redis_server: EmbeddedRedis) -> None:
    """A replica that took over knows neither the claim nor its end. The engine has the key while it holds the KV."""
    async with running_workers(redis_server, kv={"transfer_timeout_s": 600.0}) as workers:
        prefill, frontend = await workers.served(Role.PREFILL)
        request, other = frontend.new(PROMPT), frontend.new([1, *PROMPT])
        for _ in range(2):
            await frontend.enqueue(request)
            await until(lambda: request.got(Prefilled))
            while (await workers.queue.states([request.id]))[request.id] is not JobState.ABSENT:
                await asyncio.sleep(0.01)
        await frontend.enqueue(other)
        await until(lambda: other.got(Prefilled))
        assert [type(event) for event in request.events] == [Claimed, Prefilled]
        for done in (request, other):
            frontend.abort(prefill.id, done)


async def test_a_retried_request_is_prefilled_again(workers: Workers) -> None:
    _, decode, frontend = await workers.pair(speed=1.0, prefill_us_per_token=300.0)
    request = frontend.new(PROMPT)
    await frontend.claimed(request)
    frontend.abort(decode.id, request)
    request.attempt, request.decode, request.events = 2, "", []
    await frontend.enqueue(request)  # replaces the first attempt, which still computes
    await frontend.finished(request)


async def test_an_older_attempt_that_redis_hands_out_again_ends_no_newer_one(workers: Workers) -> None:
    """As one does that was restored from a snapshot. Nobody would tell the frontend of the newer one's end."""
    _, _, frontend = await workers.pair(speed=1.0, prefill_us_per_token=1000.0)
    request = frontend.new(PROMPT)
    request.attempt = 2
    await frontend.claimed(request)
    await workers.redis.execute_command("DEL", f"{workers.queue.keys.prefix}job:{request.id}")
    request.attempt = 1
    await frontend.enqueue(request)
    request.attempt = 2

    async def left() -> bool:
        return (await workers.queue.states([request.id]))[request.id] is JobState.ABSENT

    await until(left, "the older attempt's job left the queue")
    await frontend.finished(request)
    assert request.got(Prefilled)


async def test_jobs_with_too_many_deliveries_fail_at_frontend(workers: Workers) -> None:
    decode, frontend = await workers.served(Role.DECODE)
    request = frontend.new(PROMPT)
    await frontend.enqueue(request)
    short = PrefillQueue(workers.redis, workers.config.namespace, lease_s=0.2)
    for number in range(MAX_DELIVERIES):
        await until(lambda dies=f"dies-{number}": claim_head(short, dies, 1000, 1), "it is claimed")
    failed = await until(lambda: request.got(PrefillFailed))
    assert failed.why == "its claims died too often"
