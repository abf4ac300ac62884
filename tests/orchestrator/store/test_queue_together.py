"""The queue with many at once, with a server that dies, and waiting for work."""

import asyncio
import collections
import os
import random
import signal
import time

import msgspec
import pytest
from support_redis import (
    assert_no_leaks,
    claim_head,
    expire_lease,
    fresh_namespace,
    job,
)
from support_wait import until

from orchestrator.policy.claims import choose_claims
from orchestrator.store.client import RedisAway, connect
from orchestrator.store.keys import Keys
from orchestrator.store.operator.shown import peek, show
from orchestrator.store.queue import MAX_DELIVERIES, PrefillQueue
from orchestrator.types import QueueDepth

ALL = 10**9


@pytest.fixture
async def queues(server):
    """Makes queues with connections of their own, as processes have them."""
    made, namespace = [], fresh_namespace()

    async def make(waiter="", max_deliveries=MAX_DELIVERIES, **changes):
        redis = await connect(server.url, 2.0)
        made.append(
            (
                PrefillQueue(redis, namespace, waiter, max_deliveries=max_deliveries, **{"lease_s": 30.0} | changes),
                redis,
            )
        )
        return made[-1][0]

    make.redis = await connect(server.url, 5.0)
    make.namespace = namespace
    await make.redis.hset(f"pd:{{{namespace}}}:frontend:f1", "pid", 1)
    yield make
    for queue, redis in made:
        await queue.aclose()
        await redis.aclose()
    await make.redis.aclose()


async def test_claimers_that_choose_from_one_window_share_nothing(queues):
    total, handed, lost = 400, collections.Counter(), 0
    producer, names = await queues(), [f"w{number}" for number in range(6)]
    for name in names:
        await queues.redis.hset(producer.keys.worker(name), mapping={"role": "prefill", "state": "ready"})
    for number in range(total):
        home = {names[number % len(names)]: 50} if number % 3 else {}
        await producer.enqueue(msgspec.structs.replace(job(f"r{number}"), cached=home))

    async def consume(name):
        nonlocal lost
        mine = await queues()
        while sum(handed.values()) < total:
            claims, window = await mine.claim(name, 300, 5, 32, "idle")
            if window:
                chosen = choose_claims(window, 300, True, 0.001)
                claims = await mine.claim_chosen(name, chosen)
                lost += len(chosen) - len(claims)
            for claim in claims:
                handed[claim.job.request_id] += 1
                assert await mine.ack(name, claim.job.request_id, 1)

    await asyncio.gather(*(consume(name) for name in names))
    assert len(handed) == total and set(handed.values()) == {1}
    assert lost > 0, "races were lost, and cost nothing"
    assert await producer.depth() == QueueDepth(0, 0, 0)
    await assert_no_leaks(queues.redis, queues.namespace)


async def test_workers_that_die_with_their_claims_cost_nothing_but_time(queues):
    total, acked, random_ = 300, collections.Counter(), random.Random(7)
    queue = await queues(max_deliveries=1000)
    for number in range(total):
        await queue.enqueue(job(f"r{number}", 10))

    async def consume(name):
        mine = await queues(max_deliveries=1000)
        while len(acked) < total:
            for claim in await claim_head(mine, name, 100, 10):
                if random_.random() < 0.3:
                    await expire_lease(queues.redis, mine, claim.job.request_id)  # dies here
                elif await mine.ack(name, claim.job.request_id, 1):
                    acked[claim.job.request_id] += 1
            result = await mine.sweep()
            assert not result.failed and not result.orphaned

    await asyncio.gather(*(consume(f"w{number}") for number in range(6)))
    assert len(acked) == total and set(acked.values()) == {1}, "acknowledged exactly once each"
    await assert_no_leaks(queues.redis, queues.namespace)


async def test_many_sweepers_return_each_job_once(queues):
    queue = await queues()
    names = [f"r{number}" for number in range(250)]
    for name in names:
        await queue.enqueue(job(name))
    assert len(await claim_head(queue, "w", ALL, 256)) == 250
    await expire_lease(queues.redis, queue, *names)
    sweepers = [await queues() for _ in range(8)]
    results = await asyncio.gather(*(sweeper.sweep() for sweeper in sweepers))
    returned = [request_id for result in results for request_id in result.returned]
    assert sorted(returned) == sorted(names)
    assert await queue.depth() == QueueDepth(250, 25_000, 0)
    assert [claim.job.request_id for claim in await claim_head(queue, "w", ALL, 256)] == names, "at their old places"


