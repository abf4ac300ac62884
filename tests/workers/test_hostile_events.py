"""Whatever is said on the channel of a fleet's events, or stands under its keys: workers and frontends go on."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from support_fuzz import damaged, members
from support_wait import until
from support_workers import running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.store.registry import RegistryEvent
from orchestrator.types import Role

KINDS = ["worker", "frontend", "launcher", "", "x" * 300, None, 7]
IDS = ["", "*", "x:y", "../../etc", "\x00", "ü" * 500, "garbled", None, 3, ["a"], {"id": "a"}]


def payloads(own: list[str]) -> list[bytes]:
    """Events of each kind about members that live (`own`), that never were, or that cannot be; and what is no event."""
    dice = random.Random(7)
    tags = [str(kind.__struct_config__.tag) for kind in members(RegistryEvent)]
    said: list[Any] = [{"type": tag, "id": name, "kind": kind} for tag in tags for name in IDS + own for kind in KINDS]
    said += [{"type": tag} for tag in [*tags, "boss", None]] + [None, [], {}, 0, "joined", [said[0]]]
    sound = [json.dumps(each).encode() for each in said]
    broken = [damaged(one, dice.randrange(500), dice.randrange(256), dice.randrange(3)) for one in sound]
    return [*sound, *broken, b"", b"\xff" * 100, dice.randbytes(1 << 16)]


async def test_hostile_events_end_no_loop(redis_server: EmbeddedRedis) -> None:
    async with running_workers(redis_server, routing={"remote_prefill_min_tokens": 100}) as workers:
        started = [await workers.start(role) for role in Role]
        client = await workers.router(prefill=1, decode=1)
        await workers.redis.set(workers.registry.keys.worker("garbled"), "no hash")
        for payload in payloads([*(worker.id for worker in started), client.connection.frontend_id]):
            await workers.redis.publish(workers.registry.keys.events, payload)
        for number in range(4):
            await client.ask([number, *range(300)], 5)
        assert not any(worker.task.done() for worker in started)
        late = await workers.start(Role.DECODE)  # is heard of, so events are still read
        await until(lambda: late.id in client.connection.fleet.workers, "the frontend knows who has joined")


@pytest.mark.parametrize("key", ["noted", "desired", "ratio_leader", "ratio_history", "workers", "frontends", "pruned"])
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


def test_every_kind_of_event_is_tried() -> None:
    decoded = set()
    for payload in payloads(["a"]):
        try:
            decoded.add(type(msgspec.json.decode(payload, type=RegistryEvent)))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    assert decoded == set(members(RegistryEvent))
