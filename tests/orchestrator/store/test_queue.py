"""The queue's transitions that `test_queue_model.py` does not know, one by one, against a real server."""

import random
import time

import msgspec
import pytest
from support_redis import (
    assert_no_leaks,
    claim_head,
    dropped,
    expire_lease,
    fresh_namespace,
    job,
    keys_of,
    make_old,
)

from orchestrator.policy.claims import choose_claims
from orchestrator.store.client import RedisAway
from orchestrator.store.operator.shown import peek, show
from orchestrator.store.queue import MAX_DELIVERIES, PrefillQueue, QueueFull, SweepResult
from orchestrator.types import JobState, PrefillJob, QueueDepth, WindowJob

ALL = 10**9  # a budget that everything fits


@pytest.fixture
async def make(redis):
    """Queues over one namespace, with its frontend there; checked for leaks if the test emptied them."""
    queues, namespace = [], fresh_namespace()

    def make(max_deliveries=MAX_DELIVERIES, lease_s=30.0, **changes):
        queues.append(PrefillQueue(redis, namespace, max_deliveries=max_deliveries, lease_s=lease_s, **changes))
        return queues[-1]

    await redis.hset(make().keys.frontend("f1"), "pid", 1)
    yield make
    for claim in await claim_head(queues[0], "cleaner", ALL, 256):
        assert await queues[0].ack("cleaner", claim.job.request_id, claim.job.attempt)
    for request_id in await redis.zrange(queues[0].keys.leases, 0, -1):
        await queues[0].cancel(request_id.decode(), ALL)
    await assert_no_leaks(redis, namespace)
    for queue in queues:
        await queue.aclose()


async def ids(queue, worker="w", max_tokens=ALL, max_jobs=100):
    return [claim.job.request_id for claim in await claim_head(queue, worker, max_tokens, max_jobs)]


# ---- order and bounds ------------------------------------------------------------------------------------------


async def test_a_delay_moves_a_job_back_or_forward(make):
    queue = make()
    for request_id, delay_s in (("a", 900.0), ("b", 0.0), ("c", 500.0), ("urgent", -30.0)):
        await queue.enqueue(job(request_id, delay_s=delay_s))
    assert await ids(queue) == ["urgent", "b", "c", "a"]


async def test_the_score_is_arrival_plus_the_delay(make):
    queue = make()
    await queue.enqueue(job("a", delay_s=40.5))
    [head] = await peek(queue, 1)
    assert head["score"] == pytest.approx((await show(queue, "a"))["arrived_at"] + 40.5, abs=1e-5)


async def test_the_bound_counts_requests(make):
    queue = make(max_jobs=2)
    await queue.enqueue(job("a"))
    await queue.enqueue(job("b"))
    with pytest.raises(QueueFull, match="2 prefills wait already; add prefill workers"):
        await queue.enqueue(job("c"))
    await queue.enqueue(job("b"))  # known already
    await queue.enqueue(job("b", attempt=2))  # takes its own place
    assert await queue.depth() == QueueDepth(2, 200, 0)
    await claim_head(queue, "w", ALL, 1)
    await queue.enqueue(job("c"))


async def test_a_claim_carries_the_job_unchanged(make):
    queue = make()
    sent = msgspec.structs.replace(job("ü/1#2", 300, attempt=3, body=bytes(range(256)) * 5000), uncached_tokens=120)
    await queue.enqueue(sent)
    [claim] = await claim_head(queue, "w", ALL, 1)
    assert claim.job.arrived_at > 1e9, "the server's clock"
    assert claim.job == msgspec.structs.replace(sent, arrived_at=claim.job.arrived_at, deliveries=1)
    assert 0 <= claim.queued_s < 15
    assert claim.lease_until == pytest.approx(claim.job.arrived_at + claim.queued_s + 30.0, abs=0.01)


@pytest.mark.parametrize("length", [0, 31, 32, 255, 256, 65535, 65536])
async def test_a_body_of_any_length_and_bytes_comes_back(make, length):
    queue = make()
    body = random.Random(length).randbytes(length)
    await queue.enqueue(job("a", body=body))
    [claim] = await claim_head(queue, "w", ALL, 1)
    assert claim.job.body == body


