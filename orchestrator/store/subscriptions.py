"""What a client of Redis hears: channels, all over one connection, which is made again whenever it breaks.

A frontend of many models has several channels for each of them, and a fleet many frontends. Says nothing of what the
messages mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable

import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoPermissionError, RedisError

from orchestrator.process.tasks import backoff_s, cancelled
from orchestrator.store.servers import Servers

log = logging.getLogger("pd.redis")

_IDLE_S = 2.0  # then the server is asked whether it is there, and for channels that it refused
_FIRST_S, _MOST_S = 0.1, 1.0  # before the connection is made again
_MOST_UNREAD = 10_000  # messages that one listener has not taken

Listener = asyncio.Queue[bytes | None]


class Subscriptions:
    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._listeners: dict[bytes, set[Listener]] = {}  # by channel
        self._connection: AbstractConnection | None = None  # that takes commands
        self._asked: deque[bytes] = deque()  # channels whose answer is to come, in its order
        self._refused: set[bytes] = set()
        self._reading: asyncio.Task[None] | None = None

    async def listen(self, name: str) -> AsyncGenerator[bytes | None, None]:
        """Messages of a channel. Never ends and never raises, whatever happens to Redis. Yields None after each
        (re)connection: messages from before it may be lost."""
        channel, mine = name.encode(), Listener()
        try:
            self._listeners.setdefault(channel, set()).add(mine)
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read(), name="redis-subscriptions")
            else:
                await self._send("SUBSCRIBE", [channel])
            while True:
                yield await mine.get()
        finally:
            await self._leave(channel, mine)

    async def _leave(self, channel: bytes, listener: Listener) -> None:
        here = self._listeners[channel]
        here.discard(listener)
        if not here:
            del self._listeners[channel]
            self._refused.discard(channel)
        if not self._listeners:
            reading, self._reading = self._reading, None  # who comes now begins another one
            await cancelled(reading)
        elif not here:
            await self._send("UNSUBSCRIBE", [channel])

    async def reconnect(self) -> None:
        """The server may be another one by now."""
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)

    async def _send(self, command: str, channels: Iterable[bytes]) -> None:
        """One command for each, which has its own answer. What cannot be sent is sent with the next connection."""
        connection, each = self._connection, list(channels)
        if connection is None or not connection.is_connected:  # it would connect by itself, and nobody would read it
            return
        if command == "SUBSCRIBE":
            self._asked += each
        try:
            async with asyncio.timeout(self._servers.timeout_s):
                await connection.send_packed_command(
                    connection.pack_commands([(command, channel) for channel in each]), check_health=False
                )
        except (RedisError, OSError) as error:
            log.debug("%s was not sent: %s", command, error)
            await connection.disconnect(nowait=True)

    async def _read(self) -> None:
        failures = 0
        while True:
            connection = self._servers.new_connection()
            # redis-py's own time-out is a `wait_for`, which in Python 3.11 may swallow the cancellation of who listens.
            connection.socket_timeout = None
            try:
                async with asyncio.timeout(self._servers.timeout_s):
                    await connection.connect()
                self._connection = connection
                self._asked.clear()
                self._refused.clear()
                await self._send("SUBSCRIBE", self._listeners)
                if not self._servers.leads_to(connection):
                    raise redis.exceptions.ConnectionError("our keys have moved meanwhile")
                async for channel, payload in self._messages(connection):
                    failures = 0
                    for listener in self._listeners.get(channel, ()):
                        _tell(listener, payload)
            except (RedisError, OSError) as error:
                log.debug("the subscriptions broke: %s", error)
            except Exception:  # nobody would hear anything any more
                log.exception("the subscriptions met a defect, and begin anew")
            finally:
                if self._connection is connection:
                    self._connection = None
                await connection.disconnect(nowait=True)
            failures += 1
            await asyncio.sleep(backoff_s(failures, _FIRST_S, _MOST_S))

    async def _messages(self, connection: AbstractConnection) -> AsyncGenerator[tuple[bytes, bytes | None], None]:
        """Of any channel; None once it is subscribed to. Raises RedisError, OSError when the connection breaks."""
        pinged, again_at = False, time.monotonic() + _IDLE_S
        while True:
            if self._refused and time.monotonic() > again_at:
                again_at, refused = time.monotonic() + _IDLE_S, list(self._refused)
                self._refused.clear()
                await self._send("SUBSCRIBE", refused)
            try:
                message = await connection.read_response(timeout=_IDLE_S)
            except NoPermissionError as error:  # for this channel alone
                if not self._asked:
                    raise
                if (channel := self._asked.popleft()) in self._listeners:
                    self._refused.add(channel)
                log.debug("subscription to %s is refused: %s", channel.decode(), error)
                continue
            if message is None:
                # All is quiet, or the peer died without closing the connection. Ping once.
                if pinged:
                    raise redis.exceptions.ConnectionError("no answer to a ping")
                if not connection.is_connected:  # it would connect by itself, and be subscribed to nothing
                    raise redis.exceptions.ConnectionError("it was closed here")
                await connection.send_command("PING", check_health=False)
            elif message[0] == b"subscribe":
                self._asked.popleft()
                yield message[1], None
            elif message[0] == b"message":
                yield message[1], message[2]
            pinged = message is None


def _tell(listener: Listener, payload: bytes | None) -> None:
    if listener.qsize() >= _MOST_UNREAD:  # it does not take them: as if they had been lost
        while not listener.empty():
            listener.get_nowait()
        payload = None
    listener.put_nowait(payload)