async def test_retries_racing_with_acks_leave_one_answer(queues):
    queue, other = await queues(), await queues()
    for number in range(100):
        name = f"r{number}"
        await queue.enqueue(job(name))
        await claim_head(queue, "w", ALL, 1)
        acked, _ = await asyncio.gather(queue.ack("w", name, 1), other.enqueue(job(name, attempt=2)))
        claims = await claim_head(queue, "w", ALL, 1)
        assert [claim.job.attempt for claim in claims] == [2], f"acked={acked}"
        assert await queue.ack("w", name, 2)
    await assert_no_leaks(queues.redis, queues.namespace)


# ---- waiting ---------------------------------------------------------------------------------------------------


async def waits(queue, timeout_s=10.0):
    """How long `wait_for_work` took, once its first, spurious wake-up (a new subscription) is over."""
    started = time.monotonic()
    await queue.wait_for_work(timeout_s)
    return time.monotonic() - started


async def waiters(queues):
    """How many are registered, idle or busy."""
    return await queues.redis.zcard(f"{Keys(queues.namespace).prefix}waiters")


async def wait_idle(queues, *names, until_s=60.0):
    """As if these were idle and waited, whom nobody reaches; for so long from now."""
    prefix, now = Keys(queues.namespace).prefix, time.time()
    await queues.redis.zadd(f"{prefix}waiters", dict.fromkeys(names, now))
    await queues.redis.zadd(f"{prefix}waits_until", dict.fromkeys(names, now + until_s))


async def order_of(queues):
    """Those that wait, in the order in which they are told."""
    return [name.decode() for name in await queues.redis.zrange(f"{Keys(queues.namespace).prefix}waiters", 0, -1)]


async def waiting_are(queues, number):
    """Until that many waiters are registered."""

    async def registered():
        return await waiters(queues) >= number

    await until(registered, f"{number} waiters")


async def test_job_between_claim_and_wait_wakes_worker(queues):
    queue, other = await queues(), await queues()
    await queue.wait_for_work(10)
    assert await claim_head(queue, "w", ALL, 1) == []
    await other.enqueue(job("a"))
    assert await waits(queue, 30) < 15


async def test_claimer_with_room_is_registered_as_waiting(queues):
    queue, other = await queues(), await queues()
    await queue.wait_for_work(10)
    await other.enqueue(job("a", tokens=5))
    claims, _ = await queue.claim("w", 10, 2, 32, "idle", 60)
    assert [claim.job.request_id for claim in claims] == ["a"]
    assert queue.waits and await waiters(queues) == 1
    await other.enqueue(job("b", tokens=5))
    assert await waits(queue, 30) < 15
    assert not queue.waits and await waiters(queues) == 0


async def wakes(queues, *names):
    """`names` as (name, how it claims, and True where it leaves what waits); they wait in this order. Returns their
    tasks by name."""
    tasks = {}
    for name, *how in names:
        queue = await queues(waiter=name)
        await queue.wait_for_work(10, *how)  # the subscription is new
        tasks[name] = asyncio.create_task(queue.wait_for_work(50 - len(tasks), *how), name=name)
        await waiting_are(queues, len(tasks))
    return tasks


async def first_of(tasks):
    done, _ = await asyncio.wait(tasks.values(), timeout=15, return_when=asyncio.FIRST_COMPLETED)
    [first] = done
    return tasks.pop(first.get_name()) and first.get_name()


async def end(tasks):
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


async def test_idle_workers_with_prefix_are_woken_first(queues):
    tasks = await wakes(queues, ("busy", "busy"), ("idle", "idle"), ("home", "busy"), ("second", "idle"))
    producer = await queues()
    await producer.enqueue(msgspec.structs.replace(job("a"), cached={"second": 10, "absent": 90, "home": 80}))
    assert await first_of(tasks) == "home"
    await producer.enqueue(job("b"))
    assert await first_of(tasks) == "idle"
    await producer.enqueue(job("c"))
    assert await first_of(tasks) == "second"
    await queues.redis.delete(f"{producer.keys.prefix}told")  # they should have come
    await producer.enqueue(job("d"))
    assert await first_of(tasks) == "busy"


