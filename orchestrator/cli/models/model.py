"""`orchestrator model`: list the fleet's models, add one while the fleet runs, remove one.

Writes what is wanted into the list in Redis, and shows how the launchers carry it out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from orchestrator.cli.config import located
from orchestrator.cli.handle import (
    OUT,
    Named,
    OpenFleet,
    Said,
    SetOption,
    ask,
    find_whole_fleet,
    fleet_command,
    option,
    print_json,
    retry_while_away,
)
from orchestrator.cli.look.views import plain_table
from orchestrator.config.engine_args import check_engine_args
from orchestrator.config.models import SECTION, model_config, namespace_of
from orchestrator.config.settings import Config, Refused, WorkersConfig, overridden, read_tree
from orchestrator.launch.decisions.replacement import Unchanged
from orchestrator.store.operator.models import ListedModel, ModelList, ModelState, ModelStore
from orchestrator.store.planned import decided, of_launchers
from orchestrator.store.registry import Registry
from orchestrator.types import WorkerState

_LOOK_EVERY_S = 0.2
_INCOMPLETE = 1  # the exit code when frontends that were started by hand do not follow
app = typer.Typer()
Show = Callable[["Seen"], None]


class Seen(msgspec.Struct, frozen=True):
    """A model as it is now. `frontends` serve it; `by_hand` has the URLs of those that no launcher runs."""

    name: str
    state: str
    model: str = ""
    served_model_name: str = ""
    prefill: int = 0  # workers that are ready
    decode: int = 0
    frontends: int = 0
    by_hand: list[str] = []
    why: str = ""


@fleet_command(app.command("list"), whole=True)
def list_command(named: Named) -> Said:
    """Show the fleet's models."""
    handle = find_whole_fleet(named)

    async def read(fleet: OpenFleet) -> tuple[int, list[Seen]]:
        listed = await _list(fleet)
        return listed.revision, [
            await _look(_registry(fleet, name), name, model) for name, model in listed.models.items()
        ]

    revision, models = ask(handle, read)
    columns = ("name", "clients ask for", "state", "prefill", "decode", "frontends", "of them by hand", "model", "")
    counts = {it.name: map(str, (it.prefill, it.decode, it.frontends, len(it.by_hand))) for it in models}
    rows = ((it.name, it.served_model_name, it.state, *counts[it.name], it.model, it.why) for it in models)
    return {"revision": revision, "models": models}, plain_table(columns, rows)


@fleet_command(app.command("add"), whole=True)
def add_command(
    named: Named,
    file: Annotated[Path, typer.Argument(help="The model's configuration: what would stand under models.NAME.")],
    name: Annotated[
        str | None, option("--name", "Its name; default: the last part of served_model_name, or of model.")
    ] = None,
    set_: SetOption = None,
    as_json: bool = False,
) -> None:
    """Add a model to a fleet that has several: start its workers, then let all frontends serve it."""
    section = overridden(read_tree(file), set_ or [])
    if SECTION in section:
        raise Refused(f"{file}: {SECTION} is of a whole fleet; name a file with what stands under one {SECTION}.NAME")
    called = name or _default_name(section)
    with located(file, set_ or ()):
        config = model_config(called, section, {}, {}, check_engine_args)
    handle = find_whole_fleet(named)
    show = _shower(as_json)
    seen = ask(handle, lambda fleet: _add(fleet, called, section, config, show))
    if seen.by_hand:
        urls = ", ".join(seen.by_hand)
        typer.echo(f"{called}: frontends that no launcher runs do not serve it; start them again: {urls}", err=True)
        raise typer.Exit(_INCOMPLETE)


@fleet_command(app.command("remove"), whole=True)
def remove_command(
    named: Named,
    name: Annotated[str, typer.Argument(help="The model, as `orchestrator model list` shows it.")],
    as_json: bool = False,
) -> None:
    """Remove a model: its requests end, then its workers, and nothing of it is left."""
    handle = find_whole_fleet(named)
    patience_s = _patience_s(handle.workers)
    ask(handle, lambda fleet: _remove(fleet, name, patience_s, _shower(as_json)))


async def _add(fleet: OpenFleet, name: str, section: dict[str, Any], config: Config, show: Show) -> Seen:
    """Returns the model, with the frontends that do not serve it in `by_hand`. Raises Refused."""

    def wanted(listed: ModelList) -> ModelList:
        if name in listed.models:
            raise Refused(f"{name}: the fleet has a model of this name; choose another with --name")
        for other, its in listed.models.items():
            if its.section.get("served_model_name", other) == config.name_served:
                raise Refused(
                    f"served_model_name: clients know {other} as {config.name_served!r} already; choose another"
                )
        return listed.with_model(name, ListedModel(section, ModelState.ADDING))

    await _change(fleet, wanted)
    why = await _follow(fleet, name, _patience_s(config.workers), show, added=True)
    if why is not None:
        raise Refused(f"{name} was not added: {why}")
    listed = await _list(fleet)
    first = next(iter(listed.models))
    of_first = await _registry(fleet, first).frontends()
    of_this = await _registry(fleet, name).frontends()
    missing = [f.url for f in of_first.values() if f.by_hand and f.url and f.id not in of_this]
    seen = await _look(_registry(fleet, name), name, listed.models[name])
    return msgspec.structs.replace(seen, by_hand=sorted(url.removesuffix(f"/models/{first}") for url in missing))


