"""A pair between which no KV comes rests, is tried by one prompt at a time, and counts again once KV has come."""

import pytest

from orchestrator.policy.predict.estimates import FIRST_REST_S, LATE_IN_A_ROW, MOST_REST_S, TRIAL_S, LatePairs


def late_pairs(at: float = 0.0) -> LatePairs:
    pairs = LatePairs()
    for _ in range(LATE_IN_A_ROW):
        pairs.late("p", "d", at)
    return pairs


def test_a_pair_rests_after_a_few_late_ones_in_a_row() -> None:
    pairs = LatePairs()
    for _ in range(LATE_IN_A_ROW - 1):
        pairs.late("p", "d", 0.0)
        assert pairs.resting("p", 0.0) == []
    pairs.came("p", "d")
    pairs.late("p", "d", 0.0)
    assert pairs.resting("p", 0.0) == [], "KV came in between"
    pairs.late("p", "d", 0.0)
    assert pairs.resting("p", 0.0) == ["d"] and pairs.resting("other", 0.0) == []
    pairs.came("p", "d")
    assert pairs.resting("p", 0.0) == []


def test_one_prompt_at_a_time_tries_it_after_ever_longer_rests() -> None:
    pairs, now, rests = late_pairs(), 0.0, []
    for _ in range(8):
        begun = now
        while pairs.resting("p", now):
            now += 1.0
        rests.append(now - begun)
        assert pairs.resting("p", now) == [], "who looks may choose another worker"
        pairs.tried("p", "d", now)
        assert pairs.resting("p", now) == pairs.resting("p", now + TRIAL_S - 1) == ["d"], "it is alone"
        now += 4.0
        pairs.late("p", "d", now)
    assert rests == [min(MOST_REST_S, FIRST_REST_S * 2**number) for number in range(8)]
    pairs.tried("p", "d", now + MOST_REST_S)
    assert pairs.resting("p", now + MOST_REST_S) == ["d"]
    assert pairs.resting("p", now + MOST_REST_S + TRIAL_S) == [], "the prompt that was to try it has said nothing"


def test_those_that_were_on_their_way_together_count_as_one_failure() -> None:
    pairs = late_pairs()
    assert not any(pairs.late("p", "d", 0.5) for _ in range(50))
    assert pairs.resting("p", FIRST_REST_S) == []
    pairs.tried("p", "d", FIRST_REST_S)
    assert [pairs.late("p", "d", FIRST_REST_S + 4) for _ in range(2)] == [True, False]
    pairs.tried("p", "other", 0.0)
    assert pairs.resting("p", 0.5) == ["d"], "of one that has come nothing is known"


def test_a_worker_that_is_gone_is_forgotten() -> None:
    for worker in ("p", "d"):
        pairs = late_pairs()
        pairs.forget(worker)
        assert pairs.resting("p", 0.0) == []


def test_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that have left nobody may be told, and whoever comes has another name."""
    monkeypatch.setattr("orchestrator.policy.predict.estimates.MOST_PAIRS", 3)
    pairs = late_pairs()
    for number in range(2):
        pairs.late(f"left-{number}", "d", 0.0)
    pairs.late("p", "d", 0.0)
    pairs.late("left-2", "d", 0.0)
    assert pairs.resting("p", 0.0) == ["d"], "it was late after the first of those that left"
    for number in range(3, 6):
        pairs.late(f"left-{number}", "d", 0.0)
    assert pairs.resting("p", 0.0) == [] and len(pairs._pairs) == 3