async def test_job_left_by_busy_worker_wakes_idle_one(queues):
    leaver, producer = await queues(), await queues()
    await producer.enqueue(job("a"))
    tasks = await wakes(queues, ("busy", "busy", True), ("other", "busy", True))
    assert await leaver.claim_chosen("w", []) == []
    assert await waiters(queues) == 2, "they would leave it too"
    await end(tasks)
    await producer.cancel("a", 1)
    tasks = await wakes(queues, ("idler", "idle"))
    await queues.redis.zadd(producer.keys.queue, {"a": 1.0})
    assert await leaver.claim_chosen("w", []) == []
    assert await first_of(tasks) == "idler"


async def test_a_wave_is_shared_among_idle_workers(queues):
    queue = await queues(waiter="a")
    for number in range(6):
        await queue.enqueue(job(f"r{number}", tokens=100))
    prefix, later = Keys(queues.namespace).prefix, time.time() + 60
    await queues.redis.zadd(f"{prefix}told", {"a": later, "b": later, "late": 1.0})
    await wait_idle(queues, "gone", until_s=-1)
    await wait_idle(queues, "c")
    claims, _ = await queue.claim("a", ALL, 9, 32, "idle", wait_s=60)
    assert [claim.job.request_id for claim in claims] == ["r0", "r1"] and queue.share_tokens == 200
    assert await queue.claim("a", ALL, 9, 32, "busy", wait_s=60) == ([], []) and not queue.waits
    other = await queues(waiter="b")
    await queues.redis.zadd(f"{prefix}told", {"c": later})
    claims, _ = await other.claim("b", ALL, 9, 0, "idle", wait_s=60)
    assert [claim.job.request_id for claim in claims] == ["r2", "r3"]
    last = await queues(waiter="c")
    claims, _ = await last.claim("c", ALL, 9, 32, "idle", wait_s=60)
    assert [claim.job.request_id for claim in claims] == ["r4", "r5"] and last.share_tokens is None


async def test_a_rank_that_claims_ahead_leaves_jobs_to_idle_ones_and_waits_behind_them(queues):
    queue, told = await queues(waiter="ahead"), f"{Keys(queues.namespace).prefix}told"
    await queue.enqueue(job("r", tokens=100))
    await queues.redis.zrem(queue.keys.queue, "r")
    tasks = await wakes(queues, ("idler", "idle"))
    await queues.redis.zadd(queue.keys.queue, {"r": 1.0})
    assert await queue.claim("ahead", 10, 9, 0, "ahead", wait_s=60) == ([], []) and not queue.waits
    assert await first_of(tasks) == "idler" and await queues.redis.zrange(told, 0, -1) == [b"idler"]
    await queues.redis.zadd(told, {"idler": time.time() + 30})
    assert await queue.claim("ahead", 10, 9, 0, "ahead", wait_s=60) == ([], []) and not queue.waits
    await queues.redis.delete(told)
    claims, _ = await queue.claim("ahead", 10, 9, 0, "ahead", wait_s=60)
    assert [claim.job.request_id for claim in claims] == ["r"], "larger than what it has room for"
    await queue.claim("ahead", ALL, 9, 0, "ahead", wait_s=60)
    assert queue.waits and queue.share_tokens is None
    await wait_idle(queues, "later")
    assert await order_of(queues) == ["later", "ahead"]


async def test_of_busy_ranks_the_one_that_is_done_first_is_told_first(queues):
    """What they had, and what they claim as they begin to wait."""
    producer = await queues()
    for name, held_s, tokens in (("latest", 0.0, 500), ("later", 0.3, 0), ("sooner", 0.1, 0)):
        queue = await queues(waiter=name)
        queue.done_s = (held_s, 0.001)
        if tokens:
            await producer.enqueue(job("its own", tokens))
        await queue.claim(name, ALL, 9, 0, "ahead", wait_s=60)
        assert queue.waits
    assert await order_of(queues) == ["sooner", "later", "latest"]