async def _remove(fleet: OpenFleet, name: str, patience_s: float, show: Show) -> None:
    def wanted(listed: ModelList) -> ModelList:
        if name not in listed.models:
            raise Refused(f"{name}: the fleet has no such model; it has {', '.join(listed.models)}")
        if not listed.present.keys() - {name}:  # the others, if any, are being removed
            raise Refused(f"{name}: is the only model of the fleet; end the fleet with `orchestrator down`")
        return listed.with_model(name, msgspec.structs.replace(listed.models[name], state=ModelState.REMOVING))

    await _change(fleet, wanted)
    await _follow(fleet, name, patience_s, show, added=False)


async def _change(fleet: OpenFleet, wanted: Callable[[ModelList], ModelList]) -> None:
    async def decide() -> bool | None:
        listed = await _list(fleet)
        changed = wanted(listed)
        for other, its in listed.models.items():
            if its.state is not ModelState.SERVING and changed.models[other].state is not ModelState.REMOVING:
                raise Refused(f"{other}: is {its.state.value}; wait until it is done (`orchestrator model list`)")
        launchers = [of_launchers(await _registry(fleet, name).launchers()) for name in listed.models]
        if not any(launchers):
            raise Refused("no launcher runs this fleet, which could start or end a model's workers")
        return await _store(fleet).change(listed, changed, by_operator=True) or None

    await decided(decide)


async def _follow(fleet: OpenFleet, name: str, patience_s: float, show: Show, added: bool) -> str | None:
    """Show what becomes of it until it serves or is gone. Returns why it was not added. Raises Refused in the end."""
    registry, store, why = _registry(fleet, name), _store(fleet), ""
    last, unchanged = Seen(name, ""), Unchanged()
    while True:
        listed = await retry_while_away(store.read, unchanged.was_away)
        if listed is not None and name not in listed.models:
            show(Seen(name, "gone", why=why))
            return why or "somebody has removed it" if added else None
        if listed is not None:
            model = listed.models[name]
            why = why or model.why
            seen = await retry_while_away(partial(_look, registry, name, model), unchanged.was_away)
            if seen != last:
                show(seen)
                last = seen
            if added and model.state is ModelState.SERVING:
                return None
        if unchanged.look(last, time.monotonic()) > patience_s:
            raise Refused(f"{name}: is still {last.state}, and nothing has changed for {patience_s:g} s")
        await asyncio.sleep(_LOOK_EVERY_S)


async def _look(registry: Registry, name: str, model: ListedModel) -> Seen:
    reading, frontends = await registry.read(), await registry.frontends()
    idle = model.state is ModelState.SERVING and reading.desired is not None and reading.desired.idle
    ready = [info.role.value for info in reading.units.values() if info.state is WorkerState.READY]
    serving = [frontend for frontend in frontends.values() if frontend.url]
    return Seen(
        name,
        "idle" if idle else model.state.value,
        model.section.get("model", ""),
        model.section.get("served_model_name", name),
        ready.count("prefill"),
        ready.count("decode"),
        len(serving),
        sorted(f.url.removesuffix(f"/models/{name}") for f in serving if f.by_hand),
        model.why,
    )


async def _list(fleet: OpenFleet) -> ModelList:
    listed = await _store(fleet).read()
    if listed is None:
        raise Refused(
            f"the fleet {fleet.namespace!r} does not run, or has one model that its file does not name; start it with "
            f"a file with `{SECTION}:` to add and remove models"
        )
    return listed


def _store(fleet: OpenFleet) -> ModelStore:
    return ModelStore(fleet.redis, fleet.namespace)


def _registry(fleet: OpenFleet, name: str) -> Registry:
    return Registry(fleet.redis, namespace_of(fleet.namespace, name))


def _default_name(section: Mapping[str, Any]) -> str:
    known_as = section.get("served_model_name") or section.get("model") or ""
    return str(known_as).rstrip("/").rpartition("/")[2]


def _patience_s(workers: WorkersConfig) -> float:
    """Within it a worker loads, or a frontend's last request ends."""
    return workers.start_timeout_s + workers.drain_timeout_s


def _shower(as_json: bool) -> Show:
    def show(seen: Seen) -> None:
        if as_json:
            print_json(seen)
            return
        workers = f"{seen.prefill}P{seen.decode}D ready, {seen.frontends} frontends serve it"
        what = {"gone": "removed", "serving": f"added: {workers}"}.get(seen.state, f"{seen.state}: {workers}")
        if seen.by_hand and seen.state == "removing":
            what += f"; start again those that no launcher runs: {', '.join(seen.by_hand)}"
        OUT.print(f"{seen.name}: {what}{f' ({seen.why})' if seen.why else ''}", highlight=False, soft_wrap=True)

    return show
