"""`orchestrator status`: workers, their load and the queue. `orchestrator top` shows them live."""

from __future__ import annotations

import asyncio

import typer

from orchestrator.cli.handle import (
    OUT,
    JsonOption,
    NamespaceOption,
    RedisOption,
    UrlOption,
    find_fleet,
    models_here,
    print_json,
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
        if as_json:
            print_json({"models": all_seen})
        else:
            OUT.print(*(fleet_view(seen) for seen in all_seen.values()), sep="\n")
        return
    seen = asyncio.run(fleet_status(find_fleet(namespace, redis, url)))
    print_json(seen) if as_json else OUT.print(fleet_view(seen))
