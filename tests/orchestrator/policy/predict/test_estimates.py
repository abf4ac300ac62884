"""Lines and means fitted online, how they age, and maxima of recent time."""

import random

import pytest

from orchestrator.policy.predict.estimates import STALE_DECISIONS, STALE_S, LineFit, RecentMaximum, Smoothed


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


def renewed(estimate, at, decisions):
    estimate.renew(at, decisions)
    return estimate


def test_use_in_every_decision_makes_nothing_old():
    mean, fit = Smoothed(0.0, weight=0.1), LineFit(1.0)
    plain_mean, plain_fit = Smoothed(0.0, weight=0.1), LineFit(1.0)
    rng = random.Random(1)
    for n in range(100):
        x, y = rng.uniform(0, 1000), rng.random()
        renewed(mean, 1e-9 * n, n).observe(y)
        renewed(fit, 1e-9 * n, n).observe(x, y)
        plain_mean.observe(y)
        plain_fit.observe(x, y)
    assert mean.value == pytest.approx(plain_mean.value) and fit.at(500) == pytest.approx(plain_fit.at(500))


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_rare_observations_outweigh_old_ones_by_their_age(share):
    """200 bad ones, and then good ones of which few come in `STALE_S`: the bad ones count less and less."""
    fit = LineFit(0.0, 0.02)
    for n in range(200):
        renewed(fit, 0.0, n).observe(1000, 5.0)
    for n in range(1, 31):
        renewed(fit, share * STALE_S * n / 2, 200 + STALE_DECISIONS * n).observe(1000, 0.02)
    assert fit.at(1000) < (0.05 if share == 1 else 3.5)


def test_a_mean_is_restarted_by_a_trial():
    mean = Smoothed(1.0, weight=0.1)
    for n in range(50):
        renewed(mean, 0.0, n).observe(9.0)
    assert mean.age(STALE_S, 49 + STALE_DECISIONS) == 1
    mean.put_on_trial(STALE_S, 49 + STALE_DECISIONS)
    assert mean.age(STALE_S, 49 + STALE_DECISIONS) == 0 and mean.value == 9.0
    renewed(mean, STALE_S, 50 + STALE_DECISIONS).observe(2.0)
    renewed(mean, STALE_S, 51 + STALE_DECISIONS).observe(4.0)
    assert mean.value == pytest.approx(3.0, abs=0.1)


def test_nothing_is_stale_before_it_is_observed():
    assert LineFit(1.0).age(1e9, 10**9) == 0 and not LineFit(1.0).is_stale(1e9, 10**9)


def test_maximum_is_of_the_last_one_to_two_ages():
    best = RecentMaximum(10.0)
    assert best.at(0.0) == 0
    best.observe(5.0, 1.0)
    best.observe(3.0, 2.0)
    assert [best.at(now) for now in (2.0, 10.9, 19.0)] == [5.0, 5.0, 5.0]
    best.observe(4.0, 19.5)
    assert [best.at(now) for now in (20.5, 29.0, 30.0, 1e6)] == [4.0, 4.0, 0.0, 0.0]
