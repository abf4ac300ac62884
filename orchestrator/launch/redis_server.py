"""The fleet's Redis as the launcher sees it: the configured one, or its own, which it starts again when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.embedded_redis import EmbeddedRedis, EmbeddedRedisError
from orchestrator.launch.supervise import backoff_s
from orchestrator.store.client import Redis, RedisAway, connect, masked

log = logging.getLogger("pd.launcher")

_LOOK_EVERY_S = 0.2


class RedisServer:
    """`start`, then `keep_running` as a task; `stop` ends what was started."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.url = config.redis.url
        self._config = config
        self._folder = folder
        self._own = EmbeddedRedis() if config.redis.url == "embedded" else None

    @property
    def is_embedded(self) -> bool:
        return self._own is not None

    @property
    def shown_url(self) -> str:
        return masked(self.url)

    async def start(self) -> Redis:
        """Returns a connection to it. Raises ConfigError."""
        try:
            if self._own is not None:
                self.url = await self._own.start(self._folder)
            return await connect(self.url, self._config.redis.timeout_s)
        except (RedisAway, EmbeddedRedisError) as error:
            raise ConfigError(str(error)) from None

    async def keep_running(self, on_restart: Callable[[], None]) -> None:
        """Start our own server again at the same address whenever it dies. Runs until cancelled."""
        crashes = 0
        while self._own is not None:
            await asyncio.sleep(_LOOK_EVERY_S)
            if self._own.alive:
                continue
            crashes += 1
            log.error("redis: the embedded server died; starting it again")
            try:
                await self._own.start(self._folder, port=urlsplit(self.url).port or 0)
            except (EmbeddedRedisError, OSError) as error:
                pause_s = backoff_s(crashes, self._config.launcher)
                log.error("redis: %s; trying again in %.1f s", error, pause_s)
                await asyncio.sleep(pause_s)
            else:
                crashes = 0
                on_restart()

    async def stop(self) -> None:
        if self._own is not None:
            await self._own.stop()
