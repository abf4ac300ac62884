"""The states of a worker process and the legal moves between them."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest
from support_info import worker_info
from support_wait import DEADLINE_S

from orchestrator.config.settings import parse_config
from orchestrator.store.fields import Heartbeat, WorkerOrders
from orchestrator.types import KVEndpoint, Role, WorkerState
from workers.engine import Engine, EngineLoad
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


class Holding:
    """An engine whose blocks are freed one by one."""

    def __init__(self, held: int) -> None:
        self.held = held

    async def load(self) -> EngineLoad:
        self.held -= 1
        return EngineLoad(10 - self.held, running=0, waiting=0, step_ms=0.0)


@pytest.mark.parametrize(("held", "told"), [(3, ""), (1000, "KV blocks are still held")])
async def test_blocks_held_at_drain_deadline_are_logged(held: int, told: str, caplog: pytest.LogCaptureFixture) -> None:
    drain = Drain.__new__(Drain)
    drain._engine, drain._blocks_total = cast(Engine, Holding(held)), 10
    async with asyncio.timeout(DEADLINE_S):
        await drain.end_pushes(time.monotonic() + (0.5 if told else 30))
    assert (told in caplog.text) if told else not caplog.text


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
        info=worker_info("p", kv=KVEndpoint("e", "127.0.0.1", 1, pp_size=2)),
        clear_orders=clear,
        announce=unexpected,
        end=unexpected,
    )
    await moves.carry_out(Heartbeat(WorkerOrders(Role.DECODE, sequence=7)), moves.info)
    assert (life.state, life.role, cleared) == (LifecycleState.READY, Role.PREFILL, [7])
    assert "stays a prefill worker: its engine cannot take the role decode" in caplog.text
    await moves.carry_out(Heartbeat(WorkerOrders(sequence=7)), moves.info)
    assert cleared == [7]
