"""`orchestrator logs`: the log of a fleet on this machine. `orchestrator events`: the event log of any fleet."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.text import Text

from orchestrator.cli.handle import (
    OUT,
    FleetHandle,
    JsonOption,
    Named,
    WholeFleetOption,
    fleet_command,
    namespace_here,
    open_fleet,
    print_json,
    retry_while_away,
)
from orchestrator.config.settings import Refused
from orchestrator.launch.host.run_folder import RunFolder
from orchestrator.process.files import open_own

if TYPE_CHECKING:
    from orchestrator.store.operator.events import Event

_POLL_S = 0.3
_MOST_EVENTS = 5000  # that a fleet keeps
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")]
app = typer.Typer()


@app.command()
def logs(
    process: Annotated[str | None, typer.Argument(metavar="[WORKER]", help="Only this worker or frontend.")] = None,
    follow: FollowOption = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the latest to print.")] = 50,
    namespace: WholeFleetOption = None,
    as_json: JsonOption = False,
) -> None:
    path = RunFolder(namespace_here(namespace)).log_path
    mine = _of(process)
    try:
        file = open_own(path, errors="replace")
    except FileNotFoundError:
        raise Refused(f"{path}: no log file; start a fleet on this machine, or name its --namespace") from None
    # Not by `splitlines`: a JSON line may have what Unicode calls the end of one.
    *whole, rest = file.read().split("\n")
    kept = [line for line in (whole if follow else [*whole, rest]) if line and mine(line)]
    if process is not None and not kept and not follow:
        raise Refused(f"{process}: no line of this process in {path}; `orchestrator status` lists workers")
    shown = as_object if as_json else str
    for line in kept[len(kept) - min(lines, len(kept)) :]:
        print(shown(line))
    if follow:
        for line in _following(path, file, rest):
            if mine(line):
                print(shown(line), flush=True)


@fleet_command(app.command())
def events(
    fleet: Named,
    follow: FollowOption = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", "--limit", min=1, max=_MOST_EVENTS, help="How many of the latest to print.")
    ] = 50,
    as_json: bool = False,
) -> None:
    show = print_json if as_json else _print_event
    asyncio.run(_events(fleet.find(), lines, follow, show))


async def _events(handle: FleetHandle, limit: int, follow: bool, show: Callable[[Event], None]) -> None:
    from orchestrator.store.operator.events import BEGINNING, EventLog

    async with open_fleet(handle) as fleet:
        log, last = EventLog(fleet.redis, handle.namespace), BEGINNING
        while True:
            read = partial(log.read, last, limit)
            for event in await (retry_while_away(read) if follow else read()):
                show(event)
                last = event.id
            if not follow:
                return
            limit = _MOST_EVENTS  # of those that are new, all
            await asyncio.sleep(_POLL_S)


def describe_event(event: Event) -> str:
    """What happened, without the time."""
    fields = event.fields
    who = f"{fields.get('kind', '')} {fields.get('id', '')}".strip()
    match event.type:
        case "joined":
            return f"{who} joined" + (f" as a {fields['role']} worker" if fields.get("role") else "")
        case "lost":
            return f"{who} is lost: {fields.get('why', '')}"
        case "flipped":
            return f"{who} changed from {fields.get('from')} to {fields.get('to')}"
        case "scaled":
            said = f"desired: {fields.get('prefill')} prefill, {fields.get('decode')} decode, by {fields.get('by')}"
            return said + (f": {fields['why']}" if fields.get("why") else "")
        case "decided":
            return f"ratio.mode: auto: {fields.get('decision')}"
        case "retried":
            return f"{fields.get('count')} requests retried by {fields.get('frontend')}: {fields.get('why')}"
        case "repaired":
            return f"Redis key {who} is removed: {fields.get('why', '')}"
        case _:
            return f"{who} {event.type}"


def _print_event(event: Event) -> None:
    at = datetime.datetime.fromtimestamp(event.at).strftime("%Y-%m-%d %H:%M:%S")
    colour = {"lost": "red", "retried": "yellow", "repaired": "yellow", "joined": "green"}.get(event.type, "default")
    OUT.print(
        Text.assemble((at, "dim"), "  ", (f"{event.type:<8}", colour), f" {describe_event(event)}"), soft_wrap=True
    )


def _of(process: str | None) -> Callable[[str], bool]:
    """Whether a line is one that this process wrote: the launcher puts the name before it."""
    if process is None:
        return lambda line: True
    pattern = re.compile(rf'^\W*{re.escape(process)}\b|^{{.*"process":"{re.escape(process)}"')
    return lambda line: pattern.match(line) is not None


def as_object(line: str) -> str:
    """The line as JSON. With `logging.format: json` it is JSON already, but a full disk leaves pieces of lines."""
    if line.startswith("{"):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            return line
    process, named, message = line.removeprefix("[").partition("] ")
    return msgspec.json.encode({"process": process, "message": message} if named else {"message": line}).decode()


def _following(path: Path, file: IO[str], rest: str) -> Iterator[str]:
    """Lines that follow what was read of `file`, which ended in `rest`; also of the file that replaces a full one."""
    while True:
        if text := file.read():
            *whole, rest = (rest + text).split("\n")
            yield from whole
            continue
        try:
            replaced = path.stat().st_ino != os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            replaced = False
        if replaced:
            yield from filter(None, (rest + file.read()).split("\n"))  # lines written before the file was replaced
            file.close()
            file, rest = open_own(path, errors="replace"), ""
        sys.stdout.flush()
        time.sleep(_POLL_S)
