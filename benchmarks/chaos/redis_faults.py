"""What happens to Redis, and to the queue that is in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import redis.asyncio
from redis.exceptions import ConnectionError, ResponseError

from benchmarks.chaos.world import World
from orchestrator.store.keys import Keys
from orchestrator.types import Role

LASTS_S = 6.0  # longer than entries of workers live without being refreshed
PAUSE_S = 30.0
NOWHERE = ("127.0.0.1", "1")  # a primary that does not answer
# What the queue keeps, by the first part of its keys' names; all else in the namespace is the registry's.
QUEUE_KEYS = ("queue", "job", "claims", "queued_tokens", "leases", "idle", "busy", "affine")


@contextlib.asynccontextmanager
async def _server(world: World) -> AsyncIterator[redis.asyncio.Redis]:
    server = redis.asyncio.Redis.from_url(world.redis_url, protocol=2)
    try:
        yield server
    finally:
        await server.aclose()


async def queue_lost(world: World) -> None:
    """Every key of the queue, waiting and claimed jobs, is deleted while jobs wait."""
    await world.caught(Role.PREFILL, "prefilling")
    prefix = Keys(world.fleet.namespace).prefix
    async with _server(world) as server:
        keys = [key async for key in server.scan_iter(f"{prefix}*")]
        lost = [key for key in keys if key.decode().removeprefix(prefix).partition(":")[0] in QUEUE_KEYS]
        if lost:
            await server.delete(*lost)


async def killed(world: World) -> None:
    """The launcher starts it again, empty."""
    world.kill(await _pid(world))


async def restarted_empty(world: World) -> None:
    """It ends in order and saves nothing."""
    async with _server(world) as server:
        with contextlib.suppress(ConnectionError):
            await server.shutdown(nosave=True)


async def emptied(world: World) -> None:
    """Keys and functions are gone, connections stay: as after a fail-over to a replica that has nothing."""
    async with _server(world) as server:
        await server.flushall()
        await server.execute_command("FUNCTION FLUSH")


async def stopped(world: World) -> None:
    await world.stop(PAUSE_S, await _pid(world))


async def _pid(world: World) -> int:
    async with _server(world) as server:
        return int((await server.info("server"))["process_id"])


def set_for_a_while(name: str, value: str, usual: str) -> Callable[[World], Awaitable[None]]:
    """A setting under which it refuses to write."""

    async def make(world: World) -> None:
        async with _server(world) as server:
            await server.config_set(name, value)
            await asyncio.sleep(LASTS_S)
            await server.config_set(name, usual)

    return make


async def read_only(world: World) -> None:
    """It becomes the replica of nobody."""
    async with _server(world) as server:
        await server.execute_command("REPLICAOF", *NOWHERE)
        await asyncio.sleep(LASTS_S)
        with contextlib.suppress(ResponseError):
            await server.execute_command("REPLICAOF", "NO", "ONE")