async def test_full_server_refuses_jobs_and_releases_old_ones(make, redis):
    queue = make()
    for request_id in "abcd":
        await queue.enqueue(job(request_id))
    await claim_head(queue, "w", ALL, 2)
    await redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisAway, match="refused FCALL: .*maxmemory"):
            await queue.enqueue(job("e"))
        assert await queue.ack("w", "a", 1) and await queue.release("w", "b", 1)
        assert await queue.cancel("c", 1) == "waiting"
        assert await queue.depth() == QueueDepth(2, 200, 0), "an operator can look"
        with pytest.raises(RedisAway, match="refused FCALL: .*maxmemory"):
            await queue.poll()  # for frontends such a queue is away: nobody claims what waits in it
        assert await queue.sweep() == SweepResult([], [], [])
    finally:
        await redis.config_set("maxmemory", 0)
    assert await queue.poll() == QueueDepth(2, 200, 0)


@pytest.mark.parametrize("lost", ["queue", "leases"])
@pytest.mark.parametrize("damage", [lambda redis, key: redis.delete(key), lambda redis, key: redis.set(key, "x")])
async def test_job_without_place_or_lease_is_absent(make, redis, lost, damage):
    queue = make()
    for name in ("claimed", "waiting"):
        await queue.enqueue(job(name))
    await claim_head(queue, "w", ALL, 1)
    names = ["claimed", "waiting", "unknown"]
    states = {"claimed": JobState.CLAIMED, "waiting": JobState.WAITING, "unknown": JobState.ABSENT}
    assert await queue.states(names) == states
    key = f"{queue.keys.prefix}{lost}"
    await damage(redis, key)
    gone = "waiting" if lost == "queue" else "claimed"
    assert await queue.states(names) == {**states, gone: JobState.ABSENT}
    await redis.delete(key)
    await queue.enqueue(job(gone, attempt=2))
    assert (await queue.states([gone]))[gone] is JobState.WAITING


# ---- affinity --------------------------------------------------------------------------------------------------


@pytest.fixture
async def claimers(redis, make):
    """Makes workers that count as claiming."""
    keys, known = make().keys, []

    async def claimers(*names, role="prefill", state="ready"):
        for name in names:
            known.append(keys.worker(name))
            await redis.hset(known[-1], mapping={"role": role, "state": state})

    yield claimers
    if known:
        await redis.delete(*known)


def cached_job(request_id, tokens=100, **cached):
    return msgspec.structs.replace(job(request_id, tokens), cached=cached)


async def test_without_a_cached_prefix_in_the_window_jobs_are_claimed_at_once(make, claimers):
    queue = make()
    await claimers("w", "other")
    for number in range(4):
        await queue.enqueue(job(f"r{number}", 10))
    await queue.enqueue(cached_job("r4", other=80))
    claims, window = await queue.claim("w", 20, 5, 4, "idle")
    assert [claim.job.request_id for claim in claims] == ["r0", "r1"] and window == []
    claims, window = await queue.claim("w", 20, 5, 4, "idle")
    assert claims == [] and [job.request_id for job in window] == ["r2", "r3", "r4"]


async def test_window_has_cached_tokens_here_and_elsewhere(make, claimers, redis):
    queue = make()
    await claimers("w", "w2", "w3")
    await claimers("drains", state="draining")
    await claimers("decodes", role="decode")
    await queue.enqueue(cached_job("a", 1000, w=100, w2=300, w3=200))
    await queue.enqueue(cached_job("b", 1000, drains=800, decodes=700, gone=600))
    await queue.enqueue(cached_job("c", 50, w=500))
    assert await redis.hget(queue.keys.job("a"), "cached") == b"w2=300 w3=200 w=100", "as redis-cli shows it"
    assert (await show(queue, "a"))["cached"] == "w2=300 w3=200 w=100"
    _, window = await queue.claim("w", 10, 1, 32, "idle")
    assert [(job.request_id, job.tokens, job.cached_here, job.cached_elsewhere) for job in window] == [
        ("a", 1000, 100, 300),
        ("b", 1000, 0, 0),
        ("c", 50, 50, 0),
    ]
    assert all(0 <= job.waited_s < 15 for job in window)
    assert [job.score for job in window] == [row["score"] for row in await peek(queue, 3)]
    assert await queue.depth() == QueueDepth(3, 2050, 0), "looking takes nothing"


