"""Steps that ranks take together: as long as the slowest, none while nobody works, and none without all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support_wait import until

from orchestrator.wire.addresses import hold_port
from workers.engine import EngineDead, Group
from workers.sim.lockstep import Go, Lockstep, Wake, _encode


@asynccontextmanager
async def ranks(size: int) -> AsyncIterator[tuple[list[Lockstep], list[int]]]:
    """The ranks, and which of them were woken."""
    held, port = hold_port("127.0.0.1")
    woken: list[int] = []
    group = [
        Lockstep(Group(rank, size, "127.0.0.1", port), lambda rank=rank: woken.append(rank)) for rank in range(size)
    ]
    try:
        await asyncio.gather(*(one.start() for one in group))
        yield group, woken
    finally:
        for one in group:
            await one.close()
        held.close()


async def test_one_alone_never_waits() -> None:
    alone = Lockstep(Group(), lambda: None)
    await alone.start()
    assert await alone.meet(0.5, True) == 0.5 and alone.running
    assert await alone.meet(0.1, False) == 0.1 and not alone.running


@pytest.mark.parametrize("first", [0, 1, 2])
async def test_step_takes_as_long_as_slowest_rank(first: int) -> None:
    async with ranks(3) as (group, woken):
        step = asyncio.create_task(group[first].meet(0.3, True))
        others = [rank for rank in range(3) if rank != first]
        await until(lambda: sorted(woken) == others, "the others are woken")
        assert not step.done() and all(group[rank].running for rank in others)
        dummies = [asyncio.create_task(group[rank].meet(0.1, False)) for rank in others]
        assert await asyncio.gather(step, *dummies) == [0.3] * 3
        assert all(one.running for one in group)
        await asyncio.gather(*(one.meet(0.1, False) for one in group))
        assert not any(one.running for one in group), "nobody has a request: no more steps"


async def test_rank_that_is_late_is_woken_for_the_next_wave() -> None:
    """The end of a wave and the begin of the next one reach it in one read."""
    async with ranks(2) as (group, _):
        late, reader = group[1], asyncio.StreamReader()
        step = asyncio.create_task(late.meet(0.1, False))
        await asyncio.sleep(0)
        reader.feed_data(_encode(Go(0.1, more=False)) + b"\n" + _encode(Wake()) + b"\n")
        following = asyncio.create_task(late._follow(reader))
        await step
        assert late.running, "the first rank waits for it"
        following.cancel()


@pytest.mark.parametrize("ends", [0, 1])
async def test_rank_that_ends_ends_all(ends: int) -> None:
    async with ranks(3) as (group, _):
        steps = [asyncio.create_task(one.meet(0.1, True)) for rank, one in enumerate(group) if rank != ends]
        await group[ends].close()
        for ended in await asyncio.gather(*steps, return_exceptions=True):
            assert isinstance(ended, EngineDead)


async def test_engine_that_waits_for_a_rank_answers_nothing() -> None:
    async with ranks(2) as (group, _):
        step, asked = asyncio.create_task(group[0].meet(0.1, True)), None
        await asyncio.sleep(0)
        asked = asyncio.create_task(group[0].met())
        await asyncio.wait({asked}, timeout=0.2)
        assert not asked.done()
        await group[1].meet(0.1, False)
        await asyncio.gather(step, asked)
