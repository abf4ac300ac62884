"""Whatever is said on the channel of a fleet's events, or stands under its keys: workers and frontends go on."""

import json
import random
from typing import Any

import pytest
from support_fuzz import damaged
from support_wait import until
from support_workers import running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.types import Role


def payloads() -> list[bytes]:
    """Desired ratios that cannot be, and what is none."""
    dice = random.Random(7)
    odd: list[Any] = [None, -1, 2**70, 1.5, "", "many", [], {}]
    ratio = {"prefill": 1, "decode": 1, "set_by": "scale", "set_at": "1.000000", "why": ""}
    said: list[Any] = [ratio | {name: value} for name in ratio for value in odd] + [*odd, [ratio], {"type": "joined"}]
    sound = [json.dumps(each).encode() for each in said]
    broken = [damaged(one, dice.randrange(500), dice.randrange(256), dice.randrange(3)) for one in sound]
    return [*sound, *broken, b'{"new": ' + b"[" * 100_000, b"", b"\xff" * 100, dice.randbytes(1 << 16)]


async def test_hostile_events_end_no_loop(redis_server: EmbeddedRedis) -> None:
    async with running_workers(redis_server, routing={"remote_prefill_min_tokens": 100}) as workers:
        started = [await workers.start(role) for role in Role]
        client = await workers.router(prefill=1, decode=1)
        await workers.redis.set(workers.registry.keys.worker("garbled"), "no hash")
        for payload in payloads():
            await workers.redis.publish(workers.registry.keys.events, payload)
        for number in range(4):
            await client.ask([number, *range(300)], 5)
        assert not any(worker.task.done() for worker in started)
        late = await workers.start(Role.DECODE)  # is heard of, so events are still read
        await until(lambda: late.id in client.connection.fleet.workers, "the frontend knows who has joined")


@pytest.mark.parametrize("key", ["noted", "desired", "ratio_leader", "workers", "frontends", "pruned"])
async def test_a_key_of_another_type_ends_no_loop(redis_server: EmbeddedRedis, key: str) -> None:
    async with running_workers(redis_server, routing={"remote_prefill_min_tokens": 100}) as workers:
        started = [await workers.start(role) for role in Role]
        client = await workers.router(prefill=1, decode=1)
        name = workers.registry.keys.prefix + key
        await workers.redis.delete(name)
        await (workers.redis.hset(name, "a", "b") if key != "desired" else workers.redis.set(name, "garbage"))
        await client.ask([1, *range(300)], 5)
        late = await workers.start(Role.DECODE)
        await until(lambda: late.id in client.connection.fleet.workers, "the frontend knows who has joined")
        await until(lambda: late.agent.joined, "it knows that it has joined")
        await client.ask([2, *range(300)], 5)
        assert await workers.registry.lead(client.connection.frontend_id, 5.0)
        assert not any(worker.task.done() for worker in [*started, late])
