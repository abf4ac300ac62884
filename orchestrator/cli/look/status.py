"""`orchestrator status`: workers, their load and the queue. `orchestrator top` shows them live."""

from __future__ import annotations

import asyncio

import typer
from rich.console import Group

from orchestrator.cli.handle import (
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

app = typer.Typer()


@app.command()
def status(
    namespace: NamespaceOption = None, redis: RedisOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Show workers, their KV blocks and the queue."""
    if url is None and redis is None and len(models := models_here(namespace)) > 1:
        all_seen = {model: asyncio.run(fleet_status(find_fleet(model, None))) for model in models}
        say({"models": all_seen}, Group(*map(fleet_view, all_seen.values())), as_json)
        return
    seen = asyncio.run(fleet_status(find_fleet(namespace, redis, url)))
    say(seen, fleet_view(seen), as_json)