@pytest.mark.parametrize("wait_s", [0.2, 50.0])
async def test_workers_are_told_by_how_they_wait_and_not_by_how_long(queues, wait_s):
    for number, (name, claimer, left, done_s) in enumerate(
        (
            ("left", "busy", True, 0.0),
            ("idle left", "idle", True, 0.0),
            ("busy", "busy", False, 0.4),
            ("idle", "idle", False, 0.0),
            ("ahead", "ahead", False, 0.2),
        )
    ):
        queue = await queues(waiter=name)
        await queue.call("wait", name, wait_s if number % 2 else 1.0, claimer, int(left), done_s)
    assert await order_of(queues) == ["idle", "idle left", "ahead", "busy", "left"]


async def listening(queues, name, *how, within_s=60.0):
    """A worker that waits, and hears at once that it was told. What it does then is the test's."""
    queue = await queues(waiter=name)
    await queue.wait_for_work(10)  # ended by its new subscription
    queue._woken.clear()
    assert not await queue.call("wait", name, within_s, *(how or ("idle", 0, 0.0)))
    queue._listed = True
    return queue


async def told(queue):
    await until(queue._woken.is_set, "it is told")


@pytest.mark.parametrize("how", [("idle", 0, 0.0), ("busy", 0, 0.0)])
@pytest.mark.parametrize("end", ["leave", "aclose"])
async def test_a_worker_that_stops_asking_hands_over_what_it_was_told(queues, how, end):
    leaver, producer = await listening(queues, "leaver", *how), await queues()
    await getattr(leaver, end)()
    assert await waiters(queues) == 0
    leaver = await listening(queues, "leaver", *how)
    heir = await listening(queues, "heir", "busy", 0, 60.0)
    await producer.enqueue(job("a"))
    await told(leaver)
    await getattr(leaver, end)()
    await told(heir)


async def test_a_rank_that_died_is_told_of_nothing_however_long_its_work_would_have_taken(queues):
    """Its host is frozen, so that its connection stays."""
    frozen, producer = await listening(queues, "frozen", "ahead", 0, 30.0, within_s=0.05), await queues()
    await asyncio.sleep(0.1)
    other = await listening(queues, "other", "ahead", 0, 40.0)
    await producer.enqueue(job("a"))
    await told(other)
    assert not frozen._woken.is_set()


async def test_no_other_is_told_while_an_idle_worker_is_on_its_way_but_of_what_it_leaves(queues):
    idler, ahead = await listening(queues, "idler"), await listening(queues, "ahead", "ahead", 0, 0.0)
    producer = await queues()
    await producer.enqueue(job("a", tokens=100))
    await told(idler)
    await queues.redis.zadd(f"{Keys(queues.namespace).prefix}told", {"idler": time.time() + 30})
    await producer.enqueue(job("b", tokens=100))
    assert await order_of(queues) == ["ahead"], "it would have to leave the job to the idle one"
    claims, _ = await idler.claim("idler", 100, 9, 32, "idle", wait_s=60)
    assert [claim.job.request_id for claim in claims] == ["a"]
    await told(ahead)
    claims, _ = await ahead.claim("ahead", 100, 9, 32, "ahead", wait_s=60)
    assert [claim.job.request_id for claim in claims] == ["b"]


@pytest.mark.parametrize("window", [0, 32])
async def test_a_job_that_a_worker_has_no_room_for_is_told_to_the_next_that_has(queues, window):
    producer, full = await queues(), await listening(queues, "full", "busy", 0, 0.0)
    roomy = await listening(queues, "roomy", "busy", 0, 1.0)
    await producer.enqueue(job("a", tokens=500))
    await told(full)
    claims, seen = await full.claim("full", 100, 9, window, "busy", wait_s=60)
    assert not claims and len(seen) == bool(window)
    if window:
        assert not roomy._woken.is_set(), "it may choose something"
        assert not await full.claim_chosen("full", [], False)
    await told(roomy)
    await full.call("wait", "full", 60.0, "busy", 1, 0.0)
    roomy._woken.clear()
    assert await roomy.claim("roomy", 100, 9, 0, "busy", wait_s=60) == ([], [])
    assert await order_of(queues) == ["full"], "none that has left it is told again"


