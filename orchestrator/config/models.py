"""A file with `models:` names several models behind one endpoint; each has its own workers, and is a namespace.

Everything else takes the `Config` of one model: the whole file, with that model's section over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.explain import kind_of
from orchestrator.config.settings import (
    UNKNOWN,
    Config,
    ConfigError,
    check_name,
    overridden,
    parse_config,
    read_tree,
    value_at,
)

SECTION = "models"
# Of the launcher, the machine or the frontends' processes, which all models share.
_SHARED = ("namespace", "python", "redis", "launcher", "logging", "security", "limits")
# A frontend listens once, and its processes are counted once; how it serves a model is that model's.
_OF_ITS_FRONTEND = ("server_args",)
_OF_THE_SERVER = ("ssl_", "uvicorn_log_level", "root_path")


Check = Callable[[Config], None]  # raises ConfigError


def load_models(
    path: Path, overrides: list[str] | None = None, check: Check = lambda config: None
) -> dict[str, Config]:
    """The configuration of each model of a file by its name, with `a.b=value` overrides. `check` is called with each.

    That of a file with `model:` has empty text as its name. Raises ConfigError.
    """
    return parse_models(overridden(read_tree(path), overrides or []), check)


def load_model(path: Path, overrides: list[str] | None = None, name: str | None = None) -> Config:
    """That of one model of a file, by its name or namespace; the only one needs neither. Raises ConfigError."""
    tree = read_tree(path)
    chosen = chosen_model(tree, name)
    sections = tree.get(SECTION)
    own: Any = sections.get(chosen) if isinstance(sections, Mapping) else None
    for override in overrides or []:  # what the model's section gives would go over the same key at the top
        overridden(tree if value_at(own, override.partition("=")[0]) is UNKNOWN else own, [override])
    models = parse_models(tree)
    if chosen not in models:
        which = f"has {', '.join(models)}: name one with --model" if "" not in models else "has one: leave --model out"
        raise ConfigError(f"{SECTION}: {path} {which}")
    return models[chosen]


def chosen_model(tree: Mapping[str, Any], given: str | None) -> str:
    """The name of the model of a file that `given` means, by its name or its namespace; there may be none of that name.
    Without one it is the only one. Empty text is the model of a file that does not name it."""
    fleet, sections = str(tree.get("namespace", "default")), tree.get(SECTION)
    if not isinstance(sections, Mapping):
        return "" if given in (None, fleet) else str(given)
    if given is None:
        return str(next(iter(sections))) if len(sections) == 1 else ""
    return given.removeprefix(namespace_of(fleet, ""))


def parse_models(tree: dict[str, Any], check: Check = lambda config: None) -> dict[str, Config]:
    """Like `load_models`, in the order of the file."""
    if SECTION not in tree:
        config = parse_config(tree)
        check(config)
        return {"": config}
    shared = shared_part(tree)
    for name in ("model", "served_model_name"):
        if name in shared:
            raise ConfigError(f"{name}: there is {SECTION} too; give each model its own, under {SECTION}.NAME")
    models = tree[SECTION]
    if not isinstance(models, Mapping) or not models:
        raise ConfigError(f"{SECTION}: expected a section with a name for each model, got {kind_of(models)}")
    configs: dict[str, Config] = {}
    for name, own in models.items():
        configs[name] = model_config(name, own, shared, configs, check)
    if next(iter(configs.values())).launcher.kind != "local":
        raise ConfigError("launcher.kind: several models run on one host so far; start one fleet for each on Ray")
    return configs


def namespace_of(fleet: str, model: str) -> str:
    """The namespace of one of several models."""
    return f"{fleet}.{model}"


def fleet_namespace(models: Mapping[str, Config]) -> str:
    """That of the whole fleet, which its run folder has."""
    name, config = next(iter(models.items()))
    return config.namespace.removesuffix(f".{name}") if name else config.namespace


def tree_of(tree: dict[str, Any], model: str) -> dict[str, Any]:
    """What a file says of one model. Raises ConfigError where it is not about that model."""
    if SECTION not in tree:
        return tree
    if model not in tree[SECTION]:
        raise ConfigError(f"{SECTION}: the model {model!r} is not among them; name another file")
    return _whole(shared_part(tree), model, tree[SECTION][model])


def shared_part(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of all models."""
    return {name: value for name, value in tree.items() if name != SECTION}


def model_config(
    name: object,
    own: object,
    shared: Mapping[str, Any],
    others: Mapping[str, Config] = {},
    check: Check = lambda _: None,
) -> Config:
    """The configuration of one of several models: `own` is its section, `shared` the rest of the file, `others` are the
    fleet's other models. Raises ConfigError."""
    where = f"{SECTION}.{name}"
    if not isinstance(name, str):
        raise ConfigError(f"{SECTION}: expected a name, as text, before each ':', got {kind_of(name)}")
    check_name(SECTION, name)
    if not isinstance(own, Mapping):
        raise ConfigError(f"{where}: expected a section, got {kind_of(own)}")
    for key in own:
        if key in _SHARED:
            raise ConfigError(f"{where}.{key}: all models share it; set {key} at the top of the fleet's file")
    frontend = own.get("frontend")
    frontend = frontend if isinstance(frontend, Mapping) else {}
    for key in frontend:
        if key not in _OF_ITS_FRONTEND:
            raise ConfigError(f"{where}.frontend.{key}: all models share the frontends; set frontend.{key} at the top")
        arguments = frontend[key]
        for argument in arguments if isinstance(arguments, Mapping) else ():
            if str(argument).startswith(_OF_THE_SERVER):
                raise ConfigError(
                    f"{where}.frontend.server_args.{argument}: all models share the server; set it at the top, in "
                    "frontend.server_args"
                )
    tree = _whole(shared, name, own)
    try:
        config = parse_config(tree)
        check(config)
    except ConfigError as error:
        raise _within(own, where, error) from None
    for other, its in others.items():
        if its.name_served == config.name_served:
            raise ConfigError(
                f"{where}.served_model_name: clients know {other} as {config.name_served!r} already; choose another"
            )
    return config


def _within(own: Mapping[str, Any], where: str, error: ConfigError) -> ConfigError:
    """The error about the file: a key that the model's section gives, or has to give, is there."""
    key, colon, said = str(error).partition(": ")
    if not colon or " " in key or not (key in ("model", "namespace") or key.partition(".")[0] in own):
        return error
    return type(error)(f"{where}.{key}: {said}")


def _whole(shared: Mapping[str, Any], name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """The model's section over the rest of the file."""
    tree = _over(shared, own)
    tree.setdefault("served_model_name", name)
    return tree | {"namespace": namespace_of(str(tree.get("namespace", "default")), name)}


def _over(under: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` over `under`: sections are merged, key by key, and values replaced."""
    merged = dict(under)
    for name, value in own.items():
        below = merged.get(name)
        merged[name] = _over(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
