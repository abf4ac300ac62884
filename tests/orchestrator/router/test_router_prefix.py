"""What the prefix index changes in a request's life: where it is prefilled, who decodes it, and what it counts as."""

import asyncio

import pytest
from support_bench import Bench, FakeRequest, counted
from support_wait import until

from orchestrator.policy.decode_choice import KVBlocks
from orchestrator.types import Role
from orchestrator.wire.messages import Fetch, Lend, Prefilled, Rejected
from orchestrator.wire.sockets import Sent

KEYS = list(range(1, 63))  # of a prompt of 1000 tokens, in blocks of 16


def bench_with(held, **routing):
    """`held`: leading blocks by worker."""
    bench = Bench(**routing)
    for worker_id, blocks in held.items():
        bench.prefixes.index.stored(worker_id, KEYS[:blocks])
    return bench


def hit_tokens(side):
    return counted("pd_prefix_hit_tokens", side=side)


async def test_prompt_cached_at_decode_is_short():
    bench = bench_with({"d1": 60})
    before = hit_tokens("local")
    await bench.router.submit(FakeRequest("r", keys=KEYS))
    ((worker, submit),) = bench.submits()
    active = bench.router.requests["r"]
    assert worker == "d1" and submit.kv_source is None and submit.cached_tokens == 960
    assert (active.placed.decision, active.placed.reason, active.cached_tokens) == ("local", "short_prompt", 960)
    assert hit_tokens("local") == before + 960
    candidate = bench.fleet.workers["d1"].candidate
    assert candidate.placed_tokens == 40 and candidate.blocks_free == 1000 - 63


async def test_prompt_cached_at_prefill_goes_remote_with_its_hits():
    held = {"p0": 40, "p1": 50, "p2": 10, "p3": 40, "p4": 40}
    bench = bench_with(held | {"d0": 10})
    for name in ("p1", "p2", "p3", "p4"):
        bench.add_worker(name, Role.PREFILL)
    await bench.router.submit(FakeRequest("r", keys=KEYS))
    (job,) = bench.queue.jobs
    assert job.cached == {"p1": 800, "p4": 640, "p0": 640, "p3": 640}  # the four that hold most
    assert job.uncached_tokens == 200 and job.tokens == 1000
    before = hit_tokens("prefill")
    bench.claim("r", worker="p1")
    assert bench.submits()[0][1].cached_tokens == 0
    bench.say("p1", Prefilled("r", 1, 0.2, cached_tokens=784))
    assert bench.router.requests["r"].cached_tokens == 784 and hit_tokens("prefill") == before + 784


async def test_caches_of_departed_workers_count_nothing():
    bench = bench_with({"d1": 60, "p0": 60})
    bench.fleet.remove("p0")
    bench.prefixes.forget("d1")
    bench.add_worker("p1", Role.PREFILL)
    await bench.router.submit(FakeRequest("r", keys=KEYS))
    assert bench.queue.jobs[0].cached == {} and bench.queue.jobs[0].uncached_tokens == 1000


async def test_prompt_goes_where_its_prefix_is_being_computed():
    bench = bench_with({"d0": 1, "d1": 10, "p0": 1}, remote_prefill_min_tokens=2000, decode_choice="kv_prefix")
    await bench.router.submit(FakeRequest("first", keys=KEYS))
    await bench.router.submit(FakeRequest("next", keys=KEYS))
    (_, first), (worker, submit) = bench.submits()
    assert (first.cached_tokens, worker, submit.cached_tokens) == (160, "d1", 48 * 16)
    bench.tokens("d1", "first", [7], finish="stop")
    assert len(bench.prefixes.index.expected) == 1
    bench.router.abort(["next"])
    bench.assert_no_leaks()


async def test_hits_are_looked_up_again_when_a_job_is_claimed():
    bench = bench_with({"d0": 3}, decode_choice="kv_prefix")
    await bench.router.submit(FakeRequest("r", keys=KEYS))
    bench.prefixes.index.stored("d1", KEYS[:40])  # while it waited in the queue
    before = hit_tokens("decode")
    bench.claim("r")
    assert bench.bound_to() == "d1" and hit_tokens("decode") == before + 640
    # Its KV comes by transfer: nothing of it is computed there.
    assert bench.fleet.workers["d1"].candidate.placed_tokens == 0


async def test_retry_ignores_cache_of_failed_worker():
    bench = bench_with({"d1": 60})
    await bench.router.submit(FakeRequest("r", keys=KEYS))
    bench.say("d1", Rejected("r", 1, "draining"))
    await bench.settle()
    worker, submit = bench.submits()[-1]
    assert worker == "d0" and submit.cached_tokens == 0


async def test_retry_expects_nothing_of_failed_worker():
    bench = bench_with({"d1": 60})
    await bench.router.submit(FakeRequest("r", keys=KEYS))
    assert bench.prefixes.index.expected
    bench.fleet.remove("d0")
    bench.fleet.remove("d1")
    bench.say("d1", Rejected("r", 1, "draining"))
    await until(lambda: not bench.prefixes.index.expected)
    assert "r" in bench.router.requests, "it waits for a decode worker"
    bench.router.abort(["r"])