async def test_a_worker_with_room_leaves_nothing_to_idle_ones_that_died(queues):
    await wait_idle(queues, "dead")
    queue = await queues(waiter="ahead")
    await queues.redis.zadd(queue.keys.queue, {"a": 1.0})
    await queue.enqueue(job("b"))
    await wait_idle(queues, "dead", "dead too")
    claims, _ = await queue.claim("ahead", 100, 9, 32, "ahead", wait_s=60)
    assert [claim.job.request_id for claim in claims] == ["b"] and queue.share_tokens is None


async def test_waiters_of_another_hosts_clock_are_no_idle_workers(queues):
    """Redis has moved to a host whose clock is behind: workers that died since would be waited for as long."""
    queue = await queues(waiter="a")
    await queue.enqueue(job("r", tokens=100))
    await queues.redis.zadd(f"{Keys(queues.namespace).prefix}told", {"dead": time.time() + 3600})
    await wait_idle(queues, "dead", until_s=3600)
    claims, _ = await queue.claim("a", ALL, 9, 32, "busy", wait_s=0.5)
    assert [claim.job.request_id for claim in claims] == ["r"] and queue.share_tokens is None


async def test_worker_that_leaves_all_jobs_wakes_nobody_and_waits(queues):
    queue = await queues(waiter="a")
    await queue.enqueue(job("theirs"))
    await wait_idle(queues, "idler")
    queue.away = ["f1"]
    assert await queue.claim("a", ALL, 9, 32, "idle", wait_s=60) == ([], [])
    assert not queue.waits and await waiters(queues) == 1, "two of them would wake each other for ever"
    await queues.redis.delete(f"{Keys(queues.namespace).prefix}waiters")
    other = await queues(waiter="b")
    assert [claim.job.request_id for claim in await claim_head(other, "b", ALL, 9)] == ["theirs"], "a was not idle"
    await queue.enqueue(job("mine", reply_to="f2"))
    assert [claim.job.request_id for claim in await claim_head(queue, "a", ALL, 9)] == ["mine"]


async def test_a_waiter_can_be_woken_by_its_own_process(queues):
    queue = await queues()
    await queue.wait_for_work(10)
    waiting = asyncio.create_task(waits(queue, 30))
    await waiting_are(queues, 1)
    queue.wake()
    assert await waiting < 15


async def test_wait_without_work_times_out(queues):
    queue = await queues()
    await queue.wait_for_work(10)
    assert await waits(queue, 0.2) >= 0.19


# ---- a server that dies ----------------------------------------------------------------------------------------


async def test_a_killed_and_restarted_server(mortal):
    redis = await connect(mortal.url, 1.0)
    queue = PrefillQueue(redis, "mortal")
    await queue.enqueue(job("a"))
    await claim_head(queue, "w", ALL, 1)
    await queue.enqueue(job("b"))
    os.kill(mortal.pid, signal.SIGKILL)
    calls = {
        "enqueue": lambda: queue.enqueue(job("c")),
        "claim": lambda: claim_head(queue, "w", ALL, 1),
        "renew": lambda: queue.renew("w", ["a"]),
        "ack": lambda: queue.ack("w", "a", 1),
        "release": lambda: queue.release("w", "a", 1),
        "cancel": lambda: queue.cancel("a", 1),
        "sweep": queue.sweep,
        "depth": queue.depth,
        "peek": lambda: peek(queue, 5),
        "show": lambda: show(queue, "a"),
    }
    for name, call in calls.items():
        with pytest.raises(RedisAway):
            await call()
            pytest.fail(f"{name} did not notice")
    assert await waits(queue, 0.3) >= 0.29, "waiting does not raise, and does not spin"
    mortal.stop()
    mortal.start()

    async def depth():
        try:
            return await queue.depth()
        except RedisAway:
            return None

    assert await until(depth, "the queue works again") == QueueDepth(0, 0, 0)
    # What Redis lost is unknown, not wrong: holders are told, and everything goes on.
    assert await queue.renew("w", ["a"]) == ["a"]
    assert not await queue.ack("w", "a", 1)
    await queue.enqueue(job("d"))
    assert [claim.job.request_id for claim in await claim_head(queue, "w", ALL, 5)] == ["d"]
    waiting = asyncio.create_task(waits(queue, 30))
    await asyncio.sleep(0)
    await queue.enqueue(job("e"))
    assert await waiting < 15
    await queue.aclose()
    await redis.aclose()
