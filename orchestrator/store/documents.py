"""What a fleet keeps in Redis as one piece of JSON, and changes by compare-and-set: whoever decides on what another has
changed meanwhile decides again. And how an operator's change gets its answer, though the connection breaks."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

import msgspec

from orchestrator.store.client import NotCarriedOut, Redis, RedisAway
from orchestrator.store.keys import KEPT_S, REGISTRY, Keys

T = TypeVar("T", bound=msgspec.Struct)
_PATIENCE_S, _ASK_AGAIN_S = 10.0, 0.5  # much less than Redis keeps an answer


async def answered(redis: Redis, prefix: str, verb: str, *args: Any) -> Any:
    """What the registry's function says to a change that an operator orders. If the answer is lost it is asked for
    again: by its token Redis carries the change out once. Raises NotCarriedOut, and RedisAway, which says that nobody
    knows whether it was done, when Redis stays away."""
    token, deadline, lost = secrets.token_hex(8), _now() + _PATIENCE_S, False
    while True:
        try:
            return await redis.call(REGISTRY, "once", prefix, token, verb, *args)
        except RedisAway as error:
            lost = lost or not isinstance(error, NotCarriedOut)
            if not lost:
                raise
            away = error
        await asyncio.sleep(_ASK_AGAIN_S)
        if _now() > deadline:  # after a stop of this process or its machine Redis may have forgotten the token
            why = "whether the order was carried out is not known: look with `orchestrator status` once it is back"
            raise RedisAway(f"{away}; {why}")


def _now() -> float:
    """Seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Document(Generic[T]):
    """Every method but `changes` raises RedisAway."""

    def __init__(self, redis: Redis, namespace: str, name: str, kind: type[T]) -> None:
        self._redis, self._keys, self._name = redis, Keys(namespace), name
        self._key = self._keys.prefix + name
        self._decoder = msgspec.json.Decoder(kind)
        self._last: tuple[T | None, bytes] = (None, b"")  # as read, and as it is in Redis

    async def read(self) -> T | None:
        """None if there is none, or none that can be read, as that of another release; `change` replaces that too."""
        found: bytes = await self._redis.execute_command("GET", self._key) or b""
        value = None
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            value = self._decoder.decode(found) if found else None
        self._last = value, found
        return value

    async def write(self, wanted: T) -> None:
        """Whatever is there. It stays for `KEPT_S` when the fleet ends."""
        await self._redis.execute_command("SET", self._key, msgspec.json.encode(wanted), "EX", KEPT_S)

    async def change(self, seen: T | None, wanted: T, by_operator: bool = False) -> bool:
        """Replace what was `seen`. False if another process has changed it meanwhile. `by_operator`: see `answered`."""
        return await self._replace(self._bytes_of(seen), msgspec.json.encode(wanted), by_operator)

    async def put_back(self, known: T) -> bool:
        """After Redis has lost it. What another release wrote there stays, though it cannot be read here."""
        return await self._replace(b"", msgspec.json.encode(known))

    async def delete(self, seen: T | None) -> bool:
        """Remove what was `seen`, of a fleet that has ended, so that the next one starts with its own. False if another
        process has changed it meanwhile."""
        was = self._bytes_of(seen)
        return not was or await self._replace(was, b"")

    def _bytes_of(self, seen: T | None) -> bytes:
        """As Redis has it. Another release may have written other bytes for the same."""
        value, found = self._last
        return found if seen == value else b"" if seen is None else msgspec.json.encode(seen)

    async def _replace(self, was: bytes, wanted: bytes, by_operator: bool = False) -> bool:
        what = self._keys.prefix, "write_document", self._name, was, wanted
        if by_operator:
            return bool(await answered(self._redis, *what))
        prefix, verb, *args = what
        return bool(await self._redis.call(REGISTRY, verb, prefix, *args))

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yields when it may have been changed. Never ends, never raises."""
        async with contextlib.aclosing(self._redis.listen(f"{self._key}_changed")) as told:
            async for _ in told:
                yield
