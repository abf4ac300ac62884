"""Which decode worker a prefill worker sends KV to."""

import msgspec
import pytest

from orchestrator.config.settings import ConfigError, SLOConfig, parse_config
from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.decode_choice import Candidate, RequestInfo
from orchestrator.policy.policies import Policies
from orchestrator.policy.predict.estimates import MIN_FIT_SAMPLES
from orchestrator.policy.predict.pairing import pair
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.types import EngineSpeed

REQUEST = RequestInfo("r", prompt_tokens=2000, max_new_tokens=200, arrived_at=0.0)
NEAR, FAR = ("rack",), ()
LINKS = {"near": NEAR, "near2": NEAR, "far": FAR, "far2": FAR}


def worker(name: str, running: int = 0, free: int = 2000, **more: int) -> Candidate:
    return Candidate(name, 2000, free - running, 16, running, 0, 0, **more)


def predictor(transfers: int = MIN_FIT_SAMPLES + 2) -> Predictor:
    """TPOT is 10 ms, and 1 ms more for each sequence. `transfers`: measured over each class of links."""
    found = Predictor()
    found.set_prior(EngineSpeed(0.01, 4e-5, 0.01, 1e-3))
    for tokens in range(1000, 1000 * (transfers + 1), 1000):
        found.links.observe(NEAR, tokens, 2e-6 * tokens)
        found.links.observe(FAR, tokens, 20e-6 * tokens)
    return found


def chosen(*workers: Candidate, by: Predictor | None = None, request: RequestInfo = REQUEST) -> str | None:
    found = pair(request, workers, LINKS, decode_choice("kv_prefix"), by or predictor(), SLOConfig(tpot_s=0.1))
    return found.worker_id if found is not None else None


def test_the_faster_link_is_taken_until_its_workers_are_much_busier():
    # 36 ms of 2 s are as much as 7 sequences at first, and fewer where there are many.
    assert chosen(worker("far"), worker("near", running=5)) == "near"
    assert chosen(worker("near", running=5), worker("far")) == "near"
    assert chosen(worker("near", running=9), worker("far")) == "far"
    assert chosen(worker("near", running=9), worker("near2", running=3), worker("far")) == "near2"
    assert chosen(worker("near", running=55), worker("far", running=50)) == "far"


def test_prompts_that_wait_there_count_but_for_what_is_done_meanwhile():
    busy = msgspec.structs.replace(worker("near"), waiting_tokens=900)
    assert chosen(busy, worker("far")) == "near", "computed before the KV comes"
    assert chosen(msgspec.structs.replace(busy, placed_tokens=40_000), worker("far")) == "far"


def test_what_is_cached_is_not_sent():
    assert chosen(worker("near"), worker("far", running=2, cached_tokens=1984)) == "far", "next to nothing is sent"
    assert chosen(worker("near", running=5), worker("far", running=2, cached_tokens=1984)) == "far"


def test_a_worker_without_room_is_not_near():
    assert chosen(worker("near", free=20), worker("far")) == "far"
    assert chosen(worker("near", running=4, max_num_seqs=4), worker("far")) == "far"
    assert chosen(worker("near", free=20), worker("far", free=20)) == "near", "both have to wait"


def test_equal_links_are_as_near_as_possible_and_unknown_ones_are_tried():
    assert chosen(worker("far"), worker("near"), by=predictor(transfers=0)) == "near"
    workers = [worker("far"), worker("near", running=30)]
    assert (
        chosen(*workers, by=predictor(transfers=0)) == decode_choice("kv_prefix")(REQUEST, workers).worker_id == "far"
    )


def test_of_one_class_the_decode_choice_chooses():
    workers = [worker("near", running=3), worker("near2", running=1)]
    assert chosen(*workers) == decode_choice("kv_prefix")(REQUEST, workers).worker_id
    assert chosen() is None


def policies() -> Policies:
    return Policies(parse_config({"model": "m"}), decode_choice("kv_prefix"), predictor())


def test_far_workers_are_worth_it_where_the_near_ones_are_crowded():
    crowded = [worker("far"), worker("near", running=500, free=600)]
    assert policies().pair(REQUEST, crowded, LINKS, 0.0).worker_id == "far"
    assert policies().pair(REQUEST, [], {}, 0.0) is None


def test_the_requests_own_objective_counts():
    urgent = msgspec.structs.replace(REQUEST, ttft_slo_s=0.2)
    workers = [worker("far"), worker("near", running=12)]
    assert policies().pair(REQUEST, workers, LINKS, 0.0).worker_id == "far"
    assert policies().pair(urgent, workers, LINKS, 0.0).worker_id == "near"


@pytest.mark.parametrize("wrong", ["strict", "strict:", "nearest", "strict:a b"])
def test_another_pairing_is_refused(wrong: str):
    with pytest.raises(ConfigError, match=r"routing.pairing: expected .* like cost or strict:rack, got"):
        parse_config({"model": "m", "routing": {"pairing": wrong}})
