"""For how long something has waited, of a process that stood still meanwhile; and for how long a model wakes."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from orchestrator.fleet import pause
from orchestrator.fleet.pause import Pause, Rest
from orchestrator.types import IDLE, WAKE, DesiredRatio


@pytest.mark.parametrize(("since", "waited_s"), [(80.0, 20.0), (95.0, 10.0), (99.5, 10.0), (101.0, 9.0)])
def test_a_stall_counts_only_for_what_came_before_it(since: float, waited_s: float):
    """On waking, sockets are handled before the timer that notes it."""
    paused = Pause()
    paused.stood_still(100.0, 10.0)
    assert paused.waited_s(since, 110.0) == waited_s


class Resting:
    """A model that has been idle, the ratio that is set for it, and whether its workers serve."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.serves = 5.0, False  # of a host that has just started
        monkeypatch.setattr(pause, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.desired = DesiredRatio(1, 1, IDLE, 1.0)
        self.rest = Rest(Mock(), lambda: self.serves, lambda: self.desired, 100.0)

    async def is_set(self, desired: DesiredRatio) -> bool:
        """Whether requests wait for its workers, before and after the next look."""
        await self.rest._look()
        self.desired = desired
        before = self.rest.away
        await self.rest._look()
        assert self.rest.away is before
        return before


@pytest.mark.parametrize("by", [WAKE, "scale", "objectives"])
async def test_requests_wait_for_workers_whoever_ends_the_rest(by: str, monkeypatch: pytest.MonkeyPatch):
    model = Resting(monkeypatch)
    assert await model.is_set(DesiredRatio(1, 2, by, 2.0))
    model.now += 99
    assert await model.is_set(DesiredRatio(1, 2, by, 2.0))
    model.serves = True
    assert not model.rest.away
    model.serves, model.now = False, model.now + 2
    assert not model.rest.away


async def test_of_a_model_that_is_awake_nobody_waits_for_workers_that_are_lost(monkeypatch: pytest.MonkeyPatch):
    """With `routing.fallback: refuse` long prompts would wait for minutes, where those of others get 503 at once."""
    model = Resting(monkeypatch)
    assert await model.is_set(DesiredRatio(1, 1, WAKE, 2.0))
    for now, served, waits in ((1, True, True), (10, False, True), (20, True, False), (30, False, False)):
        model.now, model.serves = 5.0 + now, served  # at first by those that drain
        await model.rest._look()
        model.serves = False
        assert model.rest.away is waits


async def test_another_ratio_is_no_reason_not_to_wait_while_a_model_wakes(monkeypatch: pytest.MonkeyPatch):
    model = Resting(monkeypatch)
    assert await model.is_set(DesiredRatio(1, 1, WAKE, 2.0))
    assert await model.is_set(DesiredRatio(1, 3, "scale", 3.0))
    assert not await model.is_set(DesiredRatio(1, 0, "drain", 4.0))


async def test_of_a_model_that_did_not_rest_nobody_waits_for_workers(monkeypatch: pytest.MonkeyPatch):
    model = Resting(monkeypatch)
    model.desired = DesiredRatio(1, 1, "launcher", 1.0)
    assert not model.rest.away
    assert not await model.is_set(DesiredRatio(1, 2, "scale", 2.0))
