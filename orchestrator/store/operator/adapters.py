"""The fleet's list of LoRA adapters in Redis, with a revision that every change raises.

Frontends follow it (`fleet/adapters.py`), and each says which revision it serves. Those of a frontend's configuration
are not in it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from orchestrator.store.client import Redis
from orchestrator.store.keys import REGISTRY, Keys

log = logging.getLogger("pd.registry")


class Adapter(msgspec.Struct, frozen=True):
    """`number`: by which engines know it; see `wire.adapters`. `path`: as workers read it."""

    name: str
    path: str
    number: int
    base_model: str | None = None
    is_3d: bool = False  # the layout of its MoE weights, as vLLM's `is_3d_lora_weight`


class AdapterList(msgspec.Struct, frozen=True):
    revision: int = 0
    adapters: dict[str, Adapter] = {}  # by name


class AdapterStore:
    """Every method but `changes` raises RedisAway."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._keys = redis, Keys(namespace)

    async def change(self, name: str, adapter: Adapter | None, known: int) -> int:
        """Put an adapter in the place of the one of this name, or take it out (None). Returns the new revision; 0 if
        the list has another revision than `known`, and nothing is done."""
        row = msgspec.json.encode(adapter) if adapter is not None else b""
        return int(await self._call("change_adapters", known, name, row))

    async def follow(self, frontend_id: str | None, known: int) -> AdapterList | None:
        """The list, if it has another revision than `known`, which this frontend says to serve (None: it does not serve
        yet)."""
        revision, *rows = await self._call("follow_adapters", frontend_id or "", known)
        if not rows:
            return None
        return AdapterList(int(revision), {one.name: one for one in map(_read, rows[0][1::2]) if one is not None})

    async def restore(self, kept: AdapterList) -> None:
        """Put this list back if Redis has lost it, or has an older one."""
        rows = (part for one in kept.adapters.values() for part in (one.name, msgspec.json.encode(one)))
        await self._call("restore_adapters", kept.revision, *rows)

    async def behind(self, revision: int) -> list[str]:
        """The live frontends that serve an older list."""
        return [name.decode() for name in await self._call("behind_adapters", revision)]

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yields when the list may have changed. Never ends, never raises."""
        async with contextlib.aclosing(self._redis.listen(self._keys.adapters_changed)) as told:
            async for _ in told:
                yield

    async def _call(self, verb: str, *args: Any) -> Any:
        return await self._redis.call(REGISTRY, verb, self._keys.prefix, *args)


def _read(row: bytes) -> Adapter | None:
    try:
        return msgspec.json.decode(row, type=Adapter)
    except msgspec.DecodeError as error:
        log.warning("left out an adapter of the list, which cannot be read: %r (%s)", row[:80], error)
        return None
