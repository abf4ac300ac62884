"""Which server a Redis URL means now, the one it names, the primary that Sentinels name, or a node of a cluster; and an
open connection to it.

All keys of a namespace are in one slot, so one node of a cluster has them all.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import select
import termios
from collections import deque
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import MovedError

from orchestrator.config.access import REDIS_URL
from orchestrator.config.settings import Config, ConfigError
from orchestrator.config.values import check_redis_url

_SENTINEL_PORT, _REDIS_PORT = 26379, 6379
_SENTINEL_OPTION = "sentinel_"  # before the names of options that are for the Sentinels themselves
_LONG_BYTES = 1 << 18  # a server that stands still may take less: its kernel does
Command = tuple[bytes, "asyncio.Future[Any]"]  # packed, and who waits for the answer


class Pipe:
    """One open connection, and the callers that wait for answers on it, in order."""

    def __init__(self, connection: AbstractConnection) -> None:
        self.connection = connection
        self.callers: deque[asyncio.Future[Any]] = deque()
        self.reader: asyncio.Task[None] | None = None
        # redis-py's own way of sending takes two turns of the loop, in which a busy frontend parses other requests.
        assert connection._writer is not None, "it stands"
        self._writer = connection._writer
        self._descriptor: int = self._writer.get_extra_info("socket").fileno()
        self._closed = select.poll()
        self._closed.register(self._descriptor, select.POLLIN)
        self._sent = 0  # bytes
        self._seen = 0, 0  # by `goes_on`: how many of them the server had not taken, and had

    @property
    def usable(self) -> bool:
        """Whether a command may be sent. When no caller waits, no reader would notice that a restarted server closed
        the connection, so this asks the kernel: otherwise the command would be lost."""
        return not self._writer.is_closing() and bool(self.callers or not self._closed.poll(0))

    def send(self, commands: list[Command]) -> None:
        self.callers.extend(caller for _, caller in commands)
        size = sum(len(packed) for packed, _ in commands)
        self._sent += size
        self._writer.writelines(packed for packed, _ in commands)
        if size > _LONG_BYTES:
            self.goes_on()  # from now on

    def goes_on(self) -> bool:
        """Whether much was unsent at the last call, and the server has taken some of it since: jobs of long prompts
        have megabytes, which take longer than an answer on a slow or shared link."""
        kept = array.array("i", [0])  # by the kernel: sent and not acknowledged, too (tcp(7), SIOCOUTQ)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._descriptor, termios.TIOCOUTQ, kept)
        unsent = self._writer.transport.get_write_buffer_size() + kept[0]
        (unsent_before, taken_before), self._seen = self._seen, (unsent, self._sent - unsent)
        return unsent_before > _LONG_BYTES and self._sent - unsent > taken_before


class Servers:
    """The servers that a URL means: `redis://HOST:PORT`, `redis+cluster://HOST:PORT,HOST:PORT` or
    `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE`. Makes connections to them, and keeps none.

    `rediss` instead of `redis` is TLS. A user, a password, a database and redis-py's options have their usual places;
    `?sentinel_username=U&sentinel_password=P` is for Sentinels, which have users of their own.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """`timeout_s` bounds connecting and each answer. Raises ValueError, and RedisError."""
        check_redis_url(url)
        self.timeout_s = timeout_s
        options: dict[str, Any] = {
            "protocol": 2,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            **({} if url.startswith("unix:") else {"socket_keepalive": True}),
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
            "driver_info": None,
        }
        scheme, _, kind = url.partition("://")[0].partition("+")
        self._sentinel: Sentinel | None = None
        self._nodes: list[tuple[str, int]] = []  # of a cluster; the first is where connections go
        if not kind:
            self.pool = ConnectionPool.from_url(url, **options)
            return
        credentials, hosts, service, single = _split(url, scheme, _SENTINEL_PORT if kind == "sentinel" else _REDIS_PORT)
        if kind == "cluster":
            self.pool = ConnectionPool.from_url(single, **options)
            self._nodes = hosts
            return
        pool = ConnectionPool.from_url(single, **options)
        own = {name: value for name, value in pool.connection_kwargs.items() if name not in ("host", "port")}
        timeouts = {name: value for name, value in own.items() if name.startswith("socket_") and "timeout" in name}
        self._sentinel = Sentinel(hosts, sentinel_kwargs={**timeouts, **credentials, "retry": own.get("retry")})
        secure = scheme == "rediss"
        connection_class = SentinelManagedSSLConnection if secure else SentinelManagedConnection
        self.pool = SentinelConnectionPool(service, self._sentinel, connection_class=connection_class, **own)

    def new_connection(self) -> AbstractConnection:
        """A new connection, which is not connected yet."""
        if not self._nodes:
            connection: AbstractConnection = self.pool.make_connection()
            return connection
        host, port = self._nodes[0]
        made: AbstractConnection = self.pool.connection_class(
            **{**self.pool.connection_kwargs, "host": host, "port": port}
        )
        return made

    def leads_to(self, connection: AbstractConnection) -> bool:
        """Whether a new connection would go to the same node of a cluster."""
        return not self._nodes or self._nodes[0] == (getattr(connection, "host", ""), getattr(connection, "port", 0))

    def moved(self, error: MovedError, connection: AbstractConnection) -> None:
        """A node of a cluster told which one has our keys: new connections go there."""
        here = (getattr(connection, "host", ""), getattr(connection, "port", 0))
        there = (error.host or here[0], error.port)  # no host: another port of the same
        known = [node for node in self._nodes or [here] if node != there]
        self._nodes = [there, *known]

    def failed(self) -> None:
        """The last connection could not be made or broke: the next one goes to another node of the cluster."""
        self._nodes = [*self._nodes[1:], *self._nodes[:1]]

    async def aclose(self) -> None:
        """Connections are closed by who made them."""
        if self._sentinel is not None:
            await self._sentinel.aclose()


def _split(url: str, scheme: str, default_port: int) -> tuple[dict[str, str], list[tuple[str, int]], str, str]:
    """The Sentinels' credentials, hosts, the service's name, and a URL of one host with the rest."""
    parts = urlsplit(url)
    user, at, listed = parts.netloc.rpartition("@")
    hosts = [_host(part, default_port) for part in listed.split(",")]
    service, _, database = (
        parts.path.strip("/").partition("/") if scheme and "+sentinel" in url else ("", "", parts.path)
    )
    query = parse_qsl(parts.query)
    sentinels = {
        name.removeprefix(_SENTINEL_OPTION): value for name, value in query if name.startswith(_SENTINEL_OPTION)
    }
    rest = urlencode([(name, value) for name, value in query if not name.startswith(_SENTINEL_OPTION)])
    host, port = hosts[0]
    bracketed = f"[{host}]" if ":" in host else host
    single = f"{scheme}://{user}{at}{bracketed}:{port}/{database.strip('/')}" + (f"?{rest}" if rest else "")
    return sentinels, hosts, service, single


def _host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    return parts.hostname or "", parts.port or default_port


def redis_elsewhere(config: Config) -> str:
    """Where Redis is for a process that no launcher starts: `redis.url`, or PD_REDIS_URL. Raises ConfigError."""
    url = os.environ.get(REDIS_URL) if config.redis.url == "embedded" else config.redis.url
    if not url:
        raise ConfigError(f"--redis: required where neither redis.url of --config nor {REDIS_URL} says where Redis is")
    return url
