from typing import NamedTuple

import pytest

from orchestrator.config.settings import Config
from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.claims import choose_claims
from orchestrator.policy.decode_choice import Candidate, RequestInfo
from orchestrator.policy.placement import Local, PrefillView, Remote
from orchestrator.policy.policies import Policies
from orchestrator.policy.predict.adapters import (
    FEW,
    MAX_HOLDERS,
    MAX_KNOWN,
    AdapterDemand,
    AdapterPlaces,
    adapter_s,
    with_placed,
)
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.types import QueueDepth, WindowJob

LOAD_S, REST_S = 0.1, 2.0


def spent(requests: dict[int, int], slots: int = 2, adapter: int = 7, demand: AdapterDemand | None = None) -> float:
    return adapter_s(adapter, requests, slots, LOAD_S, REST_S, demand or AdapterDemand())


class Worker(NamedTuple):
    name: str
    adapters: dict[int, int]
    running: int = 0
    slots: int = 2


def pool(workers: list[Worker]) -> AdapterPlaces:
    places = AdapterPlaces()
    for worker in workers:
        places.update(worker.name, worker.slots, worker.adapters, worker.running)
    return places


def candidates(workers: list[Worker]) -> list[Candidate]:
    return [Candidate(w.name, 1000, 1000 - 10 * w.running, 16, w.running, 0, 0) for w in workers]


def request(adapter: int = 7, tokens: int = 100) -> RequestInfo:
    return RequestInfo("r", tokens, 100, 0.0, adapter=adapter)


def policies() -> Policies:
    return Policies(Config(model="demo"), decode_choice("kv_prefix"), Predictor())


def chosen(workers: list[Worker], adapter: int = 7) -> str:
    made = policies()
    best = made.choose(request(adapter), made.priced(adapter, candidates(workers), pool(workers)))
    assert best is not None
    return best.worker_id


def test_an_adapter_that_is_there_costs_nothing():
    assert spent({7: 0}) == spent({7: 3, 8: 1}) == spent({8: 1, 7: 0}, slots=3) == 0.0


def test_a_free_slot_costs_a_load_and_a_taken_one_more():
    assert spent({8: 1}) == LOAD_S
    demand = AdapterDemand()
    demand.count(9)
    assert LOAD_S < spent({8: 1, 9: 0}, demand=demand) <= 3 * LOAD_S


def test_where_requests_have_all_slots_another_adapter_waits_for_the_shortest_of_them():
    assert spent({8: 3, 9: 2}) == pytest.approx(LOAD_S + 2 * REST_S)
    assert spent({8: 3, 9: 2, 10: 4}) == pytest.approx(LOAD_S + 2 * REST_S * 2)  # behind the one that waits already
    assert 0 < spent({8: 3, 9: 2, 7: 1}) < REST_S  # it is among those that wait, or runs


def test_displacing_what_is_asked_for_costs_more():
    demand = AdapterDemand()
    for adapter in [8] * 50 + [9]:
        demand.count(adapter)
    assert spent({8: 0, 10: 0}, demand=demand) > spent({9: 0, 10: 0}, demand=demand) > LOAD_S


def test_demand_is_of_the_latest_requests_and_bounded():
    demand = AdapterDemand()
    for _ in range(500):
        demand.count(1)
    for _ in range(5000):
        demand.count(2)
    assert demand.preferred(1, 2) < 0.01
    for adapter in range(3 * MAX_KNOWN):
        demand.count(adapter)
    assert len(demand._asked) <= MAX_KNOWN + 1


def test_the_decode_choice_prefers_a_worker_that_has_the_adapter_until_it_is_far_fuller():
    assert chosen([Worker("a", {}, 1), Worker("b", {7: 1}, 3)]) == "b"
    assert chosen([Worker("a", {}, 1), Worker("b", {7: 1}, 60)]) == "a"
    assert chosen([Worker("a", {8: 1, 9: 1}, 1), Worker("b", {8: 1}, 3)]) == "b"  # a slot is free there


def test_a_request_without_an_adapter_and_a_fleet_without_lora_see_no_difference():
    made, workers = policies(), [Worker("a", {8: 1, 9: 1}), Worker("b", {}, 5)]
    seen = candidates(workers)
    assert made.priced(0, seen, pool(workers)) is seen
    assert made.priced(7, seen, pool([Worker("a", {}, slots=0)])) == seen


def test_a_burst_of_one_adapter_stays_together_and_bursts_of_several_spread():
    there: dict[str, dict[int, int]] = {"a": {}, "b": {}}
    for adapter in [7, 7, 8, 8, 7, 8]:
        name = chosen([Worker(n, requests, slots=1) for n, requests in there.items()], adapter=adapter)
        there[name] = with_placed(there[name], [adapter])
    assert sorted(there.values(), key=str) == [{7: 3}, {8: 3}]


