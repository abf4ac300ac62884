"""The queue against a model in plain Python: any order of transitions, the same answers."""

import asyncio
import itertools
import time

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
from support_wait import until

from orchestrator.process.tasks import cancelled, set_whenever
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


class Machine(RuleBasedStateMachine):
    """A queue with the frontend of its jobs. The place of a job is its arrival, which the models know as an order."""

    url = ""

    def begin(self, **bounds):
        self.runner, self.namespace = asyncio.Runner(), fresh_namespace()
        self.redis = self.do(connect(self.url, 5.0))
        self.queue = PrefillQueue(self.redis, self.namespace, **bounds)
        self.do(self.redis.hset(self.queue.keys.frontend("f1"), "pid", 1))

    def do(self, work):
        async def main():
            return await work

        return self.runner.run(main())

    def close(self, *request_ids):
        for request_id in request_ids:
            self.do(self.queue.cancel(request_id, 9))
        self.do(assert_no_leaks(self.redis, self.namespace))
        self.do(self.redis.aclose())
        self.runner.close()


class QueueMachine(Machine):
    @initialize()
    def start(self):
        self.begin(lease_s=30.0, max_jobs=MAX_REQUESTS, max_deliveries=MAX_DELIVERIES)
        self.do(self.redis.hset(self.queue.keys.worker("w2"), mapping={"role": "prefill", "state": "ready"}))
        self.jobs: dict[str, Job] = {}
        self.places = itertools.count()

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
        held = {
            worker: {name for name, known in self.jobs.items() if known.holder == worker} for worker in ("w1", "w2")
        }
        assert self.do(self.claims()) == held

    async def claims(self):
        """Of each worker: what a frontend looks up when one falls silent."""
        return {worker: set(await self.queue.claims_of(worker)) for worker in ("w1", "w2")}

    def teardown(self):
        self.close(*self.jobs)


NAMES = ["a", "b", "c"]
IDLE, LEFT, ROOM, ALL = 1, 2, 3, 4


