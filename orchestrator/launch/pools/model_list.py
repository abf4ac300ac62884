"""The processes of all models of a fleet, made equal to its list of models in Redis (`store/operator/models.py`).

A model that is added has its workers first, and frontends after them; one that is removed loses its frontends first.
Frontends take a model up, or leave it, by being replaced, as in a rollout. Each launcher does its own part; whichever
sees that all is done says so in the list.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from orchestrator.config.models import SECTION
from orchestrator.config.settings import ConfigError
from orchestrator.launch.fleet_processes import FleetProcesses
from orchestrator.process.parent import has_ended
from orchestrator.process.tasks import Turns, cancelled, left_s
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.operator.models import ListedModel, ModelList, ModelState, ModelStore
from orchestrator.store.planned import decided

log = logging.getLogger("pd.launcher")

_EVERY_S = 0.5
COME_BACK_S = 4.0  # after Redis was away; launchers and frontends that live tell it of themselves each second


class ModelsProcesses:
    """As `FleetProcesses`, for all models, as those of one. The first model's registry has the frontends of all."""

    def __init__(self, models: Mapping[str, FleetProcesses]) -> None:
        self.models = dict(models)
        self._watching: dict[str, asyncio.Task[None]] = {}

    @property
    def first(self) -> FleetProcesses:
        """Whose registry has all frontends."""
        return next(fleet for fleet in self.models.values() if fleet.frontends.is_first)

    async def start(self) -> None:
        """Raises ConfigError, RedisAway."""
        for fleet in self.models.values():
            fleet.frontends.serve()
        for fleet in reversed(self.models.values()):  # the first starts the frontends, with what all models run
            await fleet.start()

    def watch(self) -> None:
        for name in self.models:
            self._watch(name)

    def _watch(self, name: str) -> None:
        self._watching[name] = asyncio.create_task(self.models[name].watch.run(), name=f"watch-{name}")

    async def add(self, name: str, fleet: FleetProcesses) -> None:
        """Start the workers of one more model, while all are watched. Raises ConfigError, RedisAway."""
        self.models[name] = fleet
        await fleet.start()
        self._watch(name)

    async def remove(self, name: str) -> None:
        """End the workers of a model that frontends have left. Returns when they are gone."""
        await cancelled(self._watching.pop(name, None))
        if (fleet := self.models.get(name)) is not None:
            await fleet.end()
            await fleet.remove_shared_memory()  # nobody watches them any more
            del self.models[name]

    def read_soon(self) -> None:
        for fleet in self.models.values():
            fleet.watch.read_soon()

    async def until_ready(self) -> None:
        """Returns when all are. Raises StartFailed."""
        try:
            async with asyncio.TaskGroup() as together:
                for fleet in self.models.values():
                    together.create_task(fleet.until_ready())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def end(self) -> None:
        """Frontends first, then the workers of all models, at once. Returns when all are gone."""
        await cancelled(*self._watching.values())
        for fleet in self.models.values():
            await fleet.frontends.close()
        await asyncio.gather(*(fleet.end() for fleet in self.models.values()))

    def kill(self) -> None:
        for fleet in self.models.values():
            fleet.kill()


async def begin_list(redis: Redis, fleet: str, tree: Mapping[str, Any]) -> ModelList:
    """This file's models, written down as the fleet's, or those that it has elsewhere. Raises Refused, RedisAway."""
    store = ModelStore(redis, fleet)

    async def decide() -> ModelList | None:
        listed = await store.read()
        if listed is not None and await store.is_followed(listed, has_ended):
            return listed
        revision = 1 + (listed.revision if listed is not None else 0)
        models = {name: ListedModel(section) for name, section in tree[SECTION].items()}
        ours = ModelList(revision, models, begun=secrets.token_hex(4))
        return ours if await store.change(listed, ours) else None

    return await decided(decide)


