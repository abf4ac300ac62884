"""Engines connect when the registry announces them, before a request needs the connection."""

import asyncio
from typing import Any

from support_wait import until
from support_workers import Workers

from orchestrator.store.client import RedisAway
from orchestrator.store.fields import Heartbeat
from orchestrator.types import Role
from workers.peers import MEET_MOST_WORKERS, Meetings


def has_met(one: Any, other: Any) -> bool:
    return bool(one.engine._transfers._connections.is_connected(other.engine._engine_id))


async def test_engines_of_both_roles_are_connected_without_a_request(workers: Workers) -> None:
    first = await workers.start(Role.PREFILL)
    second, decode = await workers.start(Role.PREFILL), await workers.start(Role.DECODE)
    for prefill in (first, second):
        await until(lambda prefill=prefill: has_met(prefill, decode) and has_met(decode, prefill))  # type: ignore[misc]
    assert not has_met(first, second)


class Engine:
    def __init__(self) -> None:
        self.met: list[str] = []
        self.error: Exception | None = None

    async def meet(self, peer: Any) -> None:
        if self.error is not None:
            raise self.error
        self.met.append(peer.engine_id)


async def test_the_registry_is_read_when_somebody_came_or_the_role_changed_only(workers: Workers) -> None:
    prefill, decode = await workers.start(Role.PREFILL), await workers.start(Role.DECODE)
    infos = await workers.registry.workers()
    mine, other = infos[decode.id], infos[prefill.id].kv.engine_id
    engine, reads = Engine(), []

    class Registry:
        away = True

        async def workers(self) -> Any:
            reads.append(1)
            if self.away:
                raise RedisAway("no Redis")
            return infos

    registry = Registry()
    met = Meetings(registry, engine)  # type: ignore[arg-type]

    async def beat(told: Heartbeat) -> None:
        met.note(told, mine)
        await asyncio.gather(met._meeting)  # type: ignore[arg-type]

    await beat(Heartbeat(workers=2))
    registry.away, engine.error = False, RuntimeError("dead")
    await beat(Heartbeat(workers=2))  # it was not read, so again
    assert engine.met == [] and len(reads) == 2
    engine.error = None
    await beat(Heartbeat(workers=2))
    assert len(reads) == 2
    await beat(Heartbeat(workers=3))
    await beat(Heartbeat(workers=3, last_departure="1-0"))
    assert engine.met == [other] and len(reads) == 4
    await beat(Heartbeat(workers=MEET_MOST_WORKERS + 1))
    assert len(reads) == 4
