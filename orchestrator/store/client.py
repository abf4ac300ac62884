"""The connection to Redis: one pipelined connection, and one for all subscriptions (`subscriptions`).

Every condition that makes Redis unusable raises `RedisAway`. Not responsible for what the keys mean.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
from collections.abc import AsyncGenerator
from typing import Any

import hiredis
import redis.asyncio
from redis.exceptions import AuthenticationError, MovedError, NoPermissionError, RedisError, ResponseError

from orchestrator.config.settings import ConfigError
from orchestrator.config.values import masked
from orchestrator.process.tasks import backoff_s, cancelled
from orchestrator.store.keys import Library
from orchestrator.store.servers import Command, Pipe, Servers
from orchestrator.store.subscriptions import Subscriptions

log = logging.getLogger("pd.redis")

OLDEST_VERSION, _OLDEST = (7, 0), "7.0"  # the first with functions
# Errors of a server that is not, or not yet, the right one. Another may be behind the same address by now: after
# a fail-over old connections still lead to the old one. (LOADING, the last of them, is a ConnectionError of redis-py.)
_REPLICA_ERRORS = redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError
_ELSEWHERE = (*_REPLICA_ERRORS, MovedError, redis.exceptions.ClusterDownError)
_MAX_MOVES = 3  # of one command, from node to node of a cluster
_FUNCTION_COMMANDS = ("FCALL", "FUNCTION LOAD")
# After a failure calls fail at once for about this long: a Redis that is away costs one time-out, not one per request.
# The longer it is away, the longer: a server that has just started cannot take thousands of TLS handshakes at once. At
# most less than a heartbeat: of two, after which operators take the fleet for complete, one finds the server.
_AWAY_FIRST_S, _AWAY_MOST_S = 0.25, 0.5
_DEADLINE_STEP_S = 0.01
_STALL_S = 0.1  # a time-out that comes later than this says that our loop stood still


class RedisAway(ConnectionError):
    """Redis cannot be used now: it is unreachable, too slow, or refuses. One line with the URL and the fix."""


class RedisUnfit(RedisAway, ConfigError):
    """Nor can it be later, until somebody changes it or the configuration."""


class NotCarriedOut(RedisAway):
    """The server has refused the command, or was not asked: nothing was done."""


class Redis(redis.asyncio.Redis):
    """redis-py's client over one pipelined connection: what is ready together is sent together, and nothing twice. A
    command whose answer was lost may have been executed; its caller gets RedisAway. Not for blocking commands."""

    def __init__(self, url: str, servers: Servers) -> None:
        """`servers`: that `url` means."""
        super().__init__(connection_pool=servers.pool)
        self.url, self._servers = url, servers
        self._outbox: list[Command] = []
        self._flushes = False  # soon
        self._connector: asyncio.Task[None] | None = None
        self._pipe: Pipe | None = None
        self._subscriptions = Subscriptions(servers)
        self._away_until, self._failures = 0.0, 0  # of connections, in a row
        self._why = ""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            response = await self._ask(*args)
        except ResponseError as error:
            raise self._refused(args[0], error) from None
        callback = self.response_callbacks.get(args[0])
        if callback is None:
            return response
        options.pop("keys", None)
        parsed = callback(response, **options)
        return await parsed if inspect.isawaitable(parsed) else parsed

    async def call(self, library: Library, verb: str, prefix: str, *args: Any) -> Any:
        """Run a function atomically, loading its library when this server does not have it. Raises RedisAway."""
        function = library.function(verb)
        # REPLACE is for a library of this name without this function, which is not ours: ours are named by their text.
        for options in ((), ("REPLACE",)):
            try:
                return await self._ask("FCALL", function, 1, prefix, *args)
            except ResponseError as error:
                if "Function not found" not in str(error):
                    raise self._refused("FCALL", error) from None
            await self._load(library, options)
        return await self.execute_command("FCALL", function, 1, prefix, *args)

    async def _load(self, library: Library, options: tuple[str, ...]) -> None:
        """Load it, unless another client was first: all find an emptied server at once, and a server refuses a name
        that it has in a hundredth of the time that it takes to compile the text. Raises RedisAway."""
        try:
            await self._ask("FUNCTION LOAD", *options, library.text)
        except ResponseError as error:
            if "already exists" not in str(error):
                raise self._refused("FUNCTION LOAD", error) from None

    async def _ask(self, *args: Any) -> Any:
        """One command. Raises RedisAway, and ResponseError where the server refuses it."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._away_until:
            raise NotCarriedOut(self._unusable(self._why))
        # Packed here, so that an argument Redis cannot take fails its caller alone.
        packed = hiredis.pack_command((*args[0].split(), *args[1:]))
        for turn in range(_MAX_MOVES + 1):
            caller: asyncio.Future[Any] = loop.create_future()
            self._outbox.append((packed, caller))
            if not self._flushes:
                self._flushes = True
                loop.call_soon(self._flush)
            try:
                return await caller
            except MovedError:  # this node has not executed it
                if turn == _MAX_MOVES:
                    raise
        raise AssertionError

    def _refused(self, command: str, error: ResponseError) -> RedisAway:
        """RedisAway for an error of the server: out of memory, read-only replica, no permission, loading."""
        why = f"it refused {command}: {error}"
        if command in _FUNCTION_COMMANDS and ("unknown command" in str(error) or isinstance(error, NoPermissionError)):
            why += f" (the queue needs Redis {_OLDEST} or newer, or Valkey, and a user with +fcall and +function|load)"
        return NotCarriedOut(self._unusable(why))

    def _flush(self) -> None:
        self._flushes = False
        if self._pipe is not None and self._pipe.usable:
            self._send_batch(self._pipe)
        elif self._outbox and (self._connector is None or self._connector.done()):
            self._connector = asyncio.create_task(self._connect(), name="redis-connector")

    def _send_batch(self, pipe: Pipe) -> None:
        batch, self._outbox = self._outbox, []
        pipe.send(batch)
        if pipe.reader is None or pipe.reader.done():
            self._begin_reading(pipe)

    def _begin_reading(self, pipe: Pipe, patient: bool = True) -> None:
        pipe.reader = asyncio.create_task(self._read(pipe, patient), name="redis-reader")

    async def _connect(self) -> None:
        try:
            if self._pipe is not None:
                closed, self._pipe = self._pipe, None
                await closed.connection.disconnect(nowait=True)
            connection = self._servers.new_connection()
            await connection.connect()
            self._pipe = Pipe(connection)
            self._send_batch(self._pipe)
        except (RedisError, OSError) as error:
            await self._break(self._pipe, str(error) or type(error).__name__, error)
        except BaseException as error:
            # No caller may be left waiting for an answer.
            await self._break(self._pipe, f"the client stopped ({type(error).__name__}: {error})")
            raise

    async def _read(self, pipe: Pipe, patient: bool) -> None:
        loop, timeout_s = asyncio.get_running_loop(), pipe.connection.socket_timeout
        assert timeout_s is not None, "`connect` sets one"
        try:
            # One deadline is moved on. One for each answer would cost too much: they come by the hundred.
            async with asyncio.timeout(timeout_s) as limit:
                moved_at = loop.time()
                while pipe.callers:
                    try:
                        response = await pipe.connection.read_response(timeout=math.inf, disconnect_on_error=False)
                    except ResponseError as error:
                        caller = pipe.callers.popleft()
                        if not caller.done():
                            caller.set_exception(error)
                        if isinstance(error, MovedError):
                            await self._move(pipe, error)
                        elif isinstance(error, _ELSEWHERE):
                            await self._break(pipe, f"it sends us elsewhere: {error}")
                            await self._subscriptions.reconnect()
                            return
                    else:
                        self._failures = 0
                        caller = pipe.callers.popleft()
                        if not caller.done():
                            caller.set_result(response)
                    if (now := loop.time()) > moved_at + _DEADLINE_STEP_S:
                        moved_at, patient = now, True
                        limit.reschedule(now + timeout_s)
            if pipe is not self._pipe:
                await pipe.connection.disconnect(nowait=True)
        except TimeoutError:
            if pipe.goes_on():
                self._begin_reading(pipe)  # the server takes what it is to answer, which may be long
            elif patient and loop.time() - (limit.when() or 0.0) > _STALL_S:
                self._begin_reading(pipe, patient=False)  # the answers may have come in time, and lie in the socket
            else:
                await self._break(pipe, f"no answer within {timeout_s:g} s")
        except (RedisError, OSError) as error:
            await self._break(pipe, str(error) or type(error).__name__, error)
        except BaseException as error:
            # The next command would get a half-read answer, so this connection is not used again.
            await self._break(pipe, f"the client stopped ({type(error).__name__}: {error})")
            raise

    async def _move(self, pipe: Pipe, error: MovedError) -> None:
        """Later commands and subscriptions go to the node that has this fleet's keys."""
        if pipe is self._pipe:
            self._servers.moved(error, pipe.connection)
            self._pipe = None
            await self._subscriptions.reconnect()

    async def _break(self, pipe: Pipe | None, why: str, cause: Exception | None = None) -> None:
        """Raise RedisAway for all waiting callers, and for a moment for new ones."""
        callers = list(pipe.callers) if pipe else []
        if pipe is self._pipe:  # else its other task was first, or our keys have moved to another server
            self._pipe = None
            self._failures += 1
            pause_s = backoff_s(self._failures, _AWAY_FIRST_S, _AWAY_MOST_S)
            self._why, self._away_until = why, asyncio.get_running_loop().time() + pause_s
            callers += [caller for _, caller in self._outbox]
            self._outbox.clear()
            self._servers.failed()
        for caller in callers:
            if not caller.done():
                away = RedisAway(self._unusable(why))
                away.__cause__ = cause
                caller.set_exception(away)
        if pipe is not None:
            pipe.callers.clear()
            await pipe.connection.disconnect(nowait=True)

    def _unusable(self, why: str) -> str:
        return f"Redis at {masked(self.url)} cannot be used: {why.rstrip('.')}. Start or repair it, or set redis.url"

    def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        return self._subscriptions.listen(channel)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """End the commands in flight. Later calls connect again."""
        await cancelled(self._connector, self._pipe.reader if self._pipe is not None else None)
        await self._break(self._pipe, "the client was closed")
        self._away_until, self._failures = 0.0, 0
        await self._servers.aclose()
        await super().aclose(close_connection_pool)


async def connect(url: str, timeout_s: float) -> Redis:
    """Connect to the server that `url` means (`Servers` has the forms), and check that it answers and is new enough.
    `timeout_s` bounds connecting and each command. Raises RedisAway, also RedisUnfit."""
    try:
        servers = Servers(url, timeout_s)
    except (ValueError, RedisError) as error:
        raise RedisUnfit(f"redis.url {masked(url)!r} is not usable ({error})") from None
    client = Redis(url, servers)
    try:
        await client.execute_command("PING")
        await _check_version(client)
    except BaseException as error:
        await client.aclose()
        if isinstance(error.__cause__, AuthenticationError):
            raise RedisUnfit(str(error)) from None
        raise
    return client


async def _check_version(client: Redis) -> None:
    try:
        server = await client.info("server")
    except RedisAway as error:
        log.debug("the server does not tell its version: %s", error)  # INFO may be forbidden by an ACL
        return
    version = str(server.get("redis_version", ""))
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers and numbers < OLDEST_VERSION:
        raise RedisUnfit(
            f"Redis at {masked(client.url)} is version {version}: upgrade it to {_OLDEST} or newer, or Valkey"
        )