async def test_unclaimed_cached_jobs_are_claimed_in_order(make):
    queue = make()
    await queue.enqueue(cached_job("a", gone=80))
    claims, window = await queue.claim("w", ALL, 9, 32, "idle")
    assert [claim.job.request_id for claim in claims] == ["a"] and window == []
    assert claims[0].job.cached == {"gone": 80}, "a claim carries it too"


async def test_chosen_jobs_are_claimed_once_and_the_rest_stays(make):
    queue = make()
    for request_id in "abc":
        await queue.enqueue(job(request_id))
    assert [claim.job.request_id for claim in await queue.claim_chosen("w", ["c", "a"])] == ["c", "a"]
    assert set(await queue.claims_of("w")) == {"a", "c"} and await queue.claims_of("w2") == []
    assert [claim.job.request_id for claim in await queue.claim_chosen("w2", ["a", "b", "never"])] == ["b"]
    assert await queue.claim_chosen("w2", []) == []
    assert await queue.depth() == QueueDepth(0, 0, 3)
    assert await queue.renew("w", ["a", "b", "c"]) == ["b"]
    assert await queue.release("w", "a", 1) and await queue.claims_of("w") == ["c"]
    assert await ids(queue) == ["a"]


async def test_idle_worker_takes_head_after_lost_races(make, redis):
    queue = make()
    for request_id in "abcd":
        await queue.enqueue(job(request_id))

    async def chosen(worker, *request_ids, idle):
        return [claim.job.request_id for claim in await queue.claim_chosen(worker, request_ids, idle=idle)]

    assert await chosen("w", "c", idle=True) == ["c"]
    assert await chosen("w2", "c", idle=False) == [], "a busy one may leave what belongs elsewhere"
    assert await chosen("w2", "c", "never", idle=True) == ["a"]
    await redis.hdel(queue.keys.job("b"), "body")
    assert await chosen("w3", "b", idle=True) == ["d"], "what was chosen could not be read"
    assert await chosen("w4", "a", idle=True) == []
    assert await queue.depth() == QueueDepth(0, 0, 3)


async def test_jobs_of_frontends_that_are_away_are_left(make, redis):
    queue, other = make(), make()
    for number in range(40):
        await queue.enqueue(job(f"away{number}", 10, reply_to="f2" if number % 2 else "f3"))
    for name in ("a", "b", "c"):
        await queue.enqueue(job(name, 10))
    queue.away = ["f2", "f3"]
    assert await ids(queue, max_tokens=10) == ["a"]
    claims, window = await queue.claim("w", 9, 9, 2, "busy")
    assert claims == [] and [job.request_id for job in window] == ["b", "c"]
    assert [claim.job.request_id for claim in await queue.claim_chosen("w", ["away0", "c"])] == ["c"]
    assert await queue.claim_chosen("w", ["never"], idle=True) == []
    assert await ids(queue) == ["b"] and await ids(queue) == []
    queue.away = ["f2"]
    assert await ids(queue, max_jobs=2) == ["away0", "away2"]
    assert await ids(other, max_jobs=2) == ["away1", "away3"]
    assert await queue.depth() == QueueDepth(36, 360, 7)


async def test_window_shows_head_that_does_not_fit(make):
    queue = make()
    for request_id, tokens in (("a", 10), ("big", 500), ("b", 10), ("c", 10)):
        await queue.enqueue(job(request_id, tokens))
    claims, window = await queue.claim("w", 100, 9, 3, "idle")
    assert [claim.job.request_id for claim in claims] == ["a"] and window == [], "first what fits"
    claims, window = await queue.claim("w", 90, 9, 2, "busy")
    assert claims == [] and [(job.request_id, job.tokens) for job in window] == [("big", 500), ("b", 10)]
    assert await queue.claim("w", 90, 9, 0, "busy") == ([], []), "without a window there is nothing to see"
    claims, window = await queue.claim("w", 90, 9, 3, "idle")
    assert [claim.job.request_id for claim in claims] == ["big"] and window == [], "an idle worker takes it"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("affine", [False, True])
