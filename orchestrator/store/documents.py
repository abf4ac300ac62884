"""What a fleet keeps in Redis as one piece of JSON, and changes by compare-and-set: whoever decides on what another has
changed meanwhile decides again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

import msgspec

from orchestrator.store.client import Redis
from orchestrator.store.keys import KEPT_S, REGISTRY, Keys

T = TypeVar("T", bound=msgspec.Struct)


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
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            value = self._decoder.decode(found) if found else None
        self._last = value, found
        return value

    async def write(self, wanted: T) -> None:
        """Whatever is there. It stays for `KEPT_S` when the fleet ends."""
        await self._redis.execute_command("SET", self._key, msgspec.json.encode(wanted), "EX", KEPT_S)

    async def change(self, seen: T | None, wanted: T) -> bool:
        """Replace what was `seen`. False if another process has changed it meanwhile."""
        value, found = self._last
        # Another release may have written other bytes for the same.
        was = found if seen == value else b"" if seen is None else msgspec.json.encode(seen)
        return await self._replace(was, wanted)

    async def put_back(self, known: T) -> bool:
        """After Redis has lost it. What another release wrote there stays, though it cannot be read here."""
        return await self._replace(b"", known)

    async def _replace(self, was: bytes, wanted: T) -> bool:
        verb, prefix = "write_document", self._keys.prefix
        return bool(await self._redis.call(REGISTRY, verb, prefix, self._name, was, msgspec.json.encode(wanted)))

    async def delete(self) -> None:
        """That of a fleet that has ended, so that the next one starts with its own."""
        await self._redis.execute_command("DEL", self._key)

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yields when it may have been changed. Never ends, never raises."""
        async with contextlib.aclosing(self._redis.listen(f"{self._key}_changed")) as told:
            async for _ in told:
                yield
