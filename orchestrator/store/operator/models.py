"""The list of a fleet's models in Redis, with a revision that every change raises: what the file says under `models`,
and models that were added since.

Launchers follow it (`launch/pools/model_list.py`), and frontends start with it. It is of the whole fleet: each model's
own keys are in that model's namespace.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.config.models import namespace_of
from orchestrator.store.client import Redis
from orchestrator.store.documents import Document
from orchestrator.store.keys import KEPT_S, REGISTRY, Keys
from orchestrator.store.planned import of_launchers
from orchestrator.store.registry import Registry


class ModelState(str, enum.Enum):
    ADDING = "adding"  # its workers load, then frontends take it up
    SERVING = "serving"
    REMOVING = "removing"  # frontends leave it, then its workers end


class ListedModel(msgspec.Struct, frozen=True):
    """`section`: its part of the file. `why`: it is taken out again because it could not be added."""

    section: dict[str, Any]
    state: ModelState = ModelState.SERVING
    why: str = ""


class ModelList(msgspec.Struct, frozen=True):
    """In the order of the file. `begun`: which list it is; changes keep that, and another has another."""

    revision: int
    models: dict[str, ListedModel]
    begun: str = ""

    @property
    def present(self) -> dict[str, ListedModel]:
        """Those that are not being removed."""
        return {name: model for name, model in self.models.items() if model.state is not ModelState.REMOVING}

    def with_model(self, name: str, model: ListedModel) -> ModelList:
        return self._changed({**self.models, name: model})

    def without(self, name: str) -> ModelList:
        return self._changed({other: model for other, model in self.models.items() if other != name})

    def over(self, other: ModelList) -> ModelList:
        """The other list with the models of this one too, as they are here, but for those that are removed there."""
        ours = {name: model for name, model in self.models.items() if name in other.present or name not in other.models}
        models = {**other.models, **ours}
        return other if models == other.models else other._changed(models)

    def _changed(self, models: dict[str, ListedModel]) -> ModelList:
        return ModelList(self.revision + 1, models, self.begun)


class ModelStore(Document[ModelList]):
    def __init__(self, redis: Redis, fleet: str) -> None:
        """`fleet`: the namespace of the whole."""
        super().__init__(redis, fleet, "models", ModelList)
        self._fleet = fleet

    async def read(self) -> ModelList | None:
        """The list, which is kept for `KEPT_S` more: no member renews it."""
        await self._redis.execute_command("EXPIRE", self._key, KEPT_S)
        return await super().read()

    async def is_followed(self, listed: ModelList, has_ended: Callable[[str], bool]) -> bool:
        """Whether a launcher runs this list's fleet. `has_ended`: that one is known to have, though registered."""
        for name in listed.models:
            launchers = of_launchers(await Registry(self._redis, namespace_of(self._fleet, name)).launchers())
            if any(not has_ended(launcher) for launcher in launchers):
                return True
        return False


async def forget_namespace(redis: Redis, namespace: str) -> bool:
    """Remove all that a model without members has in Redis. False while it has some. Raises RedisAway."""
    return bool(await redis.call(REGISTRY, "forget", Keys(namespace).prefix))
