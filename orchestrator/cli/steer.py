"""`orchestrator scale`, `role`, `drain`, `log-level` and `queue`: an operator's orders, and the prefill queue."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
import typer

from orchestrator.cli.handle import Named, OpenFleet, Said, WorkerArgument, fleet_command, option, retry_while_away
from orchestrator.cli.look.views import plain_table, queue_view
from orchestrator.config.settings import Refused
from orchestrator.store.operator.log_levels import ALL, LogLevels
from orchestrator.store.operator.shown import peek, show
from orchestrator.store.steering import NOBODY, Steering
from orchestrator.types import Role

ForceOption = Annotated[bool, option("--force", "Allow it for the last worker of a role.")]
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
app = typer.Typer()
queue_app = typer.Typer(invoke_without_command=True)
app.add_typer(queue_app, name="queue")


@fleet_command(app.command())
def scale(
    fleet: Named,
    targets: Annotated[list[str], typer.Argument(help="prefill=X, decode=Y, or both; or both as 2P6D.")],
    force: Annotated[bool, option("--force", "Allow more than there is room for, or none that is needed.")] = False,
) -> Said:
    counts = _counts(targets)
    wanted = fleet.ask(lambda there: _steer(there).scale(**counts, force=force))
    desired = {"prefill": wanted.prefill, "decode": wanted.decode}
    return desired, f"desired: {wanted.prefill} prefill, {wanted.decode} decode"


@fleet_command(app.command())
def role(
    fleet: Named,
    worker: WorkerArgument,
    new_role: Annotated[Role, typer.Argument(metavar="prefill|decode")],
    force: ForceOption = False,
) -> Said:
    changed = fleet.ask(lambda there: _steer(there).change_role(worker, new_role, force))
    said = f"{worker}: {'becomes' if changed else 'is already'} a {new_role.value} worker"
    return {"worker": worker, "role": new_role.value, "changed": changed}, said


@fleet_command(app.command("log-level"))
def log_level(
    fleet: Named,
    level: Annotated[str, typer.Argument(metavar="LEVEL", help="DEBUG, INFO, WARNING, ERROR; or default.")],
    process: Annotated[
        str, typer.Argument(metavar="[PROCESS]", help="A worker's id, frontend-0 or launcher; default: all.")
    ] = ALL,
) -> Said:
    """Set the log level of running processes. `default` goes back to the configured level."""
    wanted = level.upper()
    if wanted not in (*_LEVELS, "DEFAULT"):
        raise Refused(f"{level}: no such level; choose {', '.join(_LEVELS)} or default")
    value = None if wanted == "DEFAULT" else wanted
    fleet.ask(lambda there: _set_level(there, value, process))
    who = "every process" if process == ALL else process
    said = f"{who}: logs as configured" if value is None else f"{who}: logs {value} and above"
    return {"process": None if process == ALL else process, "level": value}, said


@fleet_command(app.command())
def drain(fleet: Named, worker: WorkerArgument, force: ForceOption = False) -> Said:
    changed = fleet.ask(lambda there: _steer(there).drain(worker, force))
    return {"worker": worker, "changed": changed}, f"{worker}: {'draining' if changed else 'is draining already'}"


@fleet_command(queue_app.callback())
def queue(
    fleet: Named,
    context: typer.Context,
    limit: Annotated[int, option("--limit", "How many jobs to show.", min=1, max=1000)] = 20,
) -> Said | None:
    if context.invoked_subcommand is not None:
        return None

    async def read(there: OpenFleet) -> tuple[list[dict[str, Any]], dict[str, int]]:
        return await peek(there.queue, limit), msgspec.to_builtins(await there.queue.depth())

    waiting, depth = fleet.ask(read)
    return {**depth, "waiting": waiting}, queue_view(waiting, depth)


@fleet_command(queue_app.command("show"))
def queue_show(fleet: Named, request_id: Annotated[str, typer.Argument(metavar="ID")]) -> Said:
    """Show one job, waiting or claimed."""
    job = fleet.ask(lambda there: show(there.queue, request_id))
    if job is None:
        raise Refused(f"request {request_id!r} is not in the queue: it was never queued, or is done")
    return job, plain_table(("", ""), ((name, str(value)) for name, value in job.items()))


async def _set_level(fleet: OpenFleet, level: str | None, process: str) -> None:
    """Raises Refused for a process that is not there: its level would wait in Redis for one of that name."""
    frontends = {name.rpartition("-")[0] for name in await fleet.registry.frontends()}
    there = sorted({*await fleet.registry.workers(), *frontends})
    if await fleet.registry.launchers():
        there.append("launcher")
    if not there:
        raise Refused(NOBODY)
    if process not in (ALL, *there):
        raise Refused(f"{process!r} is no process of the fleet; it has {', '.join(there)}")
    await retry_while_away(lambda: LogLevels(fleet.redis, fleet.namespace).set(level, process))  # twice is as once


def _counts(targets: list[str]) -> dict[str, int]:
    """How many workers of which role are asked for: `prefill=2`, `decode=6`, or both at once as `2P6D`."""
    counts: dict[str, int] = {}
    for target in targets:
        split = re.fullmatch(r"([0-9]{1,9})P([0-9]{1,9})D", target, re.IGNORECASE)
        single = re.fullmatch(r"(prefill|decode)=([0-9]{1,9})", target)
        if split:
            asked = {"prefill": int(split[1]), "decode": int(split[2])}
        elif single:
            asked = {single[1]: int(single[2])}
        else:
            raise Refused(f"{target}: expected prefill=X or decode=Y with an integer >= 0, or both as 2P6D")
        if twice := asked.keys() & counts.keys():
            raise Refused(f"{target}: {' and '.join(sorted(twice))} is asked for twice; name each role once")
        counts |= asked
    return counts


def _steer(fleet: OpenFleet) -> Steering:
    return Steering(fleet.registry, fleet.queue, fleet.heartbeat_s)
