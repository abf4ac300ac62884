"""The policies together; the order of the prefill queue by length, priority and lateness; recall from the queue."""

import msgspec
import pytest

from orchestrator.config.settings import SLOConfig, parse_config
from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.decode_choice import Candidate, RequestInfo
from orchestrator.policy.placement import Local, PrefillView, Reject, Remote
from orchestrator.policy.policies import LATE_OBJECTIVES, MAX_STEPS, Policies, Waiting, delay_s, haste, latest_tpot
from orchestrator.policy.predict.estimates import LATEST
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.types import Offered, QueueDepth

TTFT_S, S_PER_TOKEN = 2.0, 0.001


def place(at=0.0, tokens=1000, weight=1.0, **more):
    return at + delay_s(tokens * S_PER_TOKEN, weight, TTFT_S, **more)


def test_score_is_arrival_plus_length_delay():
    assert 100.0 + delay_s(20.0, 2.0, TTFT_S) == 140.0


def test_weight_0_is_fcfs_and_large_weight_is_shortest_first():
    assert place(tokens=9000, weight=0.0) < place(at=0.1, tokens=10, weight=0.0)
    assert place(tokens=9000, weight=1e6) > place(at=9.0, tokens=10, weight=1e6)


def test_priority_step_is_one_ttft_objective():
    assert place() - place(priority=-1) == pytest.approx(TTFT_S)
    assert place(priority=3) - place() == pytest.approx(3 * TTFT_S)


def test_priority_starves_no_job():
    bound_s = 2 * MAX_STEPS * TTFT_S
    assert place(priority=10**9) < place(at=bound_s + 1, priority=-(10**9))
    assert place(priority=10**9) == place(priority=MAX_STEPS)


def policies(**sections):
    config = parse_config({"model": "m", **sections})
    return Policies(config, decode_choice(config.routing.decode_choice), Predictor(prior_s_per_token=0.001))


def request(tokens: int, **more) -> RequestInfo:
    return RequestInfo(id="r", prompt_tokens=tokens, max_new_tokens=64, arrived_at=0.0, **more)


IDLE_DECODE = Candidate("d0", 1000, 1000, 16, running=0, waiting=0, waiting_tokens=0)


def queue_of(tokens: int) -> PrefillView:
    return PrefillView(1, QueueDepth(1, tokens, 0))


def test_recall_moves_request_when_decode_worker_is_sooner():
    wait_on = policies().recall(request(1000), [IDLE_DECODE], queue_of(0))
    leave = policies().recall(request(1000), [IDLE_DECODE], queue_of(3000))
    assert wait_on is None and leave == Local("d0", "cost")
    busy = msgspec.structs.replace(IDLE_DECODE, running=3, waiting_tokens=50_000)
    assert policies().recall(request(1000), [busy], queue_of(3000)) is None


def test_recalled_requests_share_decode_workers():
    both = [IDLE_DECODE, msgspec.structs.replace(IDLE_DECODE, worker_id="d1")]
    queued = [(n, Waiting(request(1000), 1000, both, 0)) for n in range(9)]
    recalled = policies().recalled(queued, QueueDepth(9, 9000, 0), workers_ready=1)
    # The first job has none ahead of it and waits on. A job that leaves adds its tokens to its decode worker.
    assert [chosen.placed_tokens for _, _, chosen in recalled[:4]] == [0, 0, 1000, 1000]
    left = {n for n, _, _ in recalled}
    assert {local.worker_id for _, local, _ in recalled} == {"d0", "d1"} and 0 not in left and len(left) < 8
    assert policies(routing={"remote_prefill_min_tokens": 1}).recalled(queued, QueueDepth(9, 9000, 0), 1) == []


def test_jobs_of_other_routers_count_as_ahead():
    queued = [("mine", Waiting(request(1000), 1000, [IDLE_DECODE], 0))]
    assert policies().recalled(queued, QueueDepth(4, 4000, 0), workers_ready=1) == []
    assert policies().recalled(queued, QueueDepth(4, 4000, 0), workers_ready=1, others=3.0) != []


def test_queue_is_full_when_jobs_would_reach_claim_deadline():
    full, busy = queue_of(40_000), msgspec.structs.replace(IDLE_DECODE, running=3, waiting_tokens=50_000)
    assert policies().decide(request(1000), [busy], full, 0.0).decision == Local("d0", "queue_full")
    patient = policies(routing={"claim_timeout_s": 60.0})
    assert isinstance(patient.decide(request(1000), [busy], full, 0.0).decision, Remote)
    # By default the deadline follows the objective.
    assert isinstance(policies(slo={"ttft_s": 30.0}).decide(request(1000), [busy], full, 0.0).decision, Remote)


