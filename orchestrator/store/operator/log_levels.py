"""Log levels that an operator sets while a fleet runs: a hash in Redis, level by process, that each process reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from orchestrator.process.tasks import left_s
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.keys import LEVELS_S, Keys

ALL, CONFIGURED = "*", "configured"
_EVERY_S = 2.0


class LogLevels:
    """Every method raises RedisAway."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._key = redis, Keys(namespace).log_levels

    async def set(self, level: str | None, process: str = ALL) -> None:
        """`level`: a name that `logging` knows; None: the configured one. For `ALL` it replaces those of processes."""
        if process == ALL:
            await self._redis.delete(self._key)
        if level is not None or process != ALL:
            await self._redis.hset(self._key, process, level or CONFIGURED)
            await self._redis.expire(self._key, LEVELS_S)  # which members renew: it is not of the next fleet

    async def of(self, process: str) -> list[str | None]:
        """The level that was set for this process, and that for all; None where none was. See CONFIGURED."""
        found = await self._redis.hmget(self._key, [process, ALL])
        return [level.decode() if isinstance(level, bytes) else level for level in found]


async def follow_log_level(levels: Iterable[LogLevels], process: str, logger: logging.Logger) -> None:
    """Give the logger the level that is set for this process, and its own level back. Runs until cancelled. `levels`:
    of each of the fleet's models; the first that has one for this process counts, else the first with one for all."""
    configured = logger.level
    while True:
        try:
            told = [await each.of(process) for each in list(levels)]
            level = next((level for kind in zip(*told, strict=True) for level in kind if level), CONFIGURED)
            logger.setLevel(configured if level == CONFIGURED else level)
        except (RedisAway, ValueError):  # ValueError: a level that this Python does not know
            pass
        await asyncio.sleep(left_s(_EVERY_S))
