"""The states of a worker process and the legal moves between them."""

from __future__ import annotations

import pytest

from orchestrator.types import Role, WorkerState
from workers.lifecycle import LEGAL, REGISTERED, IllegalMove, Life, Lifecycle


def test_life_has_no_way_out_of_gone_and_every_state_a_registered_one() -> None:
    assert set(LEGAL) == set(REGISTERED) == set(Life)
    assert not LEGAL[Life.GONE]
    life = Lifecycle(Role.PREFILL)
    assert (life.refusal(), life.claims, life.registered) == ("starting", False, WorkerState.STARTING)
    life.enter(Life.READY)
    assert (life.refusal(), life.claims) == ("this is a prefill worker", True)
    life.enter(Life.FLIPPING)
    assert (life.refusal(), life.claims, life.registered) == ("draining", False, WorkerState.DRAINING)
    life.role = Role.DECODE
    life.enter(Life.READY)
    assert (life.refusal(), life.claims) == (None, False)
    with pytest.raises(IllegalMove, match="ready cannot become starting"):
        life.enter(Life.STARTING)