def test_measurements_replace_prior():
    chosen = policies()
    before = chosen.delay_s(request(1000), 1000)
    chosen.predictor.observe_prefill("p0", 500, 0.05)
    assert before == pytest.approx(1.0) and chosen.delay_s(request(1000), 1000) == pytest.approx(0.1)


def test_cached_prompt_overtakes_uncached_one_in_engine():
    chosen = policies(slo={"ttft_s": TTFT_S})
    received, cached, whole = (chosen.engine_delay_s(request(8000), tokens) for tokens in (0, 100, 8000))
    assert received == 0.0 and 1.0 < cached < whole
    assert chosen.engine_delay_s(request(8000, priority=-1), 100) == pytest.approx(cached - TTFT_S)


def test_newcomers_delay_engine_request_for_bounded_time():
    chosen = policies(slo={"ttft_s": TTFT_S})
    longest, later = (chosen.engine_delay_s(request(10**6), 10**6, later_s) for later_s in (0.0, 7.0))
    assert longest == pytest.approx(LATE_OBJECTIVES * TTFT_S) and later == pytest.approx(longest + 7.0)


def test_late_job_is_delayed_but_does_not_starve():
    chosen = policies(slo={"ttft_s": TTFT_S, "admission": "queue"})
    full = msgspec.structs.replace(IDLE_DECODE, running=3, waiting_tokens=50_000)
    late = chosen.decide(request(1000), [full], queue_of(10_000), 0.0)
    assert late.later_s == LATE_OBJECTIVES * TTFT_S
    assert chosen.decide(request(1000), [IDLE_DECODE], queue_of(0), 0.0).later_s == 0.0


def test_accepted_request_skips_admission():
    strict = policies(slo={"ttft_s": 0.5, "admission": "reject"})
    busy = msgspec.structs.replace(IDLE_DECODE, running=3, waiting_tokens=5000)
    assert isinstance(strict.decide(request(5000), [busy], queue_of(0), 0.0).decision, Reject)
    assert isinstance(strict.decide(request(5000), [busy], queue_of(0), 0.0, admission=False).decision, Remote)


def test_jobs_are_queued_by_their_own_deadlines():
    ours = policies(slo={"ttft_s": TTFT_S})
    usual = ours.delay_s(request(1000), 1000)
    assert usual - ours.delay_s(request(1000, ttft_slo_s=0.5), 1000) == pytest.approx(TTFT_S - 0.5)
    assert ours.delay_s(request(1000, ttft_slo_s=30.0), 1000) - usual == pytest.approx(30.0 - TTFT_S)
    behind = ours.engine_delay_s(request(1000, ttft_slo_s=30.0), 1000) - ours.engine_delay_s(request(1000), 1000)
    assert behind == pytest.approx(30.0 - TTFT_S)
    # What was prefilled elsewhere holds memory there: it goes first, whoever asked.
    assert ours.engine_delay_s(request(1000, ttft_slo_s=30.0)) == ours.engine_delay_s(request(1000))


@pytest.mark.parametrize(("own_s", "refused"), [(None, True), (30.0, False), (0.001, True)])
def test_a_request_is_admitted_by_its_own_objective(own_s, refused):
    ours = policies(slo={"ttft_s": TTFT_S, "admission": "reject"})
    decided = ours.decide(request(5000, ttft_slo_s=own_s), [IDLE_DECODE], queue_of(9000), now=0.0)
    assert isinstance(decided.decision, Reject) is refused


def test_a_tpot_objective_that_requests_bring_counts_while_prefill_has_room_or_all_bring_one():
    config, predictor = parse_config({"model": "m"}), Predictor(prior_s_per_token=0.001)
    tpot = latest_tpot(config.slo, predictor)
    mine = Policies(config, decode_choice(config.routing.decode_choice), predictor, tpot)

    def counted_s() -> list[float]:
        return [mine.slo_of(request(1000), prefill).tpot_s for prefill in (queue_of(100), queue_of(1000), None)]

    for _ in range(LATEST // 2):
        tpot.came(0.05)
    assert counted_s() == [0.05, config.slo.tpot_s, config.slo.tpot_s]
    for _ in range(LATEST // 2):
        tpot.came(0.05)
    assert counted_s() == [0.05] * 3


def test_haste_is_the_share_of_its_objective_that_others_have():
    slo = SLOConfig(ttft_s=0.5)
    assert [haste(own_s, slo) for own_s in (None, 0.5, 5.0, 0.001)] == [1.0, 1.0, 0.1, 1.0]
    patient, hurried = Offered.one(100, 100, 10, 0.1), Offered.one(100, 100, 10)
    assert hurried.patient_tokens2 == 0
    assert patient.prefill_tokens2 - patient.patient_tokens2 == pytest.approx(100.0), "as of ten tokens"
    assert msgspec.structs.replace(patient, patient_tokens2=0.0) == hurried
