"""Coefficients fitted online."""

import math

import pytest

from orchestrator.policy.decode_choice import Candidate
from orchestrator.policy.predict.estimates import STALE_DECISIONS, STALE_S
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.types import EngineSpeed, QueueDepth


def test_predictions_come_from_priors_and_then_from_measurements():
    predictor = Predictor(prior_s_per_token=0.001, prior_itl_s=0.02)
    worker = Candidate("d", 1000, 1000, 16, 0, 0, waiting_tokens=500)
    assert predictor.local_ttft_s([worker], 500)[0] == pytest.approx(1.02)
    assert sum(predictor.remote_s(1000, 1000, QueueDepth(2, 4000, 0), 2)) == pytest.approx(3.02), (
        "a transfer is a step of decode, until one is measured"
    )
    for tokens in range(100, 4000, 100):
        predictor.observe_prefill("p", tokens, 0.01 + tokens * 0.0002)
        predictor.observe_local("d", tokens, 0.05 + tokens * 0.0003)
        predictor.observe_itl("d", 0.03)
    assert predictor.local_ttft_s([worker], 500)[0] == pytest.approx(0.05 + 0.3 + 0.03, rel=0.05)
    assert predictor.prefill_s(1000) == pytest.approx(0.21, rel=0.05)
    shown = predictor.coefficients()
    assert shown.prefill_s["p"] == pytest.approx((0.01, 0.0002), rel=0.05)
    predictor.forget("d")
    assert "d" not in predictor.coefficients().local_s


def test_tpot_depends_on_decoding_sequences():
    predictor = Predictor(prior_itl_s=0.02)
    assert predictor.tpot_line == (0.02, 0.0)
    predictor.set_prior(EngineSpeed(0.0, 4e-5, 0.01, 1e-4))
    assert predictor.tpot_line == (pytest.approx(0.0101), 1e-4)
    for worker_id in ("d0", "d1"):
        predictor.observe_itl(worker_id, 0.03, 50)
    assert predictor.tpot_line == (0.01, pytest.approx(0.02 / 50))


def test_local_prefill_delays_decoding_sequences():
    predictor = Predictor(prior_s_per_token=0.001, prior_itl_s=0.02)
    worker = Candidate("d", 1000, 1000, 16, 8, 0, waiting_tokens=0)
    assert predictor.local_s([worker], 1280)[0][2] == pytest.approx(0.02 + 1.28 / 128)
    for _ in range(1000):
        predictor.observe_output(64)
    assert predictor.local_s([worker], 1280)[0][2] == pytest.approx(0.02 + 1.28 / 32, rel=0.01)


def test_workers_where_the_first_token_comes_too_late_are_left_out():
    predictor = Predictor(prior_s_per_token=0.001, prior_itl_s=0.02)
    workers = [Candidate(f"d{n}", 1000, 1000, 16, n, 0, waiting_tokens=100 * n) for n in range(10)]
    everyone = predictor.local_s(workers, 500)
    assert [found[:2] for found in everyone] == list(zip(workers, predictor.local_ttft_s(workers, 500), strict=True))
    ttft_s = everyone[4][1]
    assert predictor.local_s(workers, 500, most_s=ttft_s) == everyone[:5], "as late is not too late"
    for most_s in (math.nextafter(ttft_s, 0), ttft_s - 0.01):  # less by one bit, and by a part of the ITL
        assert predictor.local_s(workers, 500, most_s=most_s) == everyone[:4]


NO_QUEUE = QueueDepth(0, 0, 0)
WORKER = Candidate("d", 1000, 1000, 16, 0, 0, waiting_tokens=0)


def learned(seconds: float = 5.0, decisions: int = STALE_DECISIONS) -> Predictor:
    """A predictor to which everything looked bad, with so many decisions since then, in less than `STALE_S`."""
    predictor = Predictor(prior_s_per_token=0.001, prior_itl_s=0.02)
    for tokens in range(100, 2000, 100):
        predictor.begin(0.0)
        predictor.observe_prefill("p", tokens, seconds)
        predictor.observe_transfer(tokens, seconds)
        predictor.observe_wait(1000, 0.0, seconds)
        predictor.observe_local("d", tokens, seconds)
        predictor.observe_itl("d", seconds)
    for at in range(decisions):
        predictor.begin(STALE_S * at / decisions)
    return predictor


def remote_s(predictor: Predictor) -> float:
    return sum(predictor.remote_s(1000, 1000, NO_QUEUE, 1))


def local_s(predictor: Predictor) -> float:
    return predictor.local_ttft_s([WORKER], 1000)[0]


PRIOR_S = 1000 * 0.001 + 0.02


def test_what_nobody_measures_any_more_is_predicted_by_priors():
    predictor = learned()
    assert remote_s(predictor) == pytest.approx(15) and local_s(predictor) == pytest.approx(10)
    predictor.begin(STALE_S)
    assert remote_s(predictor) == pytest.approx(PRIOR_S) and local_s(predictor) == pytest.approx(PRIOR_S)
    assert predictor.transfer_error_s(1000) == pytest.approx(0.02)
    assert (predictor.s_per_token, predictor.itl_s("d"), predictor.mean_itl_s(["d"])) == (0.001, 0.02, 0.02)


def test_neither_time_alone_nor_decisions_alone_make_an_estimate_stale():
    quiet, busy = learned(decisions=STALE_DECISIONS - 2), learned()
    quiet.begin(100 * STALE_S)
    for _ in range(100 * STALE_DECISIONS):
        busy.begin(0.99 * STALE_S)
    assert remote_s(quiet) == remote_s(busy) == pytest.approx(15)


def test_one_request_tries_a_stale_estimate():
    predictor = learned()
    predictor.begin(STALE_S)
    predictor.placed_remotely(1000)
    assert remote_s(predictor) == pytest.approx(15), "what else is predicted for it"
    predictor.placed_locally("d")
    for _ in range(STALE_DECISIONS - 1):
        predictor.begin(2 * STALE_S)
        assert remote_s(predictor) == pytest.approx(15) and local_s(predictor) == pytest.approx(10)
        predictor.placed_remotely(1000)
    predictor.begin(2 * STALE_S)
    assert remote_s(predictor) == pytest.approx(PRIOR_S), "the trial was lost, and there is another"


@pytest.mark.parametrize("seconds", [0.1, 9.0])
def test_what_a_trial_measures_replaces_what_was_known(seconds):
    predictor = learned()
    predictor.begin(STALE_S)
    predictor.placed_remotely(1000)
    predictor.placed_locally("d")
    predictor.begin(STALE_S)
    predictor.observe_wait(1000, 0.0, seconds)
    predictor.observe_prefill("p", 1000, seconds)
    predictor.observe_transfer(1000, seconds)
    predictor.observe_local("d", 1000, seconds)
    predictor.observe_itl("d", seconds)
    assert remote_s(predictor) == pytest.approx(3 * seconds) and local_s(predictor) == pytest.approx(2 * seconds)
    assert predictor.transfer_error_s(1000) == pytest.approx(abs(seconds - 0.02))


def test_workers_share_the_decisions_that_make_one_stale():
    predictor = learned()
    predictor.observe_local("e", 1000, 1.0)
    predictor.begin(STALE_S)
    assert predictor.coefficients().local_s.keys() == {"d", "e"}
    assert local_s(predictor) > 5, "each of two is asked half as often"
