"""What `ratio.mode: auto` has decided, in Redis: a bounded list of lines, for an operator to read."""

from __future__ import annotations

import msgspec

from orchestrator.store.client import Redis
from orchestrator.store.keys import Keys

KEPT = 100  # decisions


class Noted(msgspec.Struct, frozen=True):
    """One decision."""

    at: float  # unix seconds
    decision: str  # one line, with its numbers


class RatioHistory:
    """Every method raises RedisAway."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._key = redis, Keys(namespace).ratio_history

    async def note(self, at: float, decision: str) -> None:
        await self._redis.execute_command("LPUSH", self._key, msgspec.json.encode(Noted(at, decision)))
        await self._redis.execute_command("LTRIM", self._key, 0, KEPT - 1)

    async def read(self) -> list[Noted]:
        """The newest first. What cannot be read is left out."""
        found = []
        for line in await self._redis.execute_command("LRANGE", self._key, 0, -1):
            try:
                found.append(msgspec.json.decode(line, type=Noted))
            except msgspec.DecodeError:
                continue
        return found
