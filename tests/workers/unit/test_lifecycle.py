"""The states of a worker process and the legal moves between them."""

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from support_info import worker_info
from support_wait import DEADLINE_S, until

from orchestrator.config.settings import parse_config
from orchestrator.store.fields import Heartbeat, WorkerOrders
from orchestrator.types import KVEndpoint, Role, WorkerState
from workers.engine import Engine, EngineLoad
from workers.unit.lifecycle import LEGAL, Drain, IllegalMove, Lifecycle, LifecycleState, Moves


def test_gone_is_final_and_every_state_has_its_moves() -> None:
    assert set(LEGAL) == set(LifecycleState)
    assert not LEGAL[LifecycleState.GONE]
    life = Lifecycle(Role.PREFILL)
    assert not life.claims
    life.enter(LifecycleState.READY)
    assert (life.claims, life.registered) == (True, WorkerState.READY)
    life.role = Role.DECODE
    assert (life.claims, life.registered) == (False, WorkerState.READY)
    life.enter(LifecycleState.LEAVING)
    assert (life.claims, life.registered) == (False, WorkerState.DRAINING)
    with pytest.raises(IllegalMove, match="leaving cannot become starting"):
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
    await drain.end_pushes(time.monotonic() + (0.5 if told else 30))
    assert (told in caplog.text) if told else not caplog.text


@pytest.mark.parametrize(("role", "sizes"), [(Role.PREFILL, {"pp_size": 2}), (Role.DECODE, {"shards": 2})])
async def test_a_role_that_the_engine_cannot_take_is_refused_and_the_order_cleared(
    caplog: pytest.LogCaptureFixture, role: Role, sizes: dict[str, int]
) -> None:
    other = role.other
    life = Lifecycle(role)
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
        info=worker_info("p", role, kv=KVEndpoint("e", "127.0.0.1", 1, **sizes)),
        clear_orders=clear,
        announce=unexpected,
        end=unexpected,
    )
    await moves.carry_out(Heartbeat(WorkerOrders(other, sequence=7)), moves.info)
    assert (life.state, life.role, cleared) == (LifecycleState.READY, role, [7])
    assert f"stays a {role.value} worker: its engine cannot take the role {other.value}" in caplog.text
    await moves.carry_out(Heartbeat(WorkerOrders(sequence=7)), moves.info)
    assert cleared == [7]


class Rank:
    """The moves of one rank of a unit, without requests. `told` is what its next heartbeat returns."""

    def __init__(self, name: str) -> None:
        self.life, self.cleared, self.ended = Lifecycle(Role.DECODE), list[int](), asyncio.Event()
        self.life.enter(LifecycleState.READY)
        drain = Drain.__new__(Drain)
        drain.end_attempts = drain.end_pushes = self._nothing_is_left  # type: ignore[assignment, method-assign]
        drain._attempts = []  # type: ignore[assignment]
        drain._serving = self.serving = SimpleNamespace(leaves=False)  # type: ignore[assignment]
        self.moves = Moves(
            self.life,
            drain,
            parse_config({"model": "demo"}),
            info=worker_info(name, ranks=("d", "d.1", "d.2")),
            clear_orders=self._clear,
            announce=lambda: None,
            end=self.ended.set,
        )

    async def _nothing_is_left(self, deadline: float) -> None:
        pass

    async def _clear(self, sequence: int) -> None:
        self.cleared.append(sequence)

    async def told(self, orders: WorkerOrders = WorkerOrders(), drained: int = 0, role: Role = Role.DECODE) -> None:
        """`role`: the first rank's, in the registry, which has of this one what it was before."""
        mine = self.moves.info = msgspec.structs.replace(
            self.moves.info, role=self.life.role, drained=self.moves.drained
        )
        await self.moves.carry_out(Heartbeat(orders, role=role, ranks=3, drained=drained), mine)


async def test_first_rank_takes_role_at_once_and_clears_the_order_once_its_entry_has_it() -> None:
    rank, order = Rank("d"), WorkerOrders(Role.PREFILL, sequence=7)
    await rank.told(order)
    assert (rank.life.state, rank.life.role, rank.cleared) == (LifecycleState.READY, Role.PREFILL, [])
    await rank.told(order, role=Role.PREFILL)
    assert (rank.life.role, rank.cleared) == (Role.PREFILL, [7])
    assert not rank.serving.leaves, "it takes submissions of frontends that have not yet heard of its role"


async def test_no_submission_is_taken_from_the_moment_a_worker_is_told_to_leave() -> None:
    rank = Rank("d")
    rank.moves.leave(1.0)
    assert rank.serving.leaves
    await rank.moves.close()


async def test_other_ranks_follow_the_first_and_no_order() -> None:
    rank, order = Rank("d.1"), WorkerOrders(Role.PREFILL, sequence=7)
    await rank.told(order)
    assert rank.life.role is Role.DECODE, "whoever reads the registry would send it what it does not do"
    await rank.told(order, role=Role.PREFILL)
    assert (rank.life.state, rank.life.role, rank.cleared) == (LifecycleState.READY, Role.PREFILL, [])
    await rank.told(role=Role.DECODE)
    assert rank.life.role is Role.DECODE


async def test_order_to_change_back_is_carried_out_as_the_first_was_and_an_old_one_is_not() -> None:
    rank, there, back = Rank("d"), WorkerOrders(Role.PREFILL, sequence=7), WorkerOrders(Role.DECODE, sequence=9)
    await rank.told(there)
    await rank.told(back)
    assert rank.life.role is Role.DECODE
    await rank.told(there)
    assert rank.life.role is Role.DECODE and rank.cleared == [9]


async def test_worker_that_leaves_takes_no_role() -> None:
    rank = Rank("d")
    rank.life.enter(LifecycleState.LEAVING)
    await rank.told(WorkerOrders(Role.PREFILL, sequence=7))
    assert rank.life.role is Role.DECODE


async def test_rank_leaves_when_all_that_are_there_have_drained() -> None:
    rank, order = Rank("d.1"), WorkerOrders(drain=True, sequence=7)
    await rank.told(order)
    await until(lambda: rank.moves.drained, "it has drained")
    await rank.told(order, drained=1)
    await asyncio.sleep(0)
    assert not rank.ended.is_set(), "the third has requests, and needs this one's steps"
    await rank.told(order, drained=2)
    await asyncio.wait_for(rank.ended.wait(), DEADLINE_S)


async def test_rank_without_requests_waits_at_the_deadline_until_others_have_given_theirs_back() -> None:
    """They heard of the order later, and cannot give anything back once their engine waits for this one's steps."""
    rank, order = Rank("d.1"), WorkerOrders(drain=True, sequence=7)
    rank.moves.leave(0.0)
    await until(lambda: rank.moves.drained, "it has drained")
    for _ in range(10):
        await asyncio.sleep(0)
    assert not rank.ended.is_set()
    await rank.told(order, drained=2)
    await asyncio.wait_for(rank.ended.wait(), DEADLINE_S)