def test_placement_weighs_a_load_by_the_prefill_pool_against_a_holder():
    made, idle = policies(), QueueDepth(0, 0, 0)
    held, absent = [Worker("a", {7: 1}, 1)], [Worker("a", {9: 1}, 1)]

    def placed(workers: list[Worker], adapter_tokens: int) -> object:
        view = PrefillView(2, idle, adapter_tokens=adapter_tokens)
        seen = made.priced(7, candidates(workers), pool(workers))
        return made.decide(request(tokens=60), seen, view, 0.0).decision

    load_tokens = made.predictor.adapter_load_tokens
    assert load_tokens == pytest.approx(LOAD_S / made.predictor.s_per_token, abs=1)
    assert isinstance(placed(held, load_tokens), Local)
    full = [Worker("a", {8: 1, 9: 1}, 2)]
    assert isinstance(placed(full, 0), Remote)  # a prefill worker has it: the first token need not wait for a slot
    assert isinstance(placed(absent, load_tokens), Local)  # either way the decode worker loads it


def test_prefill_workers_claim_what_they_have_the_adapter_of_and_leave_it_to_others_for_the_time_of_a_load():
    job = WindowJob("r", 0.0, 100, 0.05, adapter_here=0, cached_elsewhere=1000)
    assert choose_claims([job], 1000, True, 1e-4) == []
    waited = WindowJob("r", 0.0, 100, 0.2, adapter_here=0, cached_elsewhere=1000)
    assert choose_claims([waited], 1000, True, 1e-4) == ["r"]
    here = WindowJob("r", 0.0, 100, 0.0, adapter_here=1000, cached_elsewhere=1000)
    assert choose_claims([here], 1000, True, 1e-4) == ["r"]
    # A busy one takes its own, which an idle one would have to load.
    assert choose_claims([here], 1000, False, 1e-4, share_tokens=10) == ["r"]
    later = WindowJob("later", 0.01, 100, 0.0, adapter_here=1000)
    assert choose_claims([WindowJob("first", 0.0, 100, 0.0), later], 100, False, 1e-4) == ["later"]


def test_a_job_names_holders_with_least_to_compute():
    places = pool([Worker(f"p{n}", {7: 0}, 100 - n) for n in range(16)] + [Worker(f"other{n}", {}) for n in range(30)])
    assert places.holders(7) == [f"p{n}" for n in range(15, 7, -1)]
    assert places.holders(8) is None
    for n in range(30):
        places.remove(f"other{n}")
    assert places.holders(7) == []  # nearly every worker has it


def test_of_many_holders_a_job_names_the_best_of_a_few_and_in_time_of_all():
    places = pool([Worker(f"p{n}", {7: 0}, n) for n in range(500)] + [Worker(f"other{n}", {}) for n in range(501)])
    named = [places.holders(7) or [] for _ in range(500)]
    assert all(len(names) == MAX_HOLDERS and names == sorted(names, key=lambda name: int(name[1:])) for names in named)
    assert {name for names in named for name in names} >= {f"p{n}" for n in range(500 - MAX_HOLDERS)}


def test_of_many_workers_a_few_are_considered_that_have_it_or_a_free_slot_and_in_time_all():
    places = pool(
        [Worker(f"full{n}", {8: 1, 9: 1}) for n in range(500)] + [Worker(f"free{n}", {9: 0}) for n in range(30)]
    )
    for n in range(30):
        places.update(f"holder{n}", 2, {7: 1, 9: 1})
    seen = [places.some(7) for _ in range(200)]
    assert all(len(names) == 2 * FEW for names in seen)
    assert {name for names in seen for name in names} == {
        f"{kind}{n}" for kind in ("holder", "free") for n in range(30)
    }
    for n in range(30):
        places.update(f"holder{n}", 2, {9: 1})
    assert not places._having.get(7) and len(places.some(7)) == FEW
    for worker_id in list(places._there):
        places.remove(worker_id)
    assert not places._having and not places._free


def test_where_no_prefill_worker_has_an_adapter_it_costs_two_loads():
    made, absent, there = policies(), pool([Worker("p", {9: 0})]), pool([Worker("p", {7: 0}), Worker("q", {})])
    load_tokens = made.predictor.adapter_load_tokens
    assert made.at_prefill(7, absent) == ({}, 2 * load_tokens)
    assert made.at_prefill(7, there) == ({"p": load_tokens}, 0)
    assert made.at_prefill(0, absent) == ({}, 0)