async def test_lua_claims_equal_policy(make, claimers, redis, seed, affine):
    """The simulator asks the policy for every claim; here the script alone makes most of them."""
    # So many seconds a token that what passes while this runs changes no order.
    random_, s_per_token, queue, seen = random.Random(seed), 1.0, make(), {}
    await claimers("w", "w2")
    for number in range(30):
        tokens, name = random_.choice((1, 20, 50, 300, 900)), f"r{number}"
        cached = {random_.choice(("w", "w2")): tokens // 2} if affine and random_.random() < 0.2 else {}
        loaded = {random_.choice(("w", "w2")): 400} if affine and random_.random() < 0.2 else {}
        named = cached | {PrefillJob.ADAPTER + worker: saved for worker, saved in loaded.items()}
        await queue.enqueue(msgspec.structs.replace(job(name, tokens), cached=named))
        waited_s = random_.choice((0, 0, 1200))  # longer than 900 tokens take
        await redis.hset(queue.keys.job(name), "arrived_at", time.time() - waited_s)
        elsewhere = cached.get("w2", 0) + loaded.get("w2", 0)
        seen[name] = WindowJob(name, 0.0, tokens, waited_s, cached.get("w", 0), elsewhere, loaded.get("w", 0))
    while head := [msgspec.structs.replace(seen[row["id"]], score=row["score"]) for row in await peek(queue, 8)]:
        left, idle, claimed = random_.choice((1, 60, 400, 2000)), random_.random() < 0.5, []
        expected = choose_claims(head, left, idle, s_per_token)
        while left > 0:
            claims, window = await queue.claim("w", left, 256, 8, "idle" if idle else "busy")
            if window:
                claims = await queue.claim_chosen("w", choose_claims(window, left, idle, s_per_token))
            if not claims:
                break
            claimed += [claim.job.request_id for claim in claims]
            left -= sum(claim.job.tokens_at("w") for claim in claims)
            idle = False
        assert claimed[: len(expected)] == expected, "and what is behind the window, as long as there is room"
        if not claimed:  # the head belongs to another worker, or fits nowhere yet, until it has waited for longer
            for row in await peek(queue, 30):
                older = msgspec.structs.replace(seen[row["id"]], waited_s=seen[row["id"]].waited_s + 1200)
                seen[older.request_id] = older
                await redis.hset(queue.keys.job(older.request_id), "arrived_at", time.time() - older.waited_s)


async def test_the_leases_of_a_dead_worker_end_and_count_as_deliveries(make, claimers, redis):
    queue = make(max_deliveries=2)
    for request_id in "abc":
        await queue.enqueue(job(request_id))
    assert await ids(queue, "dead", max_jobs=2) == ["a", "b"] and await ids(queue, "lives") == ["c"]
    await claimers("dead")
    assert await queue.expire_leases("dead") == 0, "it is registered: it renews them itself"
    await redis.delete(queue.keys.worker("dead"))
    assert await queue.expire_leases("dead") == 2
    assert await queue.expire_leases("dead") == 0, "one is the first"
    assert sorted((await queue.sweep()).returned) == ["a", "b"]
    assert await ids(queue, "dead") == ["a", "b"] and await queue.expire_leases("nobody") == 0
    assert await queue.expire_leases("dead") == 2
    assert sorted((await queue.sweep()).failed) == [("a", 1, "f1"), ("b", 1, "f1")]
    assert (await dropped(redis, queue))["failed"] == 2


async def test_a_window_drops_what_is_corrupt_or_orphaned(make, claimers, redis):
    queue = make()
    await claimers("w2")
    for request_id in "abcd":
        await queue.enqueue(cached_job(request_id, w2=50))
    await redis.hdel(queue.keys.job("a"), "state")
    await redis.hset(queue.keys.job("b"), "reply_to", "gone")
    await make_old(redis, queue, "b")
    await redis.hset(queue.keys.job("c"), "cached", "w2= =5 w2=x nonsense")
    claims, window = await queue.claim("w", ALL, 9, 3, "idle")
    assert window == [], "of the first three only c is left, and nothing is known of it"
    assert [(claim.job.request_id, claim.job.cached) for claim in claims] == [("c", {}), ("d", {"w2": 50})]
    assert await dropped(redis, queue) == {"corrupt": 1, "orphaned": 1}


async def test_a_claim_tells_a_jobs_own_objective(make, redis):
    """A job without it, or with one that nobody can read, has the fleet's."""
    queue = make()
    for request_id, ttft_s in (("a", 0.3), ("b", 1e-6), ("c", 0.0), ("old", 0.0), ("odd", 30.0), ("odder", 30.0)):
        await queue.enqueue(msgspec.structs.replace(job(request_id), ttft_s=ttft_s))
    told = [await redis.hget(queue.keys.job(name), "ttft_s") for name in ("a", "c")]
    assert told == [b"0.3", None], "redis-cli shows it where there is one"
    await redis.hset(queue.keys.job("odd"), "ttft_s", "nan")
    await redis.hset(queue.keys.job("odder"), "ttft_s", b"\xff soon")
    claims = await claim_head(queue, "w", ALL, 9)
    assert [claim.job.ttft_s for claim in claims] == [0.3, 1e-6, 0.0, 0.0, 0.0, 0.0]


async def test_window_with_binary_id_drops_it(make, claimers, redis):
    queue, strange = make(), b"\xff\xfe"
    await claimers("w")
    await queue.enqueue(cached_job("a", w=50))
    fields = await redis.hgetall(queue.keys.job("a"))
    await redis.hset(queue.keys.job("").encode() + strange, mapping=fields)
    await redis.zadd(queue.keys.queue, {strange: 1.0})
    claims, window = await queue.claim("w", ALL, 9, 4, "idle")
    assert [claim.job.request_id for claim in claims] == ["a"] and window == []
    assert not await redis.exists(queue.keys.job("").encode() + strange)


# ---- holding and letting go ------------------------------------------------------------------------------------


async def test_returned_job_keeps_its_score(make, redis):
    queue = make()
    for request_id, delay_s in (("long", 900.0), ("short", 10.0)):
        await queue.enqueue(job(request_id, delay_s=delay_s))
    before = [(row["id"], row["score"]) for row in await peek(queue, 2)]
    await claim_head(queue, "w", ALL, 2)
    assert await queue.release("w", "long", 1)
    await expire_lease(redis, queue, "short")
    assert (await queue.sweep()).returned == ["short"]
    assert [(row["id"], row["score"]) for row in await peek(queue, 2)] == before
    assert before[0][0] == "short"


# ---- sweeping --------------------------------------------------------------------------------------------------


async def test_a_lease_runs_out_by_the_servers_clock(make):
    queue = make(lease_s=0.001)
    await queue.enqueue(job("a"))
    await claim_head(queue, "w", ALL, 1)
    while not (result := await queue.sweep()).returned:
        pass
    assert result.returned == ["a"]


async def test_jobs_of_a_frontend_that_is_gone_are_dropped(make, redis):
    queue = make()
    for request_id in "abcd":
        await queue.enqueue(job(request_id, reply_to="f1" if request_id == "d" else "gone"))
    assert await ids(queue, max_jobs=1) == ["a"]
    assert (await queue.sweep()).orphaned == [], "a frontend that Redis lost has time to return"
    await make_old(redis, queue, *"abcd")
    await expire_lease(redis, queue, "a")
    assert await ids(queue, max_jobs=1) == ["d"], "not handed out on the way to the next job"
    assert (await queue.sweep()).orphaned == ["a"]
    assert (await dropped(redis, queue))["orphaned"] == 3
    assert await queue.depth() == QueueDepth(0, 0, 1)


async def test_one_sweep_clears_many_orphans_of_a_long_queue(make, redis):
    queue = make()
    for number in range(600):
        await queue.enqueue(job(f"r{number}", 1, reply_to="gone" if number < 500 else "f1"))
    await make_old(redis, queue, *(f"r{number}" for number in range(500)))
    swept = set()
    for _ in range(30):
        swept.update((await queue.sweep()).orphaned)
    assert swept == {f"r{number}" for number in range(500)}
    assert await queue.depth() == QueueDepth(100, 100, 0)


# ---- damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["abc", "1.5", "", "-7"])
@pytest.mark.parametrize("verb", ["enqueue", "claim", "cancel", "release"])
async def test_invalid_counter_is_recounted(make, redis, value, verb):
    queue = make()
    for name in ("a", "b"):
        await queue.enqueue(job(name, tokens=100))
    if verb == "release":
        assert len(await claim_head(queue, "w1", ALL, 1)) == 1
    await redis.set(queue.keys.queued_tokens, value)
    assert (await queue.depth()).tokens == 0, "unknown, but no error"
    match verb:
        case "enqueue":
            await queue.enqueue(job("c", tokens=100))
        case "claim":
            assert len(await claim_head(queue, "w1", ALL, 1)) == 1
        case "cancel":
            assert await queue.cancel("a", 1) == "waiting"
        case "release":
            assert await queue.release("w1", "a", 1)
    waiting = {"enqueue": 3, "claim": 1, "cancel": 1, "release": 2}[verb]
    assert (await queue.depth()).tokens == (100 * waiting if value != "-7" or verb in ("claim", "cancel") else 100 - 7)


async def test_a_counter_of_another_type_is_replaced(make, redis):
    queue = make()
    await queue.enqueue(job("a", tokens=100))
    await redis.delete(queue.keys.queued_tokens)
    await redis.lpush(queue.keys.queued_tokens, "x")
    assert await queue.depth() == QueueDepth(1, 0, 0)
    await queue.enqueue(job("b", tokens=50))
    assert await queue.depth() == QueueDepth(2, 150, 0)


DAMAGE = {
    "hash gone": lambda redis, key: redis.delete(key),
    "not a hash": lambda redis, key: redis.set(key, "x"),
    "no body": lambda redis, key: redis.hdel(key, "body"),
    "no state": lambda redis, key: redis.hdel(key, "state"),
    "odd state": lambda redis, key: redis.hset(key, "state", "claimed"),
    "tokens are nan": lambda redis, key: redis.hset(key, "uncached", "nan"),
    "tokens are text": lambda redis, key: redis.hset(key, "tokens", "many"),
    "tokens are negative": lambda redis, key: redis.hset(key, "uncached", "-5"),
    "attempt is a fraction": lambda redis, key: redis.hset(key, "attempt", "1.5"),
    "no arrival": lambda redis, key: redis.hset(key, "arrived_at", ""),
    "arrival is nan": lambda redis, key: redis.hset(key, "arrived_at", "nan"),
    "reply_to is not text": lambda redis, key: redis.hset(key, "reply_to", b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_corrupt_job_is_dropped_on_claim(make, redis, caplog, damage):
    queue = make()
    for request_id in "abc":
        await queue.enqueue(job(request_id, 100))
    if damage == "reply_to is not text":
        await redis.hset(queue.keys.frontend("f1").encode()[:-2] + b"\xff\xfe", "pid", 1)
    await DAMAGE[damage](redis, queue.keys.job("b"))
    assert await ids(queue) == ["a", "c"]
    assert await queue.depth() == QueueDepth(0, 0, 2)
    assert await show(queue, "b") is None
    by_the_client = damage == "reply_to is not text"  # Lua does not know text from bytes
    assert sum((await dropped(redis, queue)).values()) == (0 if by_the_client else 1)
    assert ("dropped a corrupt prefill job b'b'" in caplog.text) == by_the_client
    await redis.delete(queue.keys.frontend("f1").encode()[:-2] + b"\xff\xfe")


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name not in ("reply_to is not text", "no body")])
async def test_a_corrupt_job_is_dropped_by_a_sweep_and_the_tokens_are_right_again(make, redis, damage):
    queue = make()
    for request_id in "abc":
        await queue.enqueue(job(request_id, 100))
    await DAMAGE[damage](redis, queue.keys.job("b"))
    await queue.sweep()
    assert await queue.depth() == QueueDepth(2, 200, 0)
    assert await ids(queue) == ["a", "c"]


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_corrupt_job_can_be_enqueued_and_cancelled_afresh(make, redis, damage):
    queue = make()
    await queue.enqueue(job("a", 100))
    await DAMAGE[damage](redis, queue.keys.job("a"))
    await queue.enqueue(job("a", 40, attempt=2))
    assert await queue.depth() == QueueDepth(1, 40, 0)
    await DAMAGE[damage](redis, queue.keys.job("a"))
    await queue.cancel("a", 2)
    assert await queue.depth() == QueueDepth(0, 0, 0)


@pytest.mark.parametrize("score", ["nan", "", "x"])
async def test_a_claimed_job_whose_place_is_no_number_goes_back_by_its_arrival(make, redis, score):
    queue = make()
    for request_id in "ab":
        await queue.enqueue(job(request_id, 100))
    await claim_head(queue, "w", ALL, 1)
    await redis.hset(queue.keys.job("a"), "score", score)
    await expire_lease(redis, queue, "a")
    assert (await queue.sweep()).returned == ["a"]
    assert await ids(queue) == ["a", "b"]


async def test_a_claimed_job_whose_hash_is_gone_ends_with_its_lease(make, redis):
    queue = make()
    await queue.enqueue(job("a"))
    await claim_head(queue, "w", ALL, 1)
    await redis.delete(queue.keys.job("a"))
    assert not await queue.ack("w", "a", 1)
    assert await queue.renew("w", ["a"]) == ["a"]
    await expire_lease(redis, queue, "a")
    assert await queue.sweep() == SweepResult([], [], [])
    assert await queue.depth() == QueueDepth(0, 0, 0)


# ---- for people ------------------------------------------------------------------------------------------------


async def test_peek_and_show(make):
    queue = make()
    await queue.enqueue(job("a", 100, attempt=2, body=b"x" * 5000))
    await queue.enqueue(job("b", 50))
    head = await peek(queue, 10)
    assert [(row["id"], row["tokens"], row["uncached"], row["attempt"]) for row in head] == [
        ("a", 100, 100, 2),
        ("b", 50, 50, 1),
    ]
    assert all(row["age_s"] >= 0 for row in head)
    assert [row["id"] for row in await peek(queue, 1)] == ["a"]
    assert await peek(queue, 0) == []
    await claim_head(queue, "w", ALL, 1)
    shown = await show(queue, "a")
    assert shown["state"] == "claimed" and shown["claimed_by"] == "w" and shown["body_bytes"] == 5000
    assert "body" not in shown
    assert await show(queue, "nope") is None


async def test_a_person_with_redis_cli_can_read_it(make, redis):
    queue = make()
    namespace = queue.keys.prefix[4:-2]
    await queue.enqueue(job("a", 100))
    await queue.enqueue(job("b", 200))
    await claim_head(queue, "w", ALL, 1)
    assert await keys_of(redis, namespace) == {
        "queue",
        "queued_tokens",
        "leases",
        "claims:w",
        "job:a",
        "job:b",
        "frontend:f1",
    }
    assert await redis.execute_command("ZRANGE", f"pd:{{{namespace}}}:queue", 0, -1) == [b"b"]
    assert await redis.execute_command("ZRANGE", f"pd:{{{namespace}}}:claims:w", 0, -1) == [b"a"]
    assert await redis.get(f"pd:{{{namespace}}}:queued_tokens") == b"200"
    fields = await redis.hgetall(f"pd:{{{namespace}}}:job:a")
    expected = {"state", "tokens", "uncached", "arrived_at", "attempt", "claimed_by", "lease_until", "reply_to", "body"}
    assert {name.decode() for name in fields} >= expected
    assert fields[b"state"] == b"claimed" and fields[b"tokens"] == b"100" and fields[b"claimed_by"] == b"w"


async def test_keys_share_slot_and_expire(make, redis):
    queue = make()
    await queue.enqueue(job("a"))
    await queue.enqueue(job("b"))
    await claim_head(queue, "w", ALL, 1)
    await queue.sweep()
    await redis.delete(queue.keys.job("b"))
    await queue.enqueue(job("c"))
    await queue.sweep()
    keys = [key async for key in redis.scan_iter(match=f"{queue.keys.prefix}*")]
    from redis.crc import key_slot

    assert len({key_slot(key) for key in keys}) == 1
    lasting = {key for key in keys if await redis.ttl(key) < 0 and not key.endswith(b"frontend:f1")}
    assert not lasting, "these would stay for ever when a fleet dies"
