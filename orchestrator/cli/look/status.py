"""`orchestrator status`: workers, their load and the queue, once or every second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Group

from orchestrator.cli.handle import (
    OUT,
    FleetHandle,
    JsonOption,
    NamespaceOption,
    RedisOption,
    UrlOption,
    find_fleet,
    models_here,
    say,
)
from orchestrator.cli.look.frontend import fleet_status
from orchestrator.cli.look.views import fleet_view

_WATCH_EVERY_S = 1.0
app = typer.Typer()


@app.command()
def status(
    namespace: NamespaceOption = None,
    redis: RedisOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
) -> None:
    """Show workers, their KV blocks and the queue."""
    if not watch and url is None and redis is None and len(models := models_here(namespace)) > 1:
        all_seen = {model: asyncio.run(fleet_status(find_fleet(model, None))) for model in models}
        shown = [fleet_view(seen, model) for model, seen in all_seen.items()]
        say({"models": all_seen}, Group(*shown), as_json)
        return
    handle = find_fleet(namespace, redis, url)
    if not watch:
        seen = asyncio.run(fleet_status(handle))
        say(seen, fleet_view(seen, handle.model), as_json)
    elif as_json or not OUT.is_terminal:
        asyncio.run(_repeat(handle, lambda seen: say(seen, fleet_view(seen, handle.model), as_json)))
    else:
        from rich.live import Live  # imports the progress bars

        with Live(console=OUT, auto_refresh=False) as live:
            asyncio.run(_repeat(handle, lambda seen: live.update(fleet_view(seen, handle.model), refresh=True)))


async def _repeat(handle: FleetHandle, show: Callable[[dict[str, Any]], None]) -> None:
    while True:
        show(await fleet_status(handle))
        await asyncio.sleep(_WATCH_EVERY_S)
