"""`orchestrator rollout`: another configuration, worker by worker, while the fleet serves.

Checks what may change, writes the order into Redis, and shows how the launchers carry it out. They go on without us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from orchestrator.cli.config import checked_models
from orchestrator.cli.handle import (
    FleetHandle,
    ForceOption,
    JsonOption,
    MaxUnavailableOption,
    NamespaceOption,
    OpenFleet,
    RedisOption,
    SetOption,
    ask,
    find_fleet,
    print_json,
    refuse_only_worker,
)
from orchestrator.cli.rolling import Event, follow, show_event
from orchestrator.config.engine_args import check_engine_args, engine_args
from orchestrator.config.models import tree_of
from orchestrator.config.settings import Config, Refused, overridden, parse_config, read_tree
from orchestrator.config.shared import differing, shared
from orchestrator.types import Role, WorkerState

if TYPE_CHECKING:
    from orchestrator.store.configuration import Rollout, Version

_WENT_BACK = 1  # the exit code when the fleet rolled back by itself
# Whose values are the running fleet's: one host's, or what clients and processes that stay rely on.
_KEPT = ("engine", "redis", "frontend", "launcher", "limits", "security", "workers.bind", "workers.advertise")
_FOUND = (("frontend.port", 0), ("redis.url", "embedded"))  # these mean the values that the running fleet has found
app = typer.Typer()


@app.command("rollout")
def rollout_command(
    config: Annotated[Path | None, typer.Argument(help="The new configuration, as for `orchestrator up`.")] = None,
    set_: SetOption = None,
    max_unavailable: MaxUnavailableOption = 1,
    abort: Annotated[bool, typer.Option("--abort", help="Go back to the previous configuration.")] = False,
    namespace: NamespaceOption = None,
    redis: RedisOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Roll a new configuration out to all workers, then all frontends: no request fails."""
    if abort == (config is not None):
        raise Refused("expected CONFIG, or --abort and no CONFIG")
    tree = overridden(read_tree(config), set_ or []) if config is not None else {}
    if config is not None:
        checked_models(config, set_ or ())
    handle = find_fleet(namespace or tree.get("namespace"), redis)
    tree = tree_of(tree, handle.model)
    show = print_json if as_json else show_event
    if config is None:
        ended = ask(handle, lambda fleet: _abort(fleet, show))
    else:
        ended = ask(handle, lambda fleet: _begin(fleet, handle, tree, max_unavailable, force, show))
    if ended.why and not abort:
        raise typer.Exit(_WENT_BACK)


async def _begin(
    fleet: OpenFleet,
    handle: FleetHandle,
    tree: dict[str, Any],
    max_unavailable: int,
    force: bool,
    show: Callable[[Event], None],
) -> Rollout:
    """Raises ConfigError."""
    from orchestrator.store.configuration import Rollout, Version
    from orchestrator.store.steering import settle

    configuration = fleet.registry.configuration
    await settle(fleet.registry, fleet.heartbeat_s)
    last, running = await configuration.rollout(), await configuration.read()
    if running is None or not await fleet.registry.launchers():
        raise Refused("no launcher runs this fleet, which could start workers with another configuration")
    if last is not None and last.under_way:
        raise Refused(f"a {last.name} is under way; wait for it, or use --abort")
    workers = (await fleet.registry.read()).units
    refuse_only_worker(sum(info.state is WorkerState.READY for info in workers.values()), force)
    new = changed(running, handle.config, tree)
    generation = 1 + max(running.generation, last.new.generation if last is not None else 0)
    wanted = Rollout(running, Version(generation, new), max_unavailable)
    if not await configuration.change_rollout(last, wanted):
        raise Refused("somebody else has just begun a rollout")
    show(Event("ordered", generation=generation, changes=list(changes(running.config, new))))
    return await follow(fleet, wanted, show)


async def _abort(fleet: OpenFleet, show: Callable[[Event], None]) -> Rollout:
    """Raises Refused."""
    from orchestrator.store.configuration import Phase

    configuration = fleet.registry.configuration
    last = await configuration.rollout()
    if last is None or not last.under_way:
        raise Refused("no rollout is under way; to undo the last one, roll the previous configuration out")
    if last.phase is Phase.FORWARD and not await configuration.change_rollout(last, last.given_up("aborted")):
        raise Refused("it has just ended, or gone back by itself; look again with `orchestrator status`")
    if last.restart:
        show(Event("given up", "restart"))
    return await follow(fleet, last, show)


def changed(running: Version, config: Config | None, tree: dict[str, Any]) -> dict[str, Any]:
    """The fleet's next configuration, as launchers take it. `config` is the one that it was started with, where that is
    known; `tree` is the new file's. Raises ConfigError for what a running fleet cannot change."""
    new = parse_config({**tree, "namespace": running.config["namespace"]})
    check_engine_args(new)
    if config is not None and config.launcher.kind == "ray" and config.frontend.port == 0:
        raise Refused("frontend.port: 0 on Ray, so new frontends would listen elsewhere; start the fleet with a port")
    started = msgspec.to_builtins(config) if config is not None else running.config
    for key, value in _leaves(tree):
        if key.startswith(_KEPT) and (key, value) not in _FOUND:
            is_now = _at(started, key)
            if is_now is not _UNKNOWN and is_now != _at(msgspec.to_builtins(new), key):
                raise Refused(f"{key}: a rollout cannot change it ({is_now!r} now); leave it, or start a second fleet")
    name, name_now = new.served_model_name or new.model, running.config["served_model_name"]
    if name != name_now:
        raise Refused(f"served_model_name: clients know the model as {name_now!r}, not {name!r}; set it to that name")
    _check_length(parse_config(dict(running.config)), new)
    result = shared(new)
    for role in Role:  # `scale` sets how many there are
        result["workers"][role.value]["replicas"] = running.config["workers"][role.value]["replicas"]
    return result | {"namespace": running.config["namespace"], "served_model_name": name_now}


def changes(running: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """The keys that change, as `a.b: before -> after`, also those that `up --set` gave and the new file lacks. Of
    environment variables, which may be secrets, only the names."""
    for key in differing(running, new):
        if key == "model" and new[key] == running["served_model_name"]:
            continue  # its name, of which the launcher made the folder
        before, after = ("(unset)" if (value := _at(tree, key)) is _UNKNOWN else repr(value) for tree in (running, new))
        yield key if ".env." in key else f"{key}: {before} -> {after}"


def _check_length(old: Config, new: Config) -> None:
    """Frontends let requests in by the old limit while new workers serve them. Raises Refused."""
    was, wanted = engine_args(old, Role.DECODE).get("max_model_len"), engine_args(new, Role.DECODE).get("max_model_len")
    if new.engine == "sim":
        was, wanted = old.sim.max_model_len, new.sim.max_model_len
    if isinstance(wanted, int) and wanted > 0 and not (isinstance(was, int) and 0 < was <= wanted) and wanted != was:
        raise Refused(f"max_model_len: {wanted} instead of {was} would refuse requests that run; start a second fleet")


_UNKNOWN = object()


def _leaves(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield before + name, value


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return _UNKNOWN
        tree = tree[name]
    return tree
