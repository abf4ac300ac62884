"""Classes of links, and what is learned of each."""

import pytest

from orchestrator.config.values import labels_of
from orchestrator.policy.predict.estimates import MIN_FIT_SAMPLES, STALE_DECISIONS, STALE_S, Links
from orchestrator.types import link_of

NEAR, FAR = ("rack",), ()


def test_a_link_is_known_by_the_labels_that_are_equal_at_both_ends() -> None:
    one = labels_of("h1", ["zone=a", "rack=r1"])
    assert link_of(one, one) == ("host", "rack", "zone")
    assert link_of(one, labels_of("h2", ["rack=r1", "zone=a"])) == ("rack", "zone")
    assert link_of(one, labels_of("h2", ["rack=r2", "zone=a"])) == ("zone",)
    assert link_of(one, labels_of("h2", [])) == link_of(one, {}) == ()
    assert link_of(labels_of("10.0.0.1", ["host=n"]), labels_of("10.0.0.2", ["host=n"])) == ("host",)


def learned(near_s: float = 1e-6, far_s: float = 8e-6) -> Links:
    """Seconds per token of both classes."""
    links = Links()
    links.begin(0.0)
    for tokens in range(1000, 1000 * (MIN_FIT_SAMPLES + 3), 1000):
        links.observe(NEAR, tokens, 0.01 + near_s * tokens)
        links.observe(FAR, tokens, 0.01 + far_s * tokens)
    return links


def test_the_slower_class_costs_the_difference() -> None:
    links = learned()
    assert links.extra_s(FAR, 2000) == pytest.approx(7e-6 * 2000)
    assert links.extra_s(NEAR, 2000) == 0
    assert links.extra_s(("zone",), 2000) == 0, "nobody has measured it: it may be as fast"


def test_a_single_class_and_few_measurements_cost_nothing() -> None:
    links = Links()
    links.begin(0.0)
    for _ in range(MIN_FIT_SAMPLES - 1):
        links.observe(FAR, 2000, 1.0)
        links.observe(NEAR, 2000, 0.001)
    assert links.extra_s(FAR, 2000) == 0
    links.observe(FAR, 2000, 1.0)
    assert links.extra_s(FAR, 2000) == 0, "there is nothing to compare it with"
    links.observe(NEAR, 2000, 0.001)
    assert links.extra_s(FAR, 2000) > 0.9


def test_a_bad_time_does_not_shut_a_class_for_good() -> None:
    links = learned()
    now = 0.0
    for _ in range(2 * STALE_DECISIONS):
        now += STALE_S / STALE_DECISIONS
        links.begin(now)
        links.observe(NEAR, 2000, 0.012)
    assert links.extra_s(FAR, 2000) == 0, "as nobody has used it for long, it may be tried"
    links.chosen(FAR)
    assert links.extra_s(FAR, 2000) > 0.01, "by one request"
    links.observe(FAR, 2000, 0.012)
    assert links.extra_s(FAR, 2000) < 0.001, "what that one measures replaces what was known"
