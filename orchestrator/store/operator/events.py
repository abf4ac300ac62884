"""What happened in a fleet, kept for operators: bounded, and in Redis, which outlives frontends and launchers.

The registry's functions note who joined, left, was lost or changed its role, and every change of the desired ratio
(`store/lua/registry/steering.lua`). Frontends note what they retried, and what `ratio.mode: auto` has decided.
"""

from __future__ import annotations

from typing import Any

import msgspec

from orchestrator.store.client import Redis
from orchestrator.store.fields import fields_of
from orchestrator.store.keys import REGISTRY, Keys

BEGINNING = "-"


class Event(msgspec.Struct, frozen=True):
    """`at`: unix seconds, the server's clock. `fields` depend on the type: kind and id, prefill and decode, why ..."""

    id: str
    at: float
    type: str  # joined, left, lost, flipped, scaled, decided, retried, repaired
    fields: dict[str, str] = {}


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
    fields = fields_of(flat)
    return Event(event_id, int(event_id.partition("-")[0]) / 1e3, fields.pop("type", ""), fields)
