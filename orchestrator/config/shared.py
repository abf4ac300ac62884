"""The part of a configuration that all hosts of a fleet share, that of one host, and what a rollout changes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from orchestrator.config.engine_args import check_engine_args, engine_args
from orchestrator.config.explain import shown
from orchestrator.config.model import is_same_model
from orchestrator.config.settings import UNKNOWN, Config, Refused, leaves, parse_config, value_at
from orchestrator.config.simulated import simulated
from orchestrator.types import Role

# Whose values are the running fleet's: one host's, or what clients and processes that stay rely on.
_KEPT = (
    "engine",
    "redis",
    "frontend",
    "launcher",
    "limits",
    "security",
    "workers.bind",
    "workers.advertise",
    "workers.labels",
)
_FOUND = (("frontend.port", 0), ("redis.url", "embedded"))  # these mean the values that the running fleet has found


def shared(config: Config) -> dict[str, Any]:
    """The part for workers on other hosts: without this host's settings and without the secrets of frontends."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    del tree["redis"]["url"], tree["frontend"], tree["launcher"], tree["limits"]
    tree["security"] = {name: tree["security"][name] for name in ("mesh", "trust_network")}  # no keys
    tree["workers"].pop("advertise", None)
    tree["workers"].pop("labels", None)
    return tree


def merged(config: Config, fleets: Mapping[str, Any]) -> Config:
    """A process's own configuration under the fleet's shared part. Settings of its host stay. Raises ConfigError."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    own = {"security": tree["security"], "redis": tree["redis"]}
    bound = {name: tree["workers"][name] for name in ("bind", "advertise", "labels")}
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


def changed(running: Mapping[str, Any], config: Config | None, tree: dict[str, Any]) -> dict[str, Any]:
    """The fleet's next configuration, as launchers take it. `config` is the one that it was started with, where that is
    known; `tree` is the new file's. Raises ConfigError for what a running fleet cannot change."""
    new = parse_config({**tree, "namespace": running["namespace"]})
    check_engine_args(new)
    if config is not None and config.launcher.kind == "ray" and config.frontend.port == 0:
        raise Refused("frontend.port: 0 on Ray, so new frontends would listen elsewhere; start the fleet with a port")
    started = msgspec.to_builtins(config) if config is not None else running
    for key, value in leaves(tree):
        if key.startswith(_KEPT) and (key, value) not in _FOUND:
            is_now = value_at(started, key)
            if config is None and is_now is UNKNOWN:  # it is not of the part that hosts share
                continue
            if is_now != value_at(msgspec.to_builtins(new), key):
                now = "unset" if is_now is UNKNOWN else repr(shown(key, is_now))
                raise Refused(f"{key}: a rollout cannot change it ({now} now); leave it, or start a second fleet")
    name, name_now = new.served_model_name or new.model, running["served_model_name"]
    if name != name_now:
        raise Refused(f"served_model_name: clients know the model as {name_now!r}, not {name!r}; set it to that name")
    _check_length(parse_config(dict(running)), new)
    result = shared(new)
    for role in Role:  # `scale` sets how many there are
        result["workers"][role.value]["replicas"] = running["workers"][role.value]["replicas"]
    return result | {"namespace": running["namespace"], "served_model_name": name_now}


def changes(running: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """The keys that change, as `a.b: before -> after`, also those that only `up --set` gave; of variables the names."""
    for key in differing(running, new):
        # A launcher makes a folder of the name; on its machine, where a relative path may lead elsewhere.
        if key == "model" and (new[key] == running["served_model_name"] or is_same_model(running[key], new[key])):
            continue
        values = (value_at(tree, key) for tree in (running, new))
        before, after = ("(unset)" if value is UNKNOWN else repr(shown(key, value)) for value in values)
        yield key if ".env." in key else f"{key}: {before} -> {after}"


def _check_length(old: Config, new: Config) -> None:
    """Frontends let requests in by the old limit while new workers serve them. Raises Refused."""
    was, wanted = _length(old), _length(new)
    if isinstance(wanted, int) and wanted > 0 and not (isinstance(was, int) and 0 < was <= wanted) and wanted != was:
        raise Refused(f"max_model_len: {wanted} instead of {was} would refuse requests that run; start a second fleet")


def _length(config: Config) -> Any:
    arguments = engine_args(config, Role.DECODE)
    return simulated(config.sim, arguments).max_model_len if config.engine == "sim" else arguments.get("max_model_len")
