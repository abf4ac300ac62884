"""Splits a configuration into the part that all hosts of a fleet share and the part of one host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from orchestrator.config.settings import Config, parse_config


def shared(config: Config) -> dict[str, Any]:
    """The part for workers on other hosts: without this host's settings and without the secrets of frontends."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    del tree["redis"]["url"], tree["frontend"], tree["launcher"], tree["limits"]
    tree["security"] = {name: tree["security"][name] for name in ("mesh", "trust_network")}  # no keys
    tree["workers"].pop("advertise", None)
    return tree


def merged(config: Config, fleets: Mapping[str, Any]) -> Config:
    """A process's own configuration, overridden by the fleet's shared part. Settings of its host stay. Raises
    ConfigError."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    own = {"security": tree["security"], "redis": tree["redis"]}
    bound = {name: tree["workers"][name] for name in ("bind", "advertise")}
    tree |= {**fleets, **own}
    tree["workers"] = {**tree["workers"], **bound}
    return parse_config(tree)


def differences(one: Config, other: Config) -> list[str]:
    """The keys, as `a.b`, whose values are not the same."""
    return list(differing(msgspec.to_builtins(one), msgspec.to_builtins(other)))


def differing(one: Mapping[str, Any], other: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name in {**one, **other}:
        was, becomes = one.get(name), other.get(name)
        if isinstance(was, Mapping) and isinstance(becomes, Mapping):
            yield from differing(was, becomes, f"{before}{name}.")
        elif was != becomes:
            yield before + name
