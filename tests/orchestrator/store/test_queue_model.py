"""The queue against a model in plain Python: any order of transitions, the same answers."""

import asyncio
import itertools

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support_redis import (
    assert_no_leaks,
    claim_head,
    expire_lease,
    fresh_namespace,
    job,
)

from orchestrator.store.client import connect
from orchestrator.store.operator.shown import peek
from orchestrator.store.queue import PrefillQueue, QueueFull
from orchestrator.types import QueueDepth

IDS = st.sampled_from(["a", "b", "c", "d", "e", "f"])
WORKERS = st.sampled_from(["w1", "w2"])
MAX_REQUESTS, MAX_DELIVERIES = 4, 2


class Job:
    def __init__(self, attempt, tokens, place, cached):
        self.attempt, self.tokens, self.place, self.cached = attempt, tokens, place, cached
        self.holder, self.deliveries, self.expired = None, 0, False


class QueueMachine(RuleBasedStateMachine):
    url = ""

    @initialize()
    def start(self):
        self.runner = asyncio.Runner()
        self.namespace = fresh_namespace()
        self.redis = self.do(connect(self.url, 5.0))
        # The place is the arrival, which the model knows as an order.
        bounds: dict[str, int] = {"max_jobs": MAX_REQUESTS, "max_deliveries": MAX_DELIVERIES}
        self.queue = PrefillQueue(self.redis, self.namespace, lease_s=30.0, **bounds)
        self.do(self.redis.hset(self.queue.keys.frontend("f1"), "pid", 1))
        self.do(self.redis.hset(self.queue.keys.worker("w2"), mapping={"role": "prefill", "state": "ready"}))
        self.jobs: dict[str, Job] = {}
        self.places = itertools.count()

    def do(self, work):
        async def main():
            return await work

        return self.runner.run(main())

    def waiting(self):
        found = [(known.place, request_id) for request_id, known in self.jobs.items() if known.holder is None]
        return [request_id for _, request_id in sorted(found)]

    @rule(request_id=IDS, attempt=st.integers(1, 3), tokens=st.integers(0, 500), cached=st.booleans())
    def enqueue(self, request_id, attempt, tokens, cached):
        cached = cached and tokens > 0
        known, place = self.jobs.get(request_id), next(self.places)
        expected = "queued"
        if known and known.attempt >= attempt:
            expected = "known"
        else:
            if known:
                place = known.place
                del self.jobs[request_id]
            if len(self.waiting()) >= MAX_REQUESTS:
                expected = "full"
        try:
            new = job(request_id, tokens, attempt)
            self.do(self.queue.enqueue(msgspec.structs.replace(new, cached={"w2": 1} if cached else {})))
            assert expected != "full"
        except QueueFull:
            assert expected == "full"
        if expected == "queued":
            self.jobs[request_id] = Job(attempt, tokens, place, cached)

    @rule(worker=WORKERS, max_tokens=st.integers(-5, 1500), max_jobs=st.integers(0, 5))
    def claim(self, worker, max_tokens, max_jobs):
        expected, used = [], 0
        for request_id in self.waiting():
            known = self.jobs[request_id]
            cost = max(1, known.tokens)
            if used >= max_tokens or len(expected) >= max_jobs or (expected and used + cost > max_tokens):
                break
            expected.append(request_id)
            used += cost
        self.claimed(worker, expected, self.do(claim_head(self.queue, worker, max_tokens, max_jobs)))

    @rule(worker=WORKERS, window=st.integers(1, 5), chosen=st.lists(IDS, unique=True))
    def claim_from_a_window(self, worker, window, chosen):
        """Of what waits now, and of what waited a moment ago."""
        waiting = self.waiting()
        affine = any(self.jobs[request_id].cached for request_id in waiting[:window])
        claims, seen = self.do(self.queue.claim(worker, 1, 1, window, "idle"))
        assert [known.request_id for known in seen] == (waiting[:window] if affine else [])
        self.claimed(worker, [] if affine else waiting[:1], claims)
        expected = [request_id for request_id in chosen if request_id in self.waiting()]
        self.claimed(worker, expected, self.do(self.queue.claim_chosen(worker, chosen)))

    def claimed(self, worker, expected, claims):
        assert [claim.job.request_id for claim in claims] == expected
        for claim in claims:
            known = self.jobs[claim.job.request_id]
            known.holder, known.expired, known.deliveries = worker, False, known.deliveries + 1
            assert (claim.job.attempt, claim.job.tokens, claim.job.deliveries) == (
                known.attempt,
                known.tokens,
                known.deliveries,
            )

    @rule(worker=WORKERS, request_id=IDS, attempt=st.integers(1, 3))
    def ack(self, worker, request_id, attempt):
        known = self.jobs.get(request_id)
        mine = known is not None and known.holder == worker and known.attempt == attempt
        assert self.do(self.queue.ack(worker, request_id, attempt)) == mine
        if mine:
            del self.jobs[request_id]

    @rule(worker=WORKERS, request_id=IDS, attempt=st.integers(1, 3))
    def release(self, worker, request_id, attempt):
        known = self.jobs.get(request_id)
        mine = known is not None and known.holder == worker and known.attempt == attempt
        assert self.do(self.queue.release(worker, request_id, attempt)) == mine
        if mine:
            known.holder, known.deliveries = None, known.deliveries - 1

    @rule(worker=WORKERS, request_ids=st.lists(IDS, unique=True))
    def renew(self, worker, request_ids):
        held = [name for name in request_ids if name in self.jobs and self.jobs[name].holder == worker]
        assert self.do(self.queue.renew(worker, request_ids)) == [name for name in request_ids if name not in held]
        for name in held:
            self.jobs[name].expired = False

    @rule(request_id=IDS, attempt=st.integers(1, 3))
    def cancel(self, request_id, attempt):
        known = self.jobs.get(request_id)
        expected = "absent"
        if known and known.attempt <= attempt:
            expected = "claimed" if known.holder else "waiting"
            del self.jobs[request_id]
        assert self.do(self.queue.cancel(request_id, attempt)) == expected

    @precondition(lambda self: any(known.holder for known in self.jobs.values()))
    @rule(data=st.data())
    def expire(self, data):
        held = sorted(request_id for request_id, known in self.jobs.items() if known.holder)
        request_id = data.draw(st.sampled_from(held))
        self.do(expire_lease(self.redis, self.queue, request_id))
        self.jobs[request_id].expired = True

    @rule()
    def sweep(self):
        returned, failed = set(), set()
        for request_id, known in list(self.jobs.items()):
            if known.holder and known.expired and known.deliveries >= MAX_DELIVERIES:
                failed.add((request_id, known.attempt, "f1"))
                del self.jobs[request_id]
            elif known.holder and known.expired:
                returned.add(request_id)
                known.holder, known.expired = None, False
        result = self.do(self.queue.sweep())
        assert (set(result.returned), set(result.failed), result.orphaned) == (returned, failed, [])

    @invariant()
    def the_books_balance(self):
        if not hasattr(self, "jobs"):
            return
        waiting = self.waiting()
        tokens = sum(self.jobs[request_id].tokens for request_id in waiting)
        assert self.do(self.queue.depth()) == QueueDepth(len(waiting), tokens, len(self.jobs) - len(waiting))
        assert [row["id"] for row in self.do(peek(self.queue, 100))] == waiting

    def teardown(self):
        for request_id in list(self.jobs):
            self.do(self.queue.cancel(request_id, 9))
        self.do(assert_no_leaks(self.redis, self.namespace))
        self.do(self.redis.aclose())
        self.runner.close()


@pytest.mark.slow
def test_any_order_of_transitions_matches_the_model(server):
    QueueMachine.url = server.url
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
