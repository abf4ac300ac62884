"""The attempts that a worker holds, and what they sum up to."""

import pytest

from workers.attempts import Attempt, Attempts
from workers.engine import Phase


def attempt_of(key: str, tokens: int = 100, phase: Phase = Phase.DECODE, frontend: str = "f") -> Attempt:
    return Attempt(key, key.split("#")[0], int(key.split("#")[1]), frontend, phase, tokens, 0.0)


def test_the_sums_of_the_attempts() -> None:
    attempts = Attempts()
    one, two = attempt_of("a#1", 100), attempt_of("b#1", 50, Phase.PREFILL)
    attempts.add(one)
    attempts.add(two)
    assert (attempts.waiting_tokens, attempts.claimed_tokens, attempts.prefill_count, len(attempts)) == (150, 50, 1, 2)
    attempts.mark_computed(two)
    attempts.mark_computed(two)
    assert (attempts.waiting_tokens, attempts.claimed_tokens) == (100, 0)
    attempts.remove(one)
    attempts.remove(one)
    attempts.remove(two)
    assert (attempts.waiting_tokens, attempts.claimed_tokens, attempts.prefill_count, len(attempts)) == (0, 0, 0, 0)
    with pytest.raises(ValueError, match="a#1 is held already"):
        attempts.add(attempt_of("a#1"))
        attempts.add(attempt_of("a#1"))


def test_removing_an_older_attempt_does_not_forget_the_newer() -> None:
    attempts = Attempts()
    older, newer = attempt_of("a#1"), attempt_of("a#2")
    attempts.add(older)
    attempts.add(newer)
    attempts.remove(older)
    assert attempts.find(Phase.DECODE, "a") is newer


def test_pushing_attempts_are_found_by_abort_and_frontend() -> None:
    attempts = Attempts()
    for key, frontend in (("a#2", "f"), ("b#1", "f"), ("c#1", "g")):
        attempts.note_pushing(attempt_of(key, phase=Phase.PREFILL, frontend=frontend))
    assert attempts.end_pushing("f", "a", 1) == []  # an abort of an older attempt
    assert attempts.end_pushing("g", "a", 2) == []  # an abort by another frontend
    assert attempts.end_pushing("f", "a", 2) == ["a#2"]
    assert attempts.end_pushing("f", "a", 2) == []
    assert attempts.end_pushing_to("f") == ["b#1"]
    assert attempts.end_pushing("g", "c", 5) == ["c#1"]


def test_computed_chunks_no_longer_wait() -> None:
    attempts = Attempts()
    one, two = attempt_of("a#1", 1000, Phase.PREFILL), attempt_of("b#1", 300, Phase.PREFILL)
    attempts.add(one)
    attempts.add(two)
    attempts.computing({"a#1": 600}, 1.0)
    assert (attempts.waiting_tokens, attempts.claimed_tokens) == (900, 900)
    attempts.computing({"a#1": 200}, 1.0)
    attempts.mark_computed(one)
    assert attempts.waiting_tokens == 300
    attempts.computing({"a#1": 100, "b#1": 100, "nobody#1": 7}, 1.0)
    assert attempts.waiting_tokens == 100, "a is computed, whatever was said of it before"
    attempts.mark_computed(two)
    assert (attempts.waiting_tokens, attempts.claimed_tokens) == (0, 0)


def test_chunks_end_where_less_is_left() -> None:
    attempts = Attempts()
    one = attempt_of("a#1", 1000, Phase.PREFILL)
    attempts.add(one)
    for now, left in ((1.0, 600), (2.0, 600), (3.0, 900), (4.0, 200)):  # others' step, and a preemption between
        attempts.computing({"a#1": left}, now)
    attempts.mark_computed(one)
    attempts.computing({"a#1": 100}, 5.0)
    assert one.chunk_ends == [1.0, 4.0]


def test_engine_corrects_cached_tokens() -> None:
    """More left than thought, less left than thought, and given up half-way."""
    attempts = Attempts()
    more, less, given_up = [attempt_of(f"{name}#1", 100, Phase.PREFILL) for name in "abc"]
    for each in (more, less, given_up):
        attempts.add(each)
    attempts.computing({"a#1": 240, "b#1": 10, "c#1": 30}, 1.0)
    assert attempts.claimed_tokens == 280
    attempts.remove(given_up)
    assert attempts.claimed_tokens == 250
    attempts.computing({"a#1": 100, "b#1": 10}, 1.0)
    attempts.remove(more)
    attempts.remove(less)
    assert (attempts.waiting_tokens, attempts.claimed_tokens) == (0, 0)


def test_room_event_is_set_when_load_falls() -> None:
    attempts = Attempts()
    one = attempt_of("a#1", 100, Phase.PREFILL)
    attempts.add(one)
    assert not attempts.room.is_set()
    for less in (
        lambda: attempts.computing({"a#1": 50}, 1.0),
        lambda: attempts.mark_computed(one),
        lambda: attempts.remove(one),
    ):
        less()
        assert attempts.room.is_set()
        attempts.room.clear()
