"""Operators, launchers and the automatic size at once, call by call, in any order: no order is lost."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_interleaving import World
from support_redis import Server, fresh_namespace

from orchestrator.store.client import connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a server of its own, and many histories

ORDERS = st.one_of(
    st.tuples(st.just("scale"), st.none() | st.integers(0, 3), st.none() | st.integers(1, 3), st.just(0)),
    st.tuples(st.sampled_from(["drain", "role"]), st.none(), st.none(), st.integers(0, 9)),
    st.tuples(st.sampled_from(["resize", "crash", "kill", "empty"]), st.none(), st.none(), st.integers(0, 9)),
)
STEPS = st.lists(st.integers(0, 40) | ORDERS, max_size=40)


async def history(url: str, steps: list[int | tuple[str, int | None, int | None, int]]) -> None:
    redis = await connect(url, 5)
    world = World(redis, fresh_namespace())
    try:
        if not steps or steps[0] != 0:
            await world.quiet()  # most histories begin with a fleet that is complete
        for step in steps:
            moves = await world.moves()
            match step:
                case int():
                    what, move = moves[step % len(moves)]
                    world.log.append(what)
                    await move()
                case ("resize" | "crash" | "kill" as what, _, _, chosen):
                    world.log.append(f"{what} {chosen}")
                    await getattr(world, what)(chosen)
                case ("empty", _, _, _):
                    world.log.append("Redis is emptied")
                    await world.empty()
                case (verb, prefill, decode, chosen):
                    world.log.append(f"{verb} {prefill} {decode} {chosen}")
                    world.order(verb, prefill, decode, chosen)
        await world.quiet()
    finally:
        await world.close()
        await redis.aclose()


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_no_history_loses_an_order_or_takes_the_last_decode_worker(server: Server, steps) -> None:
    asyncio.run(history(server.url, steps))
