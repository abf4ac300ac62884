"""Operators who pause and resume a group at once: its ranks, which can do either only together, stay in one state.

The ranks are processes with simulated engines in lockstep. Each is told in an order of its own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import msgspec
import pytest
from support_wait import until
from support_workers import Frontend, Workers

from orchestrator.fleet.control_calls import CallFailed
from orchestrator.types import PauseState, Role
from orchestrator.wire.messages import Call

pytestmark = pytest.mark.slow  # processes

RANKS = ("d", "d.1")
SECTIONS = {"workers": {"engine_args": {"data_parallel_size": len(RANKS)}, "timeout_s": 4.0}}


class Group:
    """A decode group, and a frontend that has met its ranks."""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend, self._calls, self.number = frontend, itertools.count(1), 0

    @classmethod
    async def start(cls, workers: Workers) -> Group:
        ranks = [
            await workers.spawn(Role.DECODE, f"--ranks={','.join(RANKS)}", name=name, wait=False) for name in RANKS
        ]
        for rank in ranks:
            await workers.registered(rank.id)
        return cls(await workers.frontend(*ranks))

    def states(self, *wanted: PauseState) -> list[PauseState]:
        """With the next numbers, as operators give them one after the other."""
        numbered = [msgspec.structs.replace(state, number=self.number + 1 + i) for i, state in enumerate(wanted)]
        self.number += len(wanted)
        return numbered

    def tell(self, rank: str, states: Iterable[PauseState]) -> None:
        for state in states:
            self._call(rank, "set_pause", list(msgspec.structs.astuple(state)))

    def _call(self, rank: str, method: str, args: list[object]) -> int:
        self.frontend.transport.send(rank, Call(number := next(self._calls), method, args))
        return number

    async def paused(self) -> list[bool]:
        """Of each rank, once it has answered all calls."""
        asked = [self._call(rank, "is_scheduler_paused", []) for rank in RANKS]
        last = asked[-1]
        await until(lambda: len(self.frontend.replies) == last, "all calls are answered")
        assert [reply.error for reply in self.frontend.replies if reply.error] == []
        found = {reply.call_id: reply.result for reply in self.frontend.replies}
        return [bool(found[number]) for number in asked]

    async def settles(self, newest: PauseState) -> None:
        """All calls are answered, and both ranks are in this state."""
        await until(lambda: all(self.frontend.loads[rank].pause == newest for rank in RANKS), "all report it")

        async def there() -> bool:
            return await self.paused() == [newest.engines] * len(RANKS)

        await until(there, f"all are in {newest}")

    async def serves(self) -> bool:
        """Each rank does."""
        requests = [self.frontend.new([7, *range(20)], 5) for _ in RANKS]
        for rank, request in zip(RANKS, requests, strict=True):
            assert self.frontend.submit_to(rank, request)
        await self.frontend.finished(*requests)
        return True


PAUSE, RESUME, ABORT = PauseState(0, "keep", True), PauseState(), PauseState(0, "abort", True, True)


@pytest.mark.parametrize("wanted", [(PAUSE, RESUME, ABORT), (ABORT, PAUSE, RESUME), (RESUME, PAUSE, ABORT)])
async def test_no_order_of_calls_leaves_ranks_in_different_states(
    workers: Workers, wanted: tuple[PauseState, ...]
) -> None:
    group = await Group.start(workers)
    for orders in itertools.product(itertools.permutations(range(len(wanted))), repeat=len(RANKS)):
        states = group.states(*wanted)
        for rank, order in zip(RANKS, orders, strict=True):
            group.tell(rank, [states[i] for i in order])
        await group.settles(states[-1])
        (resumed,) = group.states(RESUME)
        for rank in RANKS:
            group.tell(rank, [resumed])
        await group.settles(resumed)
        assert await group.serves()
    await workers.assert_no_leaks()


@pytest.mark.parametrize("hears", RANKS)
async def test_all_ranks_follow_what_one_of_them_hears(workers: Workers, hears: str) -> None:
    group = await Group.start(workers)
    for state in group.states(PAUSE, RESUME):
        group.tell(hears, [state])
        await group.settles(state)
    assert await group.serves()


async def test_two_operators_at_once(workers: Workers) -> None:
    """Through two frontends. Whose call was superseded is told so."""
    group = await Group.start(workers)
    clients = [await workers.router(decode=len(RANKS)) for _ in range(2)]
    one, other = (client.connection.pause for client in clients)
    for mode in ("keep", "wait", "abort"):
        calls = [one.begin(mode, False), other.end(), one.end(), other.begin("keep", True), other.end()]
        failed = [error for error in await asyncio.gather(*calls, return_exceptions=True) if error]
        assert all(isinstance(error, CallFailed) and "ask again" in str(error) for error in failed), failed
        await one.end()
        assert await group.paused() == [False] * len(RANKS)
        await asyncio.gather(*(client.ask([1, 2, 3], 5) for client in clients))
        assert await group.serves()
