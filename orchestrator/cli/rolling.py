"""`orchestrator restart`: a rolling restart. Each worker drains first, so that no request fails.

A worker that is told to restart ends with exit code 75. The launcher, or a service manager, starts it again under the
same id.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from orchestrator.cli.handle import (
    OUT,
    ForceOption,
    JsonOption,
    MaxUnavailableOption,
    NamespaceOption,
    OpenFleet,
    RedisOption,
    ask,
    find_fleet,
    print_json,
    refuse_only_worker,
    retry_while_away,
)
from orchestrator.config.settings import Refused, WorkersConfig
from orchestrator.types import Role, WorkerInfo, WorkerState

if TYPE_CHECKING:
    from orchestrator.store.planned import Reading
    from orchestrator.store.registry import Registry

_LOOK_EVERY_S = 0.2
_LOOKS = 25  # at a registry that may have lost what launchers tell it again within a second or two
app = typer.Typer()


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One that was seen. `--json` prints each as a line."""

    event: str  # draining, restarted, left, done
    id: str = ""
    workers: int = 0  # that were restarted


@app.command("restart")
def restart_command(
    only: Annotated[Role | None, typer.Option("--role", metavar="prefill|decode", help="Only these workers.")] = None,
    max_unavailable: MaxUnavailableOption = 1,
    namespace: NamespaceOption = None,
    redis: RedisOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Restart workers, a few at a time, each after it has drained: no request fails."""
    handle = find_fleet(namespace, redis)
    show = print_json if as_json else _print
    count = ask(handle, lambda fleet: restart(fleet, handle.workers, only, max_unavailable, force, show))
    show(Step("done", workers=count))


async def restart(
    fleet: OpenFleet,
    workers: WorkersConfig,
    role: Role | None,
    max_unavailable: int,
    force: bool,
    show: Callable[[Step], None],
) -> int:
    """Restart the workers of `role`, or all. At most `max_unavailable` workers are down at a time; workers that died
    meanwhile count. The last worker that is ready waits until another one is. One that leaves for good meanwhile is not
    waited for. Returns how many were restarted. Raises Refused (also when no worker becomes ready for as long as it may
    take to drain and start one), and RedisAway when Redis stays away.
    """
    from orchestrator.store.steering import settle

    registry, patience_s = fleet.registry, workers.drain_timeout_s + workers.start_timeout_s
    await settle(registry, workers.heartbeat_s)
    there = (await registry.read()).units
    targets = {name: info.process for name, info in there.items() if role in (None, info.role)}
    if not targets:
        raise Refused(f"the fleet has no {role.value + ' ' if role else ''}worker to restart")
    refuse_only_worker(len(_ready(there)), force)
    kept = min(1, len(_ready(there)) - 1)
    waiting, under_way, departures = {*targets}, set[str](), _Departures()
    progress_at = time.monotonic()
    while waiting or under_way:
        reading = await retry_while_away(registry.read)
        there, ready = reading.units, _ready(reading.units)
        for name in departures.look(targets, reading):
            show(Step("left", name))
            waiting.discard(name)
            under_way.discard(name)
            del targets[name]
            progress_at = time.monotonic()
        for name in sorted((waiting | under_way) & ready):
            if there[name].process != targets[name]:
                show(Step("restarted", name))
                waiting.discard(name)
                under_way.discard(name)
                progress_at = time.monotonic()
        serving = ready - under_way - reading.orders.keys()
        room = max_unavailable - len(targets.keys() - ready) - len(ready - serving)
        room = min(room, len(serving) - kept)
        told = sorted(waiting & serving)[: max(0, room)]
        if told and not await _order(registry, told, reading):
            told = []  # the next reading decides
        told += sorted(name for name in waiting & reading.orders.keys() if reading.orders[name].restart)  # by another
        for name in told:
            show(Step("draining", name))
        waiting -= {*told}
        under_way |= {*told}
        if time.monotonic() - progress_at > patience_s:
            late = ", ".join(sorted(targets.keys() - ready))
            raise Refused(f"{late}: not ready for {patience_s:g} s; a worker that no launcher runs needs a supervisor")
        await asyncio.sleep(_LOOK_EVERY_S)
    return len(targets)


class _Departures:
    """Who has left for good: a worker that was told so, or whose id its launcher does not hold any more."""

    def __init__(self) -> None:
        self._told, self._held, self._absent = set[str](), set[str](), Counter[str]()

    def look(self, targets: Collection[str], reading: Reading) -> list[str]:
        held = {name for holder in reading.launchers.values() for name in holder.workers}
        self._told |= {name for name, order in reading.orders.items() if order.drain}
        self._held |= held
        self._absent = Counter({name: self._absent[name] + 1 for name in {*targets} - {*reading.units} - held})
        return [
            name
            for name, looks in sorted(self._absent.items())
            if name in self._told or (name in self._held and looks > _LOOKS)
        ]


def _ready(workers: dict[str, WorkerInfo]) -> set[str]:
    return {name for name, info in workers.items() if info.state is WorkerState.READY}


async def _order(registry: Registry, worker_ids: list[str], reading: Reading) -> bool:
    """False when the fleet is not the one that was read."""
    from orchestrator.store.fields import WorkerOrders

    restart = dict.fromkeys(worker_ids, WorkerOrders(restart=True))
    return await retry_while_away(lambda: registry.steer(reading.seen, restart)) is not None


def _print(step: Step) -> None:
    line = f"{step.workers} workers restarted" if step.event == "done" else f"{step.id}: {step.event}"
    OUT.print(line, highlight=False)
