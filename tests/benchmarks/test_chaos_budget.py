"""`benchmarks.chaos`: faults share fleets in turns until the budget is spent; a second call goes on where one ended."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
from support_client import FleetFailed

from benchmarks.chaos import __main__ as chaos
from benchmarks.chaos.load import Seen
from benchmarks.chaos.world import Fault

A, B = Fault("prefill_killed_idle", None, None), Fault("queue_lost", None, None)  # type: ignore[arg-type]
OTHER = Fault("frontend_killed", None, None, fleet="frontends")  # type: ignore[arg-type]


class Place:
    """A fleet whose runs give ten answers each. `unhealed`: after how many it does not heal."""

    def __init__(self, events: list[str], unhealed: float) -> None:
        self.events, self.left = events, unhealed

    async def run(self, fault: Fault, seen: Seen) -> None:
        self.events.append(fault.name)
        seen.answers += 10
        self.left -= 1
        if self.left == 0:
            raise FleetFailed("it does not heal")
        seen.runs += 1


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    @contextlib.contextmanager
    def world(kind: str, real: bool, seed: int) -> Iterator[Any]:
        seen.append(kind)
        if seen.count(kind) in no_starts:
            raise FleetFailed("it does not start")
        yield Place(seen, unhealed.pop(0) if unhealed else math.inf)

    no_starts.clear()
    unhealed.clear()
    monkeypatch.setattr(chaos, "world", world)
    return seen


no_starts: set[int] = set()
unhealed: list[float] = []


def test_kinds_of_fleets_have_turns(events: list[str]) -> None:
    chaos.measure([A, B, OTHER], False, 1, chaos.Budget(runs=3, turn=2))
    turn = ["plain", A.name, B.name, A.name, B.name, "frontends", OTHER.name, OTHER.name]
    assert events == [*turn, "plain", A.name, B.name, "frontends", OTHER.name]


def test_a_second_call_goes_on_until_the_answers_are_enough(events: list[str]) -> None:
    first = chaos.measure([A, B, OTHER], False, 1, chaos.Budget(runs=100, turn=1, answers=35))
    assert sum(row.seen.answers for row in first) == 40
    events.clear()
    second = chaos.measure([A, B, OTHER], False, 1, chaos.Budget(runs=100, turn=1, answers=60), begun=first)
    assert sum(row.seen.answers for row in second) == 60
    assert events == ["plain", B.name, "frontends", OTHER.name], "what the first call made counts"
    assert chaos.measure([A], False, 1, chaos.Budget(minutes=0), begun=second) == [second[0]]


def test_a_fleet_that_fails_is_a_failure_and_has_another_in_its_place(events: list[str]) -> None:
    no_starts.add(1)
    unhealed.append(1)
    rows = {row.seen.fault: row for row in chaos.measure([A, B], False, 1, chaos.Budget(runs=2))}
    assert events == ["plain", "plain", A.name, "plain", B.name, B.name]
    assert rows[A.name].failures == ["FleetFailed: it does not start", "FleetFailed: it does not heal"]
    assert (rows[B.name].seen.runs, rows[B.name].failures) == (2, [])
