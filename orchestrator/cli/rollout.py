"""`orchestrator rollout` and `restart`: another configuration, or the same one again, worker by worker while it serves.

Checks what may change, writes the order into Redis, and shows how the launchers carry it out. Where there is none, a
restart is ordered by the command itself: a worker that is told to restart ends with exit code 75, and a service manager
starts it again under the same id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from orchestrator.cli.config import checked_models
from orchestrator.cli.handle import (
    OUT,
    FleetHandle,
    ForceOption,
    MaxUnavailableOption,
    Named,
    OpenFleet,
    SetOption,
    ask,
    fleet_command,
    option,
    print_json,
    retry_while_away,
)
from orchestrator.cli.look.views import restart_line
from orchestrator.config.models import tree_of
from orchestrator.config.settings import Refused, WorkersConfig, overridden, read_tree
from orchestrator.config.shared import changed, changes
from orchestrator.launch.rollout import Replacer
from orchestrator.store.configuration import Phase, Rollout, Version, refuses_local
from orchestrator.store.fields import Frontend
from orchestrator.store.planned import Reading, of_launchers, rollout_status
from orchestrator.store.steering import settle
from orchestrator.types import Role, WorkerInfo, WorkerState

_LOOK_EVERY_S = 0.2
_LOOKS = 25  # at a Redis that has lost what launchers tell it again within a second or two
_WENT_BACK = 1  # the exit code when the fleet rolled back by itself
app = typer.Typer()


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step that was seen. `--json` prints each as a line."""

    event: str  # ordered, draining, started, restarted, gone, left, going_back, done, undone, to_restart
    id: str = ""
    generation: int = 0
    why: str = ""
    changes: list[str] = []  # keys with the values before and after
    workers: int = 0  # that were restarted


@fleet_command(app.command("rollout"))
def rollout_command(
    named: Named,
    config: Annotated[Path | None, typer.Argument(help="The new configuration, as for `orchestrator up`.")] = None,
    set_: SetOption = None,
    max_unavailable: MaxUnavailableOption = 1,
    abort: Annotated[bool, option("--abort", "Go back to the previous configuration.")] = False,
    force: ForceOption = False,
    as_json: bool = False,
) -> None:
    if abort == (config is not None):
        raise Refused("expected CONFIG, or --abort and no CONFIG")
    tree = overridden(read_tree(config), set_ or []) if config is not None else {}
    if config is not None:
        checked_models(config, set_ or ())
    handle = named._replace(namespace=named.namespace or tree.get("namespace")).find()
    _refuse_rename(handle.namespace, overridden({}, set_ or []).get("namespace"))
    tree = tree_of(tree, handle.model)
    show = print_json if as_json else show_event
    if config is None:
        ended = ask(handle, lambda fleet: _abort(fleet, show))
    else:
        ended = ask(handle, lambda fleet: _begin(fleet, handle, tree, max_unavailable, force, show))
    if ended.why and not abort:
        raise typer.Exit(_WENT_BACK)


def _refuse_rename(namespace: str, set_to: str | None) -> None:
    """A fleet keeps its name, whatever its file says. `namespace`: its own, or that of one of its models; `set_to`: by
    --set. Raises Refused where they differ."""
    if set_to is not None and not f"{namespace}.".startswith(f"{set_to}."):
        raise Refused(f"--set namespace={set_to}: a rollout cannot rename the fleet {namespace!r}; leave it out")


async def _begin(
    fleet: OpenFleet,
    handle: FleetHandle,
    tree: dict[str, Any],
    max_unavailable: int,
    force: bool,
    show: Callable[[Event], None],
) -> Rollout:
    document = fleet.registry.rollout
    await settle(fleet.registry, fleet.heartbeat_s)
    last, running = await document.read(), await fleet.registry.configuration.read()
    if running is None or not await fleet.registry.launchers():
        raise Refused("no launcher runs this fleet, which could start workers with another configuration")
    if last is not None and last.under_way:
        raise Refused(f"a {last.name} is under way; wait for it, or use --abort")
    if (desired := await fleet.registry.desired()) is not None and desired.idle:
        raise Refused("the model is idle and has no worker to start again; send it a request first")
    workers = (await fleet.registry.read()).units
    _refuse_gap(workers, workers, running, force)
    new = changed(running.config, handle.config, tree)
    begins_to_refuse = refuses_local(new) and not refuses_local(running.config)
    if begins_to_refuse and desired is not None and desired.prefill == 0 and not force:
        raise Refused(
            "routing.fallback: refuse, and 0 prefill workers are desired: every long prompt would get 503. Start one "
            "first (`orchestrator scale`), or use --force"
        )
    generation = 1 + max(running.generation, last.highest if last is not None else 0)
    wanted = Rollout(running, Version(generation, new), max_unavailable)
    if not await document.change(last, wanted, by_operator=True):
        raise Refused("somebody else has just begun a rollout")
    show(Event("ordered", generation=generation, changes=list(changes(running.config, new))))
    return await follow(fleet, wanted, show)