class ModelFollower:
    """`run` it while the fleet is watched."""

    def __init__(
        self,
        store: ModelStore,
        fleet: ModelsProcesses,
        make: Callable[[str, dict[str, Any]], Awaitable[FleetProcesses]],
        forget: Callable[[str], Awaitable[bool]],
        listed: ModelList,
    ) -> None:
        """`make`: a model's processes, by its name and section, none started; it raises ConfigError. `forget` removes
        what a model without processes here has left; False while others have members. `listed`: at the start."""
        self._store, self._fleet = store, fleet
        self._make, self._forget = make, forget
        self._known = listed
        self._away_at = -math.inf  # monotonic
        self._turns = Turns(log, "the list of models")
        self._doing: dict[str, asyncio.Task[None]] = {}  # what is done for a model, which takes long

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            while True:
                with self._turns.turn():
                    try:
                        await self._follow()
                    except RedisAway:
                        self._away_at = time.monotonic()
                await asyncio.sleep(left_s(_EVERY_S))
        finally:
            await cancelled(*self._doing.values())

    async def _follow(self) -> None:
        listed = await self._store.read()
        if listed is None:  # Redis was restarted, and has forgotten
            self._away_at = time.monotonic()
            await self._store.put_back(self._known)
            return
        if listed.begun not in ("", self._known.begun):  # "": an older release has changed it
            listed = await self._joined(listed)
        self._known = listed
        for name in [name for name, task in self._doing.items() if task.done()]:
            self._doing.pop(name).result()
        for name, model in listed.models.items():
            if model.state is ModelState.REMOVING:
                await self._remove(name, listed)
            elif name not in self._fleet.models and name not in self._doing:
                self._doing[name] = asyncio.create_task(self._add(name, model), name=f"add-{name}")
            elif model.state is ModelState.ADDING and name not in self._doing and await self._is_served(name):
                await self._store.change(listed, listed.with_model(name, _in(model, ModelState.SERVING)))
        for name in self._fleet.models.keys() - listed.models.keys():  # another launcher has completed its removal
            await self._end_here(name)

    async def _joined(self, listed: ModelList) -> ModelList:
        """A list that another launcher began while Redis knew nobody here, with what runs here. Raises RedisAway."""
        self._away_at = time.monotonic()
        joined = self._known.over(listed)
        if joined is listed:
            return listed
        log.warning("another launcher has begun a list of models: what runs here is put into it")
        # Where somebody else has changed it, the next look decides.
        return joined if await self._store.change(listed, joined) else self._known

    async def _add(self, name: str, model: ListedModel) -> None:
        log.info("model %s: is added", name)
        try:
            fleet = await self._make(name, model.section)
            await self._fleet.add(name, fleet)
            await fleet.until_started()
            fleet.frontends.serve()
            await fleet.until_served()
        except ConfigError as error:
            await self._give_up(name, str(error))
        except RedisAway as error:
            log.warning("model %s: %s", name, error)
            await self._end_here(name)  # it is tried again
        except Exception as error:  # a defect that one model meets must not end the others
            log.exception("model %s cannot be added", name)
            await self._give_up(name, f"{type(error).__name__}: {error}")

    async def _give_up(self, name: str, why: str) -> None:
        log.error("model %s cannot be added: %s", name, why)
        while True:
            try:
                listed = await self._store.read()
                if listed is None or name not in listed.models:
                    return
                gone = ListedModel(listed.models[name].section, ModelState.REMOVING, why)
                if await self._store.change(listed, listed.with_model(name, gone)):
                    return
            except RedisAway:
                await asyncio.sleep(_EVERY_S)

    async def _is_served(self, name: str) -> bool:
        """Whether all frontends of launchers that serve the first model serve this one. Raises RedisAway."""
        of_first = await self._serving(self._fleet.first)
        of_this = await self._serving(self._fleet.models[name])
        return bool(of_first) and of_first <= of_this

    async def _serving(self, fleet: FleetProcesses) -> set[str]:
        frontends = await fleet.registry.frontends()
        return {name for name, frontend in frontends.items() if frontend.url and not frontend.by_hand}

    async def _remove(self, name: str, listed: ModelList) -> None:
        """Do what can be done now. Raises RedisAway."""
        await cancelled(self._doing.pop(name, None))
        if (fleet := self._fleet.models.get(name)) is not None:
            fleet.frontends.leave()
            self._fleet.first.watch.read_soon()
        # Also of a model that does not run here: without it on the list all others end it.
        known_s = min(time.monotonic() - self._away_at, await self._fleet.first.registry.known_for_s())
        if known_s < COME_BACK_S:
            return  # frontends that Redis has lost may have requests of it
        if fleet is not None:
            if await fleet.registry.frontends():
                return  # they have requests of it
            await self._end_here(name)
        if await self._forget(name) and await self._store.change(listed, listed.without(name)):
            log.info("model %s: is removed", name)

    async def _end_here(self, name: str) -> None:
        if (fleet := self._fleet.models.get(name)) is not None:
            fleet.frontends.leave()
            await self._fleet.remove(name)


def _in(model: ListedModel, state: ModelState) -> ListedModel:
    return msgspec.structs.replace(model, state=state)
