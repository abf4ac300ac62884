"""What happened in a fleet, kept for operators: bounded, and in Redis, which outlives frontends and launchers.

The registry's functions note who joined, left, was lost or changed its role, and every change of the desired ratio
(`store/lua/registry/steering.lua`). Frontends note what they retried, and what `ratio.mode: auto` has decided.
"""

from __future__ import annotations

from typing import Any

import msgspec

from orchestrator.store.client import Redis
from orchestrator.store.keys import KEPT_S, REGISTRY, Keys

BEGINNING = "-"
KEPT = 100  # decisions on the ratio


class Event(msgspec.Struct, frozen=True):
    """`at`: unix seconds, the server's clock. `fields` depend on the type: kind and id, prefill and decode, why ..."""

    id: str
    at: float
    type: str  # joined, left, lost, flipped, scaled, retried, repaired
    fields: dict[str, str] = {}


class Noted(msgspec.Struct, frozen=True):
    """One decision on the ratio."""

    at: float  # unix seconds
    decision: str  # one line, with its numbers


class EventLog:
    """Every method raises RedisAway."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._keys = redis, Keys(namespace)

    async def note(self, type: str, **fields: str) -> None:
        flat = [part for pair in {"type": type, **fields}.items() for part in pair]
        await self._redis.call(REGISTRY, "note_event", self._keys.prefix, *flat)

    async def read(self, after: str = BEGINNING, limit: int = 100) -> list[Event]:
        """The newest `limit` after the event of this id, oldest first."""
        rows: list[Any] = await self._redis.call(REGISTRY, "noted", self._keys.prefix, after, limit)
        return [_event(row[0].decode(), row[1]) for row in rows]


def _event(event_id: str, flat: list[bytes]) -> Event:
    texts = [part.decode(errors="replace") for part in flat]
    fields = dict(zip(texts[::2], texts[1::2], strict=True))
    return Event(event_id, int(event_id.partition("-")[0]) / 1e3, fields.pop("type", ""), fields)


class RatioHistory:
    """What `ratio.mode: auto` has decided. Every method raises RedisAway."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._key = redis, Keys(namespace).ratio_history

    async def note(self, at: float, decision: str) -> None:
        await self._redis.execute_command("LPUSH", self._key, msgspec.json.encode(Noted(at, decision)))
        await self._redis.execute_command("LTRIM", self._key, 0, KEPT - 1)
        await self._redis.expire(self._key, KEPT_S)

    async def read(self) -> list[Noted]:
        """The newest first. What cannot be read is left out."""
        found = []
        for line in await self._redis.execute_command("LRANGE", self._key, 0, -1):
            try:
                found.append(msgspec.json.decode(line, type=Noted))
            except msgspec.DecodeError:
                continue
        return found
