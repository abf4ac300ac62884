"""`orchestrator trace`: one ended request, or the slowest ones, as a waterfall. Needs no trace collector.

Reads the log of the fleet that ran here last, else asks the fleet's frontends: each remembers its own requests.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator.cli.handle import OUT, FleetHandle, Named, fleet_command, namespace_here, option, print_json
from orchestrator.cli.look.frontend import get, with_frontend
from orchestrator.config.settings import Refused
from orchestrator.launch.host.run_folder import RunFolder
from orchestrator.process.files import Foreign, open_own
from orchestrator.process.telemetry.logs import request_in
from orchestrator.process.telemetry.requests import RequestLine, Stage, read_request, stages

_NAMES_WIDTH = 10
_COLOURS = {
    "frontend": "bright_black",
    "place": "white",
    "queue": "yellow",
    "claim": "cyan",
    "prefill": "blue",
    "transfer": "magenta",
}
app = typer.Typer()


@fleet_command(app.command(), by_url=True)
def trace(
    fleet: Named,
    request_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="The request's id, or the beginning of it.")
    ] = None,
    last: Annotated[bool, option("--last", "The request that ended last.")] = False,
    slowest: Annotated[int, option("--slowest", "Show the N slowest requests.", min=0)] = 0,
    as_json: bool = False,
) -> None:
    if sum((request_id is not None, last, slowest > 0)) != 1:
        raise Refused("name one request: its ID, --last, or --slowest N")
    found = [] if fleet.by_address else _chosen(_logged(fleet.namespace), request_id, slowest)
    if not found:
        handle = with_frontend(fleet.find())
        found = _chosen(asyncio.run(_recorded_requests(handle, request_id, slowest)), request_id, slowest)
    if not found:
        what = f"request {request_id!r}" if request_id else "a request"
        raise Refused(f"{what} is neither in the log nor remembered by a frontend: it still runs, or ended long ago")
    if as_json:
        told = [line.with_stages() for line in found]
        print_json(told if slowest else told[0])
    else:
        for line in found:
            OUT.print(waterfall(line, min(OUT.width, 120)))


def waterfall(line: RequestLine, width: int) -> RenderableType:
    """A line for each stage: its name, where it lies in time, how long it took."""
    found = stages(line)
    whole_ms = max(found[-1].end_ms, 0.001)
    cached = f" ({line.cached_tokens} cached)" if line.cached_tokens else ""
    head = Text.assemble(
        (line.id, "bold"),
        f"  {line.outcome}, {line.decision or 'not placed'} ({line.reason}), ",
        f"{line.prompt_tokens}{cached} + {line.output_tokens} tokens, {_ms(whole_ms)}",
    )
    if line.ttft_ms is not None:
        head.append(f", first token after {_ms(line.ttft_ms + (line.frontend_ms or 0.0))}")
    if line.retries:
        head.append(f", {line.attempts} attempts ({', '.join(line.retries)})", "yellow")
    cells = max(10, width - _NAMES_WIDTH - 36)
    return Group(head, *(_row(stage, whole_ms, cells) for stage in found), Text(""))


def _row(stage: Stage, whole_ms: float, cells: int) -> Text:
    begin = min(round(cells * stage.begin_ms / whole_ms), cells - 1)
    length = max(1, round(cells * stage.end_ms / whole_ms) - begin)
    bar = "━" * length if stage.took_ms * cells > whole_ms else "╸"
    row = Text(f"  {stage.name:<{_NAMES_WIDTH}}", no_wrap=True, overflow="ellipsis")
    row.append(" " * begin)
    row.append(bar, _COLOURS.get(stage.name, "green"))
    row.append(" " * (cells - begin - len(bar)) + f" {_ms(stage.took_ms):>9}  ")
    return row.append(stage.worker, "dim")


def _ms(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 10_000 else f"{milliseconds:.1f} ms"


def _chosen(lines: Iterable[RequestLine], request_id: str | None, slowest: int) -> list[RequestLine]:
    """The request meant, or the slowest ones; the newest of equals."""
    if slowest:
        return heapq.nlargest(slowest, lines, key=lambda line: line.took_ms)
    found = None
    for line in lines:
        if request_id is None or line.id == request_id or (found is None and line.id.startswith(request_id)):
            found = line
    return [found] if found is not None else []


def _logged(namespace: str | None) -> Iterator[RequestLine]:
    """Oldest first. Raises Refused where several fleets run here and none is named."""
    folder = RunFolder(namespace_here(namespace))
    for path in (folder.log_path.with_name(folder.log_path.name + ".1"), folder.log_path):
        yield from request_lines(path)


def request_lines(path: Path) -> Iterator[RequestLine]:
    """The requests in a log file; none if there is no file. Raises Refused for one that is not ours."""
    try:
        with open_own(path, errors="replace") as file:
            for text in file:
                encoded = request_in(text)
                if encoded is not None and (line := read_request(encoded)) is not None:
                    yield line
    except Foreign as error:
        raise Refused(str(error)) from None
    except OSError:
        return


async def _recorded_requests(handle: FleetHandle, request_id: str | None, slowest: int) -> list[RequestLine]:
    path = f"/requests?slowest={slowest}" if slowest else "/requests?latest=1"
    if request_id:
        path = f"/requests/{quote(request_id, safe='')}"  # its client named it
    if (said := await get(handle, handle.url or "", path, (200, 404))) is None:
        raise Refused(f"{handle.url}: no frontend of a fleet answers there")
    if silent := said.get("silent_frontends"):
        typer.echo(f"without the requests of {', '.join(silent)}, which did not answer", err=True)
    lines = [msgspec.convert(line, RequestLine) for line in said.get("requests", [])]
    return sorted(lines, key=lambda line: line.ended_at)