async def _abort(fleet: OpenFleet, show: Callable[[Event], None]) -> Rollout:
    document = fleet.registry.rollout
    last = await document.read()
    if last is None or not last.under_way:
        raise Refused("no rollout is under way; to undo the last one, roll the previous configuration out")
    back = last.given_up("aborted")
    if last.phase is Phase.FORWARD and not await document.change(last, back, by_operator=True):
        raise Refused("it has just ended, or gone back by itself; look again with `orchestrator status`")
    if last.restart:
        show(Event("given up", "restart"))
    return await follow(fleet, last, show)


@fleet_command(app.command("restart"))
def restart_command(
    named: Named,
    only: Annotated[Role | None, option("--role", "Only these workers.", metavar="prefill|decode")] = None,
    max_unavailable: MaxUnavailableOption = 1,
    force: ForceOption = False,
    as_json: bool = False,
) -> None:
    handle = named.find()
    show = print_json if as_json else show_event
    ask(handle, lambda fleet: restart(fleet, handle.workers, only, max_unavailable, force, show))


async def restart(
    fleet: OpenFleet,
    workers: WorkersConfig,
    role: Role | None,
    max_unavailable: int,
    force: bool,
    show: Callable[[Event], None],
) -> None:
    """Restart the workers of `role`, or all. At most `max_unavailable` workers are down at a time, and the last that is
    ready waits until another one is. One that leaves for good meanwhile is not waited for. Once this is cancelled, no
    more workers are told to restart. Raises Refused, also when it was given up, and RedisAway when Redis stays away."""
    registry, document = fleet.registry, fleet.registry.rollout
    await settle(registry, fleet.heartbeat_s)
    last, reading = await document.read(), await registry.read()
    there, led = reading.units, bool(of_launchers(reading.launchers))
    if last is not None and last.under_way and (led or not last.restart):
        raise Refused(f"a {last.name} is under way; wait for it, or use `orchestrator rollout --abort`")
    targets = {name: info.process for name, info in there.items() if role in (None, info.role)}
    if not targets and reading.desired is not None and reading.desired.idle:
        raise Refused("the model is idle and has no worker to restart; those of the next request are new")
    if not targets:
        raise Refused(f"the fleet has no {role.value + ' ' if role else ''}worker to restart")
    _refuse_gap(there, targets, await registry.configuration.read(), force)
    version = last.settled if last is not None else Version(0, {})
    highest = last.highest if last is not None else 0
    ordered = Rollout(version, version, max_unavailable, restart=targets, ordered=highest)
    if not await document.change(last, ordered, by_operator=True):
        raise Refused("somebody else has just begun a rollout or a restart")
    leader = None if led else Replacer(registry, workers.drain_timeout_s + workers.start_timeout_s)
    try:
        ended = await follow(fleet, ordered, show, leader)
    except asyncio.CancelledError:
        await document.change(ordered, ordered.given_up("interrupted"))
        raise
    if ended.phase is Phase.UNDONE:
        raise Refused(f"the restart was given up: {ended.why}")


def _refuse_gap(units: Mapping[str, WorkerInfo], targets: Container[str], runs: Version | None, force: bool) -> None:
    """Raises Refused where, while one of `targets` restarts, no worker would do what it does, unless forced."""
    ready = [info for info in units.values() if info.state is WorkerState.READY]
    if force:
        return
    if len(ready) < 2:
        raise Refused("one worker alone serves this fleet: start another first (`orchestrator scale`), or use --force")
    prefill = [info.id for info in ready if info.role is Role.PREFILL]
    if len(prefill) == 1 and prefill[0] in targets and runs is not None and refuses_local(runs.config):
        raise Refused(
            f"{prefill[0]}: is the only prefill worker; with routing.fallback: refuse every long prompt gets 503 while "
            "it restarts: start another first (`orchestrator scale`), or use --force"
        )


