"""Places in the prefill queue: by length, by priority, and of those that are late whatever is done."""

import pytest

from orchestrator.policy.queue_order import MAX_STEPS, delay_s

TTFT_S, S_PER_TOKEN = 2.0, 0.001


def place(at=0.0, tokens=1000, weight=1.0, **more):
    return at + delay_s(tokens, weight, S_PER_TOKEN, TTFT_S, **more)


def test_the_place_is_arrival_plus_the_length_penalty():
    assert 100.0 + delay_s(40, 2.0, 0.5, TTFT_S) == 140.0


def test_weight_0_is_first_come_first_served_and_a_large_one_shortest_first():
    assert place(tokens=9000, weight=0.0) < place(at=0.1, tokens=10, weight=0.0)
    assert place(tokens=9000, weight=1e6) > place(at=9.0, tokens=10, weight=1e6)


def test_a_priority_step_is_worth_one_objective():
    assert place() - place(priority=-1) == pytest.approx(TTFT_S)
    assert place(priority=3) - place() == pytest.approx(3 * TTFT_S)


def test_a_late_job_goes_behind_those_in_time_but_not_for_ever():
    assert place(late=True) > place(at=10.0)
    assert place(late=True) < place(at=100.0)


def test_no_priority_puts_anybody_off_for_ever():
    bound_s = 2 * MAX_STEPS * TTFT_S
    assert place(priority=10**9) < place(at=bound_s + 1, priority=-(10**9))
    assert place(priority=10**9) == place(priority=MAX_STEPS)
