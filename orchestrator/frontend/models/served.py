"""Which models a frontend serves, with which configurations: as its command line says, and as the fleet has them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.config.models import fleet_namespace, load_models, model_config
from orchestrator.config.settings import Config, ConfigError, load_config
from orchestrator.config.shared import differences, merged
from orchestrator.process.parent import has_ended
from orchestrator.store.client import Redis
from orchestrator.store.operator.models import ModelStore
from orchestrator.store.registry import Registry

log = logging.getLogger("pd.frontend")


class Served(msgspec.Struct, frozen=True):
    """One of this frontend's models. `name`: empty text where there is one only, which its file does not name.
    `generation`: that of `config`; None where no launcher started this frontend."""

    name: str
    config: Config
    generation: int | None = None


def served_models(options: argparse.Namespace) -> list[Served]:
    """The models that the command line names. Raises ConfigError."""
    if options.model:
        return [Served(name, load_config(Path(file)), int(generation)) for name, file, generation in options.model]
    if options.config is None:
        raise ConfigError("--config: required, but not given")
    return [Served(name, config, options.generation) for name, config in load_models(options.config).items()]


async def rolled_out_config(config: Config, redis: Redis) -> tuple[Config, int]:
    """The configuration and generation of a frontend that no launcher starts: its own configuration, with the values
    of the last settled rollout. Raises ConfigError, RedisAway."""
    rollout = await Registry(redis, config.namespace).rollout.read()
    if rollout is None:
        return config, 0
    version = rollout.settled
    fleets = merged(config, version.config)
    if keys := ", ".join(differences(config, fleets)):
        log.warning("configuration %d was rolled out: its values go before this file's of %s", version.generation, keys)
    return fleets, version.generation


async def as_listed(models: list[Served], shared: Mapping[str, Any], redis: Redis) -> list[Served]:
    """The models of a frontend that no launcher starts: those of its file that the fleet still has, and those that were
    added since; those of its file while no launcher runs. `shared`: what its file says of all. Raises ConfigError,
    RedisAway."""
    ours = {model.name: model.config for model in models}
    store = ModelStore(redis, fleet_namespace(ours))
    listed = await store.read()
    if listed is None or not await store.is_followed(listed, has_ended):
        return models
    found: dict[str, Config] = {}
    for name, model in listed.present.items():
        found[name] = ours[name] if name in ours else model_config(name, model.section, shared, found)
    return [Served(name, config) for name, config in found.items()]