class WaitersMachine(Machine):
    """Who is told of which job: workers that are idle, ahead or busy claim, wait, leave, are late and die; jobs come,
    some with a prefix that some have cached, and come back. Time passes where a rule says so."""

    @initialize()
    def start(self):
        self.begin(lease_s=600.0)
        self.prefix = self.queue.keys.prefix
        self.workers = {name: PrefillQueue(self.redis, self.namespace, name, lease_s=600.0) for name in NAMES}
        self.listening: dict[str, asyncio.Task[None]] = {}
        for name in NAMES:
            self.do(self.hears(name, True))
        self.jobs: dict[str, tuple[int, dict[str, int]]] = {}  # that wait, in order: tokens, and who has what cached
        self.held: dict[str, tuple[int, str, tuple[int, dict[str, int]]]] = {}  # by whom, and which place they had
        self.places: dict[str, int] = {}
        self.waiters: dict[str, tuple[int, float, int]] = {}  # part of the order, when it is done, since when
        self.late, self.told, self.coming = set[str](), set[str](), set[str]()
        self.numbers, self.excused = itertools.count(), False

    async def hears(self, name, lives):
        if lives:
            told = self.redis.listen(self.queue.keys.wake(name))
            self.listening[name] = asyncio.create_task(set_whenever(self.workers[name]._woken, told))
        else:
            await cancelled(self.listening.pop(name))
        channel = self.queue.keys.wake(name)

        async def settled():
            return (await self.redis.execute_command("PUBSUB", "NUMSUB", channel))[1] == int(lives)

        await until(settled, f"{name} lives: {lives}")

    # ---- the model -----------------------------------------------------------------------------------------------

    def forget(self, name):
        self.waiters.pop(name, None)
        self.late.discard(name)

    def comes(self, name):
        self.forget(name)
        self.told.discard(name)
        self.coming.discard(name)

    def tell(self, name):
        if name not in self.waiters or name in self.late:
            return False
        part = self.waiters[name][0]
        self.forget(name)
        if name not in self.listening:
            return False
        self.coming.add(name)
        self.excused = False
        if part == 0:
            self.told.add(name)
        return True

    def tell_first(self, last, first=0):
        if self.told:
            last = IDLE
        for name in sorted(self.waiters, key=self.waiters.__getitem__):
            if name not in self.late and first <= self.waiters[name][0] < last and self.tell(name):
                return True
        return False

    def wake(self, cached):
        wanted = sorted(cached, key=lambda name: -cached[name])
        if not any(self.tell(name) for name in wanted):
            self.tell_first(ALL)

    def pass_on(self, last, first=0):
        return bool(self.jobs) and self.tell_first(last, first)

    def idle_ones(self):
        return len(self.told) + sum(part == 0 for name, (part, *_) in self.waiters.items() if name not in self.late)

    def waits(self, name, claimer, left, done_s):
        self.forget(name)
        self.waiters[name] = ((0 if claimer == "idle" else 2) + left, done_s, next(self.numbers))

    # ---- what happens --------------------------------------------------------------------------------------------

    @rule(
        wave=st.lists(st.sampled_from([50, 100, 300]), min_size=1, max_size=3),
        cached=st.dictionaries(st.sampled_from([*NAMES, "gone"]), st.sampled_from([10, 20, 30]), max_size=2),
    )
    def enqueue(self, wave, cached):
        if len(set(cached.values())) < len(cached):
            return  # no order between them
        for tokens in wave:
            request_id = f"r{next(self.numbers)}"
            self.do(self.queue.enqueue(msgspec.structs.replace(job(request_id, tokens), cached=cached)))
            self.jobs[request_id], self.places[request_id] = (tokens, cached), next(self.numbers)
            self.wake(cached)
            self.who_was_told()

    def who_was_told(self):
        """They have all the time to come."""
        if told := self.do(self.redis.zrange(f"{self.prefix}told", 0, -1)):
            self.do(self.redis.zadd(f"{self.prefix}told", dict.fromkeys(told, time.time() + 30)))
        return {name.decode() for name in told}

    @rule(
        name=st.sampled_from(NAMES),
        claimer=st.sampled_from(["idle", "ahead", "busy"]),
        budget=st.sampled_from([50, 400]),
        most=st.integers(1, 2),
        done=st.integers(0, 1),
    )
    def claim(self, name, claimer, budget, most, done):
        if name not in self.listening:
            return
        came, worker = name in self.coming, self.workers[name]
        self.comes(name)
        others, idle, waiting = self.idle_ones(), claimer == "idle", sum(tokens for tokens, _ in self.jobs.values())
        left, to_idle = budget, bool(others)
        if others and idle:
            left = min(budget, max(1, -(-waiting // (others + 1))))
        elif others:
            to_idle = self.pass_on(IDLE) or bool(self.idle_ones())
            left = 0 if to_idle else budget
        took: list[str] = []
        for request_id, (tokens, _) in self.jobs.items():
            if left <= 0 or len(took) == most or (tokens > left and (took or claimer == "busy")):
                break
            took.append(request_id)
            left -= tokens
        worker.done_s = (1000.0 * done, 0.0)
        claims, _ = self.do(worker.claim(name, budget, most, 0, claimer, 50.0))
        assert [claim.job.request_id for claim in claims] == took
        for request_id in took:
            self.held[request_id] = (self.places[request_id], name, self.jobs.pop(request_id))
        room = (left > 0 and len(took) < most) or (not took and left <= 0)
        if not self.jobs and room:
            self.waits(name, "busy" if idle and took else claimer, False, 1000.0 * done)
        assert worker.waits == (name in self.waiters)
        if took:
            self.pass_on(ROOM)
        elif not to_idle:
            self.pass_on(ROOM, first=LEFT)
        self.excused |= came and not took and not self.coming

    @rule(
        name=st.sampled_from(NAMES),
        claimer=st.sampled_from(["idle", "busy"]),
        left=st.booleans(),
        done=st.integers(0, 1),
    )
    def wait(self, name, claimer, left, done):
        """Right after a claim."""
        if name not in self.listening or name in self.coming | self.waiters.keys():
            return
        args = (name, 50.0, claimer, int(left), 1000.0 * done)
        expected = bool(self.jobs) and not left
        assert self.do(self.queue.call("wait", *args)) == int(expected)
        if not expected:
            self.waits(name, claimer, left, 1000.0 * done)

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name):
        if name in self.listening:
            self.workers[name]._listed = True
            self.do(self.workers[name].leave())
            self.comes(name)
            self.pass_on(ROOM)

    @rule(name=st.sampled_from(NAMES))
    def die_or_start(self, name):
        lives = name not in self.listening
        self.do(self.hears(name, lives))
        self.excused |= name in self.coming
        self.coming.discard(name)

    @rule(name=st.sampled_from(NAMES))
    def be_late(self, name):
        if name in self.waiters:
            self.late.add(name)
            self.do(self.redis.zadd(f"{self.prefix}waits_until", {name: 1.0}))
        if name in self.told:
            self.told.discard(name)
            self.do(self.redis.zrem(f"{self.prefix}told", name))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), gives_back=st.booleans())
    def end(self, data, gives_back):
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        self.places[request_id], name, known = self.held.pop(request_id)
        assert self.do((self.queue.release if gives_back else self.queue.ack)(name, request_id, 1))
        if gives_back:
            self.jobs[request_id] = known
            self.jobs = dict(sorted(self.jobs.items(), key=lambda item: self.places[item[0]]))
            self.wake(known[1])

    @invariant()
    def those_that_wait_and_were_told_are_as_in_the_model(self):
        if not hasattr(self, "jobs"):
            return
        assert self.who_was_told() == self.told
        order = [name.decode() for name in self.do(self.redis.zrange(f"{self.prefix}waiters", 0, -1))]
        live = [name for name in sorted(self.waiters, key=self.waiters.__getitem__) if name not in self.late]
        assert [name for name in order if name not in self.late] == live
        assert [row["id"] for row in self.do(peek(self.queue, 100))] == list(self.jobs)

    @invariant()
    def no_job_waits_for_a_worker_that_waits_for_a_job(self):
        """While one waits that has not left what waits, another has been told and will come: unless who was told died,
        or came and took nothing."""
        if not hasattr(self, "jobs") or not self.jobs:
            self.excused = False
            return
        free = [name for name, (part, *_) in self.waiters.items() if part % 2 == 0 and name in self.listening]
        assert self.coming or self.excused or not set(free) - self.late

    def teardown(self):
        for name in list(self.listening):
            self.do(self.hears(name, False))
        self.do(self.redis.delete(f"{self.prefix}told"))
        self.close(*self.jobs, *self.held)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [QueueMachine, WaitersMachine])
def test_any_order_of_transitions_matches_the_model(server, machine):
    machine.url = server.url
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )
