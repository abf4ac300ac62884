"""What the predictor learns from requests."""

import pytest
from support_bench import Bench, FakeRequest, counted

from orchestrator.frontend.edge import Objectives
from orchestrator.policy.decode_choice import RequestInfo
from orchestrator.policy.predict.estimates import LATE_IN_A_ROW, LATEST
from orchestrator.router.request import Overloaded
from orchestrator.types import PrefixEvents, QueueDepth, Role
from orchestrator.wire.messages import Prefilled, Rejected


async def prefilled_together(bench, names, seconds, tokens=1000):
    for name in names:
        await bench.router.submit(FakeRequest(name, tokens))
        bench.claim(name)
    for name in names:
        bench.say("p0", Prefilled(name, 1, seconds))


async def test_batched_prompts_do_not_understate_prefill_speed():
    bench = Bench()
    bench.report("p0", prefill_tokens_per_s=4000.0)
    await prefilled_together(bench, "abcd", seconds=1.0)  # four of 1000 tokens in one second
    predictor = bench.router.learning.predictor
    assert predictor.prefill_s(1000) == pytest.approx(0.25)
    assert predictor.backlog_s(QueueDepth(8, 8000, 0), 2) == pytest.approx(1.0)


async def test_simultaneous_shared_prefix_counts_once():
    bench = Bench()
    bench.prefixes.take_events(PrefixEvents("d0", 1, stored=[999]), 0.0)  # without any, nobody looks at keys
    for name in "abcd":
        await bench.router.submit(FakeRequest(name, 5000, keys=list(range(1, 256 + 1))))  # 4096 tokens in blocks of 16
    assert bench.router.learning.offered.prefill_tokens == 5000 + 3 * (5000 - 4096)


async def test_objectives_are_counted_by_class_and_by_whether_they_were_met():
    bench = Bench(first_token="decode")
    for name, ttft_slo_s in (("fast", 60.0), ("strict", 1e-9)):
        await bench.router.submit(FakeRequest(name, own=Objectives(ttft_slo_s, 60.0, name)))
        bench.claim(name)
        decode = bench.bound_to()
        bench.say("p0", Prefilled(name, 1, 0.1))
        bench.tokens(decode, name, [5, 6], finish=1)
    for name, objective, met in (("fast", "ttft", "true"), ("fast", "tpot", "true"), ("strict", "ttft", "false")):
        assert counted("pd_objectives", slo_class=name, objective=objective, met=met) == 1, (name, objective)
    assert counted("pd_objectives", slo_class="strict", objective="ttft", met="true") == 0
    assert bench.router.learning.recent.judged == {"fast": 1, "strict": 1}
    assert +bench.router.learning.recent.met == {"fast": 1}


async def test_the_tpot_objectives_that_requests_bring_are_counted_for_all():
    bench = Bench()
    for number in range(LATEST):
        await bench.router.submit(FakeRequest(f"r{number}", 10, own=Objectives(None, 0.03)))
    assert bench.router.learning.tpot.seconds == 0.03
    policies = bench.router._decider._policies
    assert policies.slo_of(RequestInfo("any", 10, 10, 0.0)).tpot_s == 0.03, "also of one that brings none"


async def test_what_is_refused_unread_has_missed_its_objectives():
    bench = Bench(slo={"classes": {"chat": {"ttft_s": 1.0}}})
    for name in ("d0", "d1", "p0"):
        bench.fleet.remove(name)
    before = counted("pd_objectives", slo_class="chat", objective="ttft", met="false")
    ended = counted("pd_requests", outcome="rejected")
    for name in ("chat", "chat", "made-up"):  # nobody has checked yet whether there is such a class
        with pytest.raises(Overloaded):
            bench.router.check_admission(name)
    assert bench.router.learning.recent.judged == {"chat": 2, "": 1} and not +bench.router.learning.recent.met
    assert counted("pd_objectives", slo_class="chat", objective="ttft", met="false") == before + 2
    assert counted("pd_requests", outcome="rejected") == ended + 3
    assert counted("pd_objectives", slo_class="made-up", objective="ttft", met="false") == 0


async def test_what_is_invalid_is_not_counted_against_the_fleet():
    before = {outcome: counted("pd_requests", outcome=outcome) for outcome in ("invalid", "failed")}
    bench = await Bench.asked(FakeRequest("r", prompt_tokens=10))
    bench.say(bench.bound_to(), Rejected("r", 1, "no such parameter", final=True))
    after = {outcome: counted("pd_requests", outcome=outcome) for outcome in ("invalid", "failed")}
    assert after == {"invalid": before["invalid"] + 1, "failed": before["failed"]}
    offered, recent = bench.router.learning.offered, bench.router.learning.recent
    assert not recent.judged and (offered.ended, offered.late) == (0, 0)
    bench.assert_no_leaks()


async def test_unmeasured_worker_teaches_nothing():
    bench = Bench()
    before = bench.router.learning.predictor.prefill_s(1000)
    await prefilled_together(bench, "ab", seconds=1.0)
    bench.report("p0", prefill_tokens_per_s=0.0)
    await prefilled_together(bench, "cd", seconds=1.0)
    assert bench.router.learning.predictor.prefill_s(1000) == before


async def test_what_was_connected_ends_with_either_worker():
    bench = Bench(first_token="decode")
    learning = bench.router.learning
    for name in "abcd":
        await bench.router.submit(FakeRequest(name))
        bench.claim(name)
        decode = bench.bound_to()
        bench.say("p0", Prefilled(name, 1, 0.1))
        bench.tokens(decode, name, [5], finish=1)
    assert learning._connected == {"d0": {"p0"}, "d1": {"p0"}}
    bench.lose("d0")
    assert learning._connected == {"d1": {"p0"}}
    bench.lose("p0")
    assert learning._connected == {"d1": set()}


@pytest.mark.parametrize("again", [False, True], ids=["gone", "started again"])
async def test_kv_that_lacks_since_its_prefill_worker_has_gone_says_nothing_of_one_to_come(again):
    bench = Bench(first_token="decode")
    learning, bound = bench.router.learning, {}
    for number in range(2 * LATE_IN_A_ROW + 2):
        await bench.router.submit(FakeRequest(f"r{number}"))
        bench.claim(f"r{number}")
        bench.say("p0", Prefilled(f"r{number}", 1, 0.2))
        bound[f"r{number}"] = bench.bound_to()
    came = dict([bound.popitem(), bound.popitem()])
    bench.lose("p0")
    if again:
        bench.add_worker("p0", Role.PREFILL, engine_id="p0-engine-2")
    for name, decode in bound.items():
        bench.tokens(decode, name, [5], computed=1000)
    assert not learning.late._pairs
    for name, decode in came.items():
        bench.tokens(decode, name, [5])
    assert all(request.retries == [] for request in bench.router.requests.values())
    assert not learning._connected


@pytest.mark.parametrize("computed", [None, 100, 1000], ids=["unsaid", "fetched", "not fetched"])
async def test_a_local_prompt_counts_with_what_was_computed_of_it(computed, monkeypatch):
    """Its beginning may be fetched from another worker or not, since those two rest from each other, or cached no more:
    the worker would count as slow, and more prompts go elsewhere."""
    bench, seen = Bench(), []
    await bench.router.submit(FakeRequest("r", local_only="a test"))
    active, learning = bench.router.requests["r"], bench.router.learning
    active.placed = active.placed.with_cached(900, 1000)
    monkeypatch.setattr(learning.predictor, "observe_local", lambda worker, tokens, seconds: seen.append(tokens))
    bench.tokens(active.decode_worker, "r", [5], computed=computed)
    assert seen == [computed or 100]
