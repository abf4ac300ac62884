"""Coefficients fitted online."""

import random

import pytest

from orchestrator.policy.candidate import Candidate
from orchestrator.policy.predict import LineFit, Predictor
from orchestrator.types import EngineSpeed, QueueDepth


def test_line_fit_ignores_noise_and_follows_changes():
    rng = random.Random(1)
    fit = LineFit(1.0, memory=50)
    for _ in range(300):
        x = rng.uniform(0, 1000)
        fit.observe(x, 0.5 + 0.002 * x + rng.gauss(0, 0.01))
    assert fit.intercept == pytest.approx(0.5, abs=0.02) and fit.slope == pytest.approx(0.002, rel=0.03)
    for _ in range(300):
        x = rng.uniform(0, 1000)
        fit.observe(x, 0.1 + 0.004 * x)
    assert fit.slope == pytest.approx(0.004, rel=0.03)


def test_a_first_measurement_scales_what_is_known_of_a_line():
    fit = LineFit(16e-6, 0.008)
    fit.observe(13, 0.016416)  # twice what was expected of a short prompt
    assert (fit.intercept, fit.slope) == (pytest.approx(0.016), pytest.approx(32e-6))
    level = LineFit(0.0, 0.005)
    level.observe(13, 0.2)
    assert level.at(4000) == pytest.approx(0.2), "13 tokens say nothing of 4,000"
    for tokens in range(0, 4000, 100):
        fit.observe(tokens, 0.01 + tokens * 1e-5)
    for _ in range(2000):
        fit.observe(2000, 0.06)  # and from now on all are alike, and take twice as long
    assert fit.at(2000) == pytest.approx(0.06, rel=0.01) and fit.intercept > 0.01


@pytest.mark.parametrize("points", [[(100, 1.0)] * 20, [(0, 0.3)] * 20, [(1, 5.0), (1000, 1.0)] * 10])
def test_degenerate_data_never_give_a_negative_coefficient(points):
    fit = LineFit(0.1)
    for x, y in points:
        fit.observe(x, y)
    assert fit.slope >= 0 and fit.intercept >= 0
    assert fit.at(points[0][0]) > 0


def test_predictions_come_from_priors_and_then_from_measurements():
    predictor = Predictor(prior_s_per_token=0.001, prior_itl_s=0.02)
    worker = Candidate("d", 1000, 1000, 16, 0, 0, waiting_tokens=500)
    assert predictor.local_s([worker], 500)[0][0] == pytest.approx(1.02)
    assert predictor.remote_ttft_s(1000, 1000, QueueDepth(2, 4000, 0), 2) == pytest.approx(3.02), (
        "a transfer is a step of decode, until one is measured"
    )
    for tokens in range(100, 4000, 100):
        predictor.observe_prefill("p", tokens, 0.01 + tokens * 0.0002)
        predictor.observe_local("d", tokens, 0.05 + tokens * 0.0003)
        predictor.observe_itl("d", 0.03)
    assert predictor.local_s([worker], 500)[0][0] == pytest.approx(0.05 + 0.3 + 0.03, rel=0.05)
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
    assert predictor.local_s([worker], 1280)[1][0] == pytest.approx(0.02 + 1.28 / 128)
    for _ in range(1000):
        predictor.observe_output(64)
    assert predictor.local_s([worker], 1280)[1][0] == pytest.approx(0.02 + 1.28 / 32, rel=0.01)
