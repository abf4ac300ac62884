"""Operators' commands to a fleet that serves, and a worker that dies meanwhile. Clients may notice neither."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from benchmarks.chaos.world import World
from orchestrator.types import Role


async def _command(world: World, *arguments: str) -> None:
    """Run a command. Raises AssertionError with its output if it fails."""
    await asyncio.to_thread(world.launched.cli, *arguments)


async def _shape(world: World, prefill: int, decode: int) -> None:
    await _command(world, "scale", f"prefill={prefill}", f"decode={decode}")
    await asyncio.to_thread(world.fleet.until, lambda: world.fleet.shape() == (prefill, decode), "the shape asked for")


async def scaled(world: World) -> None:
    """Scale the fleet and back: workers change their roles, are started and are drained."""
    prefill, decode = world.shape
    await _shape(world, prefill + 1, decode - 1)
    await _shape(world, prefill - 1, decode + 2)
    await _shape(world, prefill, decode)


async def roles_swapped(world: World) -> None:
    """Swap the roles of two workers that have work at that moment."""
    (prefill, *_), (decode, *_) = (world.fleet.workers(role.value) for role in (Role.PREFILL, Role.DECODE))
    await _command(world, "role", prefill["id"], "decode")
    await _command(world, "role", decode["id"], "prefill")


async def restarted(world: World) -> None:
    await _command(world, "restart")


def one_dies_during(operation: Callable[[World], Awaitable[None]]) -> Callable[[World], Awaitable[None]]:
    """Kill a worker at some moment of the operation, which has to go on."""

    async def make(world: World) -> None:
        operating = asyncio.ensure_future(operation(world))
        try:
            await asyncio.sleep(world.random.uniform(0.5, 4))
            world.kill(world.random.choice([pid for role in Role for pid in world.pids(role)]))
        finally:
            await operating

    return make
