"""Pairs of faults: two processes of different kinds die at once, or one while the other is being replaced."""

from __future__ import annotations

import asyncio

from benchmarks.chaos import frontend_faults, redis_faults
from benchmarks.chaos.world import World
from orchestrator.types import Role

LATER_S = 0.2, 3.0  # between the deaths where they are not at once: an engine takes longer to start


async def prefill_and_decode(world: World) -> None:
    """A worker of each role, about when KV passes between them."""
    found = await asyncio.gather(world.caught(Role.PREFILL, "prefilling"), world.caught(Role.DECODE, "awaiting_kv"))
    await _killed(world, *(worker.pid for worker in found))


async def decode_and_redis(world: World) -> None:
    await _killed(world, (await world.caught(Role.DECODE, "decoding")).pid, await redis_faults.pid(world))


async def frontend_and_prefill(world: World) -> None:
    prefill = await world.caught(Role.PREFILL, "prefilling")
    await frontend_faults.killed(world, prefill.pid)


async def launcher_and_decode(world: World) -> None:
    decode = await world.caught(Role.DECODE, "decoding")
    await frontend_faults.launcher_killed(world, decode.pid)


async def _killed(world: World, *pids: int) -> None:
    """At once in half of the runs; else in any order with some time between."""
    if world.random.random() < 0.5:
        world.kill(*pids)
        return
    first, second = world.random.sample(pids, 2)
    world.kill(first)
    await asyncio.sleep(world.random.uniform(*LATER_S))
    world.kill(second)