async def follow(
    fleet: OpenFleet, ordered: Rollout, show: Callable[[Event], None], leader: Replacer | None = None
) -> Rollout:
    """Show the steps until it has ended, either way; carry it out where there is a `leader`. Raises Refused."""
    registry, document = fleet.registry, fleet.registry.rollout
    seen = dict.fromkeys(ordered.restart, ("", 0))
    said_back, missed = False, 0  # looks, one after the other
    asked = retry_while_away if leader is None else partial(retry_while_away, was_away=leader.was_away)
    found: Rollout | None = None
    while missed <= _LOOKS:
        rollout = found = await asked(document.read)
        if found is not None and (found.new.generation, found.restart) != (ordered.new.generation, ordered.restart):
            rollout = ordered.as_ended(found)
        if rollout is None:
            missed += 1  # Redis lost it; who leads tells it again
            if leader is not None:
                await asked(lambda: document.change(None, ordered))
            await asyncio.sleep(_LOOK_EVERY_S)
            continue
        if rollout.phase is Phase.BACK and not said_back:
            said_back = True
            show(Event("going_back", generation=rollout.old.generation, why=rollout.why))
        reading, frontends = await asked(registry.read), await asked(registry.frontends)
        before, seen = seen, _look(rollout, reading, frontends, seen)
        for event in _steps(before, seen) if before else ():
            show(event)
        if not rollout.under_way:
            for event in _ending(rollout, reading, frontends):
                show(event)
            return rollout
        missed = 0 if leader is not None or reading.launchers else missed + 1
        if leader is not None and await asked(partial(_lead, leader, reading, rollout)):
            await asked(partial(leader.end, rollout))
        await asyncio.sleep(_LOOK_EVERY_S)
    if found is not None and found.restart != ordered.restart:
        raise Refused(f"somebody has ordered a {found.name} since, which took its place; see `orchestrator status`")
    raise Refused("no launcher tells of it any more; `orchestrator up` goes on with the rollout if it is in Redis")


async def _lead(leader: Replacer, reading: Reading, rollout: Rollout) -> bool:
    """Raises RedisAway."""
    claimed = {name for holder in reading.launchers.values() for name in holder.workers}
    loading = len(claimed - reading.units.keys())
    return await leader.follow(reading, rollout, loading, time.monotonic(), leads=True)


def _look(
    rollout: Rollout, reading: Reading, frontends: Mapping[str, Frontend], before: dict[str, tuple[str, int]]
) -> dict[str, tuple[str, int]]:
    """The state and generation of each member, or how far the restart of each unit is."""
    if not rollout.restart:
        now = {name: (info.state.value, info.generation) for name, info in reading.workers.items()}
        return now | {name: ("ready" if f.url else "draining", f.generation) for name, f in frontends.items()}
    now = dict(before)
    for name, process in rollout.restart.items():
        if (info := reading.units.get(name)) is not None and info.process != process:
            now[name] = ("restarted", 0)
        elif name in reading.orders and reading.orders[name].restart:
            now[name] = ("draining", 0)
    return now


def _steps(before: Mapping[str, tuple[str, int]], now: Mapping[str, tuple[str, int]]) -> Iterator[Event]:
    for name in sorted(before.keys() | now.keys()):
        state, generation = now.get(name, ("gone", 0))
        starts = name not in before and state == "draining"  # a frontend takes no requests before it has started, too
        if now.get(name) != before.get(name) and not starts:
            yield Event("started" if state == "ready" else state, name, generation)


def _ending(rollout: Rollout, reading: Reading, frontends: Mapping[str, Frontend]) -> Iterator[Event]:
    if not rollout.restart:
        ended = "done" if rollout.phase is Phase.DONE else "undone"
        yield Event(ended, generation=rollout.target.generation, why=rollout.why)
        yield from (Event("to_restart", url) for url in rollout_status(rollout, frontends)["to_restart"])
    elif rollout.phase is Phase.DONE:
        left = sorted(rollout.restart.keys() - reading.units.keys())
        yield from (Event("left", name) for name in left)
        yield Event("done", workers=len(rollout.restart) - len(left))


def show_event(event: Event) -> None:
    match event.event:
        case "ordered":
            what = "".join(f"\n  {change}" for change in event.changes) or " the same configuration"
            how = "Ctrl-C leaves it to the launcher, --abort goes back"
            line = f"rolling out generation {event.generation}; {how}:{what}"
        case "going_back":
            line = f"going back to generation {event.generation}: {event.why}"
        case "done" if event.generation:
            line = f"rolled out: all workers and frontends run generation {event.generation}"
        case "done":
            line = f"{event.workers} workers restarted"
        case "undone":
            line = f"went back: all workers and frontends run generation {event.generation} ({event.why})"
        case "to_restart":
            line = restart_line(event.id)
        case "started":
            line = f"{event.id}: runs generation {event.generation}"
        case _:
            line = f"{event.id}: {event.event}"
    OUT.print(line, highlight=False, soft_wrap=True)
