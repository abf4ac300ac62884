"""When a model's workers end for want of requests."""

from typing import Any

import msgspec
import pytest
from support_redis import worker

from orchestrator.launch.decisions.fleet_size import Idleness
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.store.configuration import Rollout, Version
from orchestrator.store.fields import Frontend
from orchestrator.types import IDLE, DesiredRatio, Role, WorkerState

AFTER_S = 60.0
RATIO = DesiredRatio(0, 1, "launcher")


def at(now: float, idle_s: tuple[float, ...] = (900.0, 900.0), ready: bool = True, **more: Any) -> Snapshot:
    state = WorkerState.READY if ready else WorkerState.DRAINING
    workers = {"w": msgspec.structs.replace(worker("w", Role.DECODE), state=state)}
    frontends = {str(i): Frontend(str(i), "http://x", "1", idle_s=each) for i, each in enumerate(idle_s)}
    return Snapshot(workers=workers, frontends=frontends, read_at=now, **more)


def test_a_model_rests_once_it_could_have_served_for_so_long_and_no_frontend_had_a_request() -> None:
    idleness = Idleness()
    assert not idleness.observe(at(0), RATIO, AFTER_S), (
        "it has just come up: the request that woke it may be on its way"
    )
    assert not idleness.observe(at(59), RATIO, AFTER_S)
    assert not idleness.observe(at(61, (900.0, 3.0)), RATIO, AFTER_S)
    assert idleness.observe(at(61), RATIO, AFTER_S)


def test_it_does_not_rest_when_a_frontend_has_gone_whose_requests_may_go_on() -> None:
    """It stands still, or Redis was away, and others are the first to come back."""
    idleness = Idleness()
    both, one = (900.0, 1.0), (900.0,)
    for now, idle_s in ((0, both), (100, both), (105, one), (106, one), (107, both), (108, one), (109, one)):
        assert not idleness.observe(at(now, idle_s), RATIO, AFTER_S)
    assert idleness.observe(at(170, one), RATIO, AFTER_S), "it left for good"


@pytest.mark.parametrize("why", ["not configured", "no frontend", "idle", "not ready", "rollout"])
def test_it_does_not_rest(why: str) -> None:
    rollout = Rollout(Version(0, {}), Version(1, {})) if why == "rollout" else None
    idleness = Idleness()
    for now in (0.0, 100.0):
        seen = at(now, () if why == "no frontend" else (900.0,), why != "not ready", rollout=rollout)
        ratio = DesiredRatio(0, 1, IDLE) if why == "idle" else RATIO
        assert not idleness.observe(seen, ratio, None if why == "not configured" else AFTER_S)


def test_of_an_idle_model_no_worker_is_wanted_and_how_many_there_were_is_kept() -> None:
    idle = DesiredRatio(2, 3, IDLE)
    assert (idle.now.prefill, idle.now.decode, idle.prefill, idle.decode) == (0, 0, 2, 3)
    assert RATIO.now == RATIO and not RATIO.idle
