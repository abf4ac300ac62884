"""Faults of Redis, and of the queue in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import redis.asyncio
from redis.exceptions import ConnectionError, ResponseError

from benchmarks.chaos.world import World
from orchestrator.store.keys import Keys
from orchestrator.types import Role

LASTS_S = 6.0  # longer than the time to live of workers' entries
PAUSE_S = 30.0
NOWHERE = ("127.0.0.1", "1")  # a primary that does not answer
# The first parts of the names of the queue's keys. All other keys of the namespace are the registry's.
QUEUE_KEYS = frozenset(
    "queue job claims queued_tokens leases waiters waits_until told affine dropped sweep_cursor".split()
)


def _server(world: World) -> redis.asyncio.Redis:
    return redis.asyncio.Redis.from_url(world.redis_url, protocol=2)


async def queue_lost(world: World) -> None:
    """Delete every key of the queue, with waiting and claimed jobs, while jobs wait."""
    await world.caught(Role.PREFILL, "prefilling")
    prefix = Keys(world.fleet.namespace).prefix
    async with _server(world) as server:
        keys = [key async for key in server.scan_iter(f"{prefix}*")]
        lost = [key for key in keys if key.decode().removeprefix(prefix).partition(":")[0] in QUEUE_KEYS]
        if lost:
            await server.delete(*lost)


async def killed(world: World) -> None:
    """Kill the server. The launcher starts it again, empty."""
    world.kill(await pid(world))


async def restarted_empty(world: World) -> None:
    """Shut the server down in order, without saving. The launcher starts it again."""
    async with _server(world) as server:
        with contextlib.suppress(ConnectionError):
            await server.shutdown(nosave=True)


async def emptied(world: World) -> None:
    """Delete all keys and functions; connections stay. It is as after a fail-over to an empty replica."""
    async with _server(world) as server:
        await server.flushall()
        await server.execute_command("FUNCTION FLUSH")


async def stopped(world: World) -> None:
    await world.stop(PAUSE_S, await pid(world))


async def pid(world: World) -> int:
    async with _server(world) as server:
        return int((await server.info("server"))["process_id"])


def writes_refused_by(name: str) -> Callable[[World], Awaitable[None]]:
    """Set this setting to 1, instead of 0, for LASTS_S: the server refuses writes."""

    async def make(world: World) -> None:
        async with _server(world) as server:
            await server.config_set(name, "1")
            await asyncio.sleep(LASTS_S)
            await server.config_set(name, "0")

    return make


async def read_only(world: World) -> None:
    """Make the server the replica of a primary that does not answer, for LASTS_S."""
    async with _server(world) as server:
        await server.execute_command("REPLICAOF", *NOWHERE)
        await asyncio.sleep(LASTS_S)
        with contextlib.suppress(ResponseError):
            await server.execute_command("REPLICAOF", "NO", "ONE")
