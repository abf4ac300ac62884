"""Places in the prefill queue: by length, by deadline, by priority."""

import pytest

from orchestrator.policy.queue_order import delay_s, score
from orchestrator.policy.slack import MAX_STEPS

TTFT_S, S_PER_TOKEN = 2.0, 0.001


def place(order, at=0.0, tokens=1000, weight=1.0, **more):
    return at + delay_s(order, tokens, weight, S_PER_TOKEN, TTFT_S, **more)


def test_the_score_is_arrival_plus_the_length_penalty():
    assert score(100.0, 40, 2.0, 0.5) == 140.0


def test_by_length_weight_0_is_first_come_first_served_and_a_large_one_shortest_first():
    assert place("length", tokens=9000, weight=0.0) < place("length", at=0.1, tokens=10, weight=0.0)
    assert place("length", tokens=9000, weight=1e6) > place("length", at=9.0, tokens=10, weight=1e6)


def test_by_slack_the_long_must_start_earlier():
    assert place("slack", tokens=1500, weight=0.0) < place("slack", tokens=100, weight=0.0)
    assert place("slack", tokens=1500, weight=1.0) == place("slack", tokens=100, weight=1.0) == TTFT_S


@pytest.mark.parametrize("order", ["length", "slack"])
def test_a_priority_step_is_worth_one_objective(order):
    assert place(order) - place(order, priority=-1) == pytest.approx(TTFT_S)
    assert place(order, priority=3) - place(order) == pytest.approx(3 * TTFT_S)
    assert place(order, late=True) > place(order, at=10.0)


@pytest.mark.parametrize("order", ["length", "slack"])
def test_no_priority_puts_anybody_off_for_ever(order):
    bound_s = 2 * MAX_STEPS * TTFT_S
    assert place(order, priority=10**9) < place(order, at=bound_s + 1, priority=-(10**9))
    assert place(order, priority=10**9) == place(order, priority=MAX_STEPS)
