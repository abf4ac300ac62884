"""The states of a worker process and the legal moves between them."""

from __future__ import annotations

import pytest

from orchestrator.config.settings import parse_config
from orchestrator.store.fields import WorkerOrders
from orchestrator.types import Role, WorkerState
from workers.lifecycle import LEGAL, REGISTERED, Drain, IllegalMove, Lifecycle, LifecycleState, Moves


def test_gone_is_final_and_every_state_has_registered_state() -> None:
    assert set(LEGAL) == set(REGISTERED) == set(LifecycleState)
    assert not LEGAL[LifecycleState.GONE]
    life = Lifecycle(Role.PREFILL)
    assert (life.refusal(), life.claims, life.registered) == ("starting", False, WorkerState.STARTING)
    life.enter(LifecycleState.READY)
    assert (life.refusal(), life.claims) == ("this is a prefill worker", True)
    life.enter(LifecycleState.FLIPPING)
    assert (life.refusal(), life.claims, life.registered) == ("draining", False, WorkerState.DRAINING)
    life.role = Role.DECODE
    life.enter(LifecycleState.READY)
    assert (life.refusal(), life.claims) == (None, False)
    with pytest.raises(IllegalMove, match="ready cannot become starting"):
        life.enter(LifecycleState.STARTING)


async def test_a_role_that_the_engine_cannot_take_is_refused_and_the_order_cleared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    life = Lifecycle(Role.PREFILL)
    life.enter(LifecycleState.READY)
    cleared: list[int] = []

    async def clear(sequence: int) -> None:
        cleared.append(sequence)

    def unexpected() -> None:
        raise AssertionError("nothing changes")

    moves = Moves(
        life,
        Drain.__new__(Drain),  # there is nothing to drain
        parse_config({"model": "demo"}),
        can_be=lambda role: role is Role.PREFILL,
        clear_orders=clear,
        announce=unexpected,
        end=unexpected,
    )
    await moves.carry_out(WorkerOrders(Role.DECODE, sequence=7))
    assert (life.state, life.role, cleared) == (LifecycleState.READY, Role.PREFILL, [7])
    assert "stays a prefill worker: its engine cannot take the role decode" in caplog.text
    await moves.carry_out(WorkerOrders(sequence=7))
    assert cleared == [7]
