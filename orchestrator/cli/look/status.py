"""`orchestrator status` and `top`: workers, their load and the queue, once or again and again; `top` live in the
terminal, or one sample as JSON, from the dashboard's event stream."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Group

from orchestrator.cli.handle import OUT, FleetHandle, Named, Said, find_fleet, fleet_command, models_here, option, say
from orchestrator.cli.look.frontend import UNANSWERED, fleet_status, fleet_stream, operator_key, with_frontend
from orchestrator.cli.look.views import fleet_view
from orchestrator.config.explain import missing
from orchestrator.config.settings import Refused

_WATCH_EVERY_S = 1.0
app = typer.Typer()


@fleet_command(app.command(), by_url=True)
def status(
    fleet: Named,
    watch: Annotated[bool, option("--watch", "Refresh every second until Ctrl-C.")] = False,
    as_json: bool = False,
) -> Said | None:
    if not (watch or fleet.by_address) and len(models := models_here(fleet.namespace)) > 1:
        all_seen = {model: asyncio.run(fleet_status(find_fleet(its, None))) for model, its in models.items()}
        shown = [fleet_view(seen, model) for model, seen in all_seen.items()]
        return {"models": all_seen}, Group(*shown)
    handle = fleet.find()
    if not watch:
        seen = asyncio.run(fleet_status(handle))
        return seen, fleet_view(seen, handle.model)
    if as_json or not OUT.is_terminal:
        asyncio.run(_repeat(handle, lambda seen: say(seen, fleet_view(seen, handle.model), as_json)))
    else:
        from rich.live import Live  # imports the progress bars

        with Live(console=OUT, auto_refresh=False) as live:
            asyncio.run(_repeat(handle, lambda seen: live.update(fleet_view(seen, handle.model), refresh=True)))
    return None


async def _repeat(handle: FleetHandle, show: Callable[[dict[str, Any]], None]) -> None:
    while True:
        show(await fleet_status(handle))
        await asyncio.sleep(_WATCH_EVERY_S)


@fleet_command(app.command(), by_url=True)
def top(fleet: Named, as_json: bool = False) -> Said | None:
    """Show the fleet live in the terminal; keys sort, filter, change roles and drain. With --json, print one sample."""
    handle = with_frontend(fleet.find())
    assert handle.url is not None
    key = operator_key(handle, handle.url)
    if as_json:
        return asyncio.run(sample(handle.url, key)), ""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Refused("top needs a terminal; `orchestrator top --json` and `orchestrator status` do not")
    asyncio.run(fleet_status(handle))  # a wrong address is one line, not a screen
    try:
        from orchestrator.cli.look.screen import Top  # takes longer to import than a sample takes to come
    except ModuleNotFoundError as error:
        raise Refused(missing("top", str(error.name), "top")) from None

    Top(handle.url, key, handle.model).run()
    return None


async def sample(url: str, key: str | None) -> dict[str, Any]:
    """The first of the stream that has figures; a frontend has them within a second. Raises Refused."""
    try:
        async with contextlib.aclosing(fleet_stream(url, key)) as events:
            async for event, told in events:
                if event == "sample" and told["point"]:
                    return told
    except (*UNANSWERED, KeyError) as error:
        raise Refused(f"{url}: no fleet's stream: {str(error) or type(error).__name__}") from None
    raise Refused(f"{url}: the frontend ended the stream")