async def test_large_fleet_considers_workers_with_hit():
    bench = Bench(decode_choice="kv_prefix")
    for number in range(200):
        name = f"n{number}"
        bench.add_worker(name, Role.DECODE)
        bench.report(name, blocks_free=1000 - number)
    bench.prefixes.index.stored("n170", KEYS)
    await bench.router.submit(FakeRequest("r", keys=KEYS))
    assert bench.bound_to() == "n170" and bench.submits()[0][1].cached_tokens == 62 * 16


async def test_empty_index_computes_no_keys():
    bench = await Bench.asked(FakeRequest("r", keys=KEYS))
    assert bench.router.requests["r"].parsed.prefix_keys == []


async def test_expected_output_follows_ended_requests():
    bench = Bench()
    assert isinstance(bench.choose, KVBlocks)
    before = bench.choose.expected_output_tokens
    for number in range(50):
        await bench.router.submit(FakeRequest(f"r{number}", prompt_tokens=10))
        bench.tokens(bench.bound_to(), f"r{number}", [1], finish=1)
    assert bench.choose.expected_output_tokens < before / 4


async def test_shared_prefixes_are_counted_for_ratio():
    bench = bench_with({"d1": 1})
    await bench.router.submit(FakeRequest("a", keys=KEYS))
    await bench.router.submit(FakeRequest("b", keys=KEYS[:40] + list(range(100, 122))))
    taken = bench.router.learning.reuse.take()
    assert (taken.prompts, taken.tokens) == (2, 2000)
    assert sum(taken.saved) == 512, "of the 640 tokens that both have two samples"


def bench_that_lends(held):
    """All workers lend and fetch, and have been heard."""
    bench = bench_with(held)
    for name in ("p0", "p1", "d0", "d1"):
        bench.add_worker(name, Role.PREFILL if name[0] == "p" else Role.DECODE, lends=True)
        bench.report(name, blocks_free=1000)
    return bench


async def test_a_prefill_worker_fetches_what_another_has_and_not_what_it_has_itself():
    bench = bench_that_lends({"p0": 60})
    for name in ("lacks", "has"):
        await bench.router.submit(FakeRequest(name, keys=KEYS))
    bench.claim("lacks", worker="p1", cached_tokens=0)
    ((holder, lend),) = bench.transport.of(Lend)
    ((asker, fetch),) = bench.transport.of(Fetch)
    assert (holder, asker) == ("p0", "p1") and lend.tokens == fetch.prefix.tokens == 960
    bench.prefixes.index.stored("p1", KEYS[:60])  # the other job named it not yet
    bench.claim("has", worker="p1", cached_tokens=0)
    assert bench.transport.of(Fetch)[1][1].prefix is None and len(bench.transport.of(Lend)) == 1


async def test_a_worker_that_is_quiet_lends_nothing():
    bench = bench_that_lends({"p0": 60, "d0": 40})
    bench.fleet.workers["p0"].mark_quiet()
    await bench.router.submit(FakeRequest("r", keys=KEYS))
    bench.claim("r", worker="p1", cached_tokens=0)
    ((holder, lend),) = bench.transport.of(Lend)
    assert (holder, lend.tokens) == ("d0", 640)


@pytest.mark.parametrize("local", [None, "n"], ids=["remote", "local"])
async def test_a_worker_from_which_the_asker_rests_lends_it_nothing(local):
    """It would send what nobody takes; another one that has less may lend."""
    bench = bench_that_lends({"p0": 60, "p1": 40})
    rests_from = [bench.fleet.workers["p0"].info.kv.engine_id]
    for name in ("d0", "d1", "p1"):
        bench.report(name, blocks_free=1000, rests_from=rests_from)
    await bench.router.submit(FakeRequest("r", keys=KEYS, local_only=local))
    if local is None:
        bench.claim("r", worker="p1", cached_tokens=0)
        assert not bench.transport.of(Lend) and bench.transport.of(Fetch)[0][1].prefix is None
    else:
        ((holder, lend),) = bench.transport.of(Lend)
        assert (holder, lend.tokens) == ("p1", 640)


async def test_nothing_is_lent_for_a_request_that_could_not_be_sent():
    bench = bench_that_lends({"p0": 60})
    bench.transport.refuses["d0"] = bench.transport.refuses["d1"] = Sent.NOT_READ
    bench.fleet.remove("p1")
    submitting = asyncio.create_task(bench.router.submit(FakeRequest("r", keys=KEYS, local_only="n")))
    await until(lambda: "r" in bench.router.requests and len(bench.router.requests["r"].avoid) == 2)
    assert not bench.submits() and not bench.transport.of(Lend)
    bench.transport.refuses.clear()
    await submitting
    ((_, submit),) = bench.submits()
    ((holder, lend),) = bench.transport.of(Lend)
    assert holder == "p0" and lend.key == submit.prefix.source.key
