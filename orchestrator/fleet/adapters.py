"""What a frontend knows of the fleet's LoRA adapters, and how one is loaded or unloaded for the whole fleet.

A change is done when every live frontend serves it. Where one does not, a load is taken back and an unload fails by the
frontend's name. If Redis loses the list, frontends put back the newest that they know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from orchestrator.fleet.control_calls import ControlCalls
from orchestrator.process.tasks import Turns, left_s, set_whenever, until_told
from orchestrator.store.client import NotCarriedOut, RedisAway
from orchestrator.store.configuration import Adapter, AdapterList
from orchestrator.store.fields import NOTHING
from orchestrator.store.registry import Registry
from orchestrator.wire.adapters import adapter_number

log = logging.getLogger("pd.frontend")
T = TypeVar("T")

POLL_S = 1.0  # between two looks at the list, should no news of a change come
FOLLOW_TIMEOUT_S = 10.0  # a frontend that does not live leaves the registry sooner
_LOOK_S, _AGAIN_S = 0.05, 0.2
_TRIES = 10  # of a change, while other frontends make theirs


class AdapterRefused(Exception):
    """The list cannot be changed like that. One line."""


class AdapterFailed(Exception):
    """A frontend did not follow, or Redis was away. One line: who, why, and what is the case now."""


def refusal(known: AdapterList, wanted: Adapter, replacing: bool) -> str | None:
    """Why this adapter cannot be put into the list; None if it can."""
    there = known.adapters.get(wanted.name)
    if there is not None and there != wanted and not replacing:
        return f"the LoRA adapter {wanted.name!r} is loaded from {there.path!r}; set load_inplace to replace it"
    for other in known.adapters.values():
        if other.number == wanted.number and other.name != wanted.name:
            return f"the LoRA adapters {wanted.name!r} and {other.name!r} have the same number; load it by another name"
    return None


class AdapterView:
    """`known`: the list as read last, and what is served here. `on_change` gets a list before it becomes known."""

    def __init__(self, registry: Registry, calls: ControlCalls, announce: Callable[[], Awaitable[None]]) -> None:
        """`announce`: tells others, by this frontend's entry in the registry, what it `serves`."""
        self._registry, self._calls, self._announce = registry, calls, announce
        self.known = AdapterList()
        self.on_change: Callable[[AdapterList], None] = lambda _: None
        self.asked = asyncio.Event()  # Redis has been asked once
        self.serves = NOTHING  # the revision of the list
        self._begun = False
        self._changed = asyncio.Event()
        self._syncing = asyncio.Lock()

    async def run(self) -> None:
        """Follow the list. Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(set_whenever(self._changed, self._registry.adapters.changes()))
            tasks.create_task(self._follow())

    async def _follow(self) -> None:
        turns = Turns(log, "reading the list of adapters")
        while True:
            with turns.turn():
                try:
                    await self._sync()
                except RedisAway as error:
                    log.debug("the list of adapters was not read: %s", error)
            self.asked.set()
            await until_told(self._changed, left_s(POLL_S))

    async def begin(self) -> None:
        """To be called before this frontend takes requests: from now on others wait for it. While it starts they do
        not, since making vLLM's app may take long."""
        self._begun = True
        with contextlib.suppress(RedisAway):  # `_follow` tries again
            await self._sync()

    async def _sync(self) -> None:
        """Take the list as it is in Redis, and say there that it is served. Raises RedisAway."""
        async with self._syncing:
            found = await self._registry.adapters.read()
            revision = found.revision if found is not None else 0
            if revision < self.known.revision:
                log.warning("Redis has lost the list of adapters or has an older one: it is put back")
                adapters = self._registry.adapters
                await (adapters.put_back(self.known) if found is None else adapters.change(found, self.known))
            elif found is not None and revision > self.known.revision:
                self.on_change(found)  # first: a list that could not be taken is not served
                self.known = found
            if self._begun and self.serves != self.known.revision:
                self.serves = self.known.revision
                await self._announce()

    async def identify(self, name: str, path: str) -> Adapter:
        """The adapter at this path, with its number. Raises CallFailed if workers cannot read it, or read others."""
        fingerprint = await self._calls.call("fingerprint_lora", [name, path])
        return Adapter(name, path, adapter_number(name, path, fingerprint))

    async def load(self, wanted: Adapter, replacing: bool) -> None:
        """Put an adapter that workers have loaded into the list, and wait until all frontends serve it. If one does
        not, the list is as before. Raises AdapterRefused, AdapterFailed."""
        before = await self.put(wanted.name, wanted, replacing)
        try:
            await self._served_by_all()
        except AdapterFailed as error:
            try:
                there = await self.put(wanted.name, before, replacing=True, over=wanted)
            except (AdapterFailed, AdapterRefused) as second:
                raise AdapterFailed(f"{error}; it is in the list still, since {second}") from error
            done = "it was taken back" if there == wanted else "somebody else has changed it meanwhile"
            raise AdapterFailed(f"{error}; {done}") from error

    async def unload(self, name: str) -> bool:
        """Take an adapter out of the list, and wait until no frontend serves it, also where it is out already. Returns
        whether it was there. Raises AdapterFailed."""
        before = await self.put(name, None)
        try:
            await self._served_by_all()
        except AdapterFailed as error:
            raise AdapterFailed(f"it is out of the list, but {error}") from error
        return before is not None

    async def put(
        self,
        name: str,
        wanted: Adapter | None,
        replacing: bool = False,
        over: Adapter | None = None,
        patience_s: float | None = None,
    ) -> Adapter | None:
        """Put an adapter into the list (None: take it out), with `over` only in the place of this one; other frontends
        follow in time. Returns what was there. Raises AdapterRefused, AdapterFailed.

        `patience_s`: how long it is tried again while Redis is away; None: as long as frontends have to follow.
        """
        until = time.monotonic() + (FOLLOW_TIMEOUT_S if patience_s is None else patience_s)
        try:
            for _ in range(_TRIES):
                await _once_back(self._sync, until)
                before = self.known.adapters.get(name)
                if before == wanted or over not in (None, before):
                    return before
                if wanted is not None and (why := refusal(self.known, wanted, replacing)) is not None:
                    raise AdapterRefused(why)
                seen = self.known if self.known.revision else None
                changed = self.known.changed(name, wanted)
                change = partial(self._registry.adapters.change, seen, changed, by_operator=True)
                if await _once_back(change, until, NotCarriedOut):
                    await _once_back(self._sync, until)
                    return before
        except RedisAway as error:
            raise AdapterFailed(f"the list of adapters cannot be changed: {error}") from error
        raise AdapterFailed("other frontends change the list of adapters all the time; ask again")

    async def _served_by_all(self) -> None:
        """Wait until every live frontend serves the list that is known here, or a newer one. Raises AdapterFailed."""
        revision, until = self.known.revision, time.monotonic() + FOLLOW_TIMEOUT_S
        try:
            while late := await _once_back(partial(self._behind, revision), until):
                if time.monotonic() > until:
                    names = f"frontend {', '.join(late)}"
                    raise AdapterFailed(f"{names} did not follow the list of adapters within {FOLLOW_TIMEOUT_S:g} s")
                await asyncio.sleep(_LOOK_S)
        except RedisAway as error:
            raise AdapterFailed(f"it is not known whether all frontends follow: {error}") from error

    async def _behind(self, revision: int) -> list[str]:
        """The live frontends that serve an older list. One that starts reads the list before it serves."""
        there = (await self._registry.frontends()).values()
        return [it.id for it in there if it.adapters < revision and (it.adapters != NOTHING or it.url)]


async def _once_back(what: Callable[[], Awaitable[T]], until: float, away: type[RedisAway] = RedisAway) -> T:
    """The result of `what`, tried again while Redis is away, `until` a monotonic time: it may be so for a moment only.
    Raises RedisAway then, and one that is not `away` at once."""
    while True:
        try:
            return await what()
        except away:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(_AGAIN_S)
