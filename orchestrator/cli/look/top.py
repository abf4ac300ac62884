"""`orchestrator top`: the fleet live in the terminal, or one sample as JSON, from the dashboard's event stream."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import typer

from orchestrator.cli.handle import JsonOption, NamespaceOption, RedisOption, UrlOption, find_fleet, print_json
from orchestrator.cli.look.frontend import UNANSWERED, fleet_status, fleet_stream, operator_key, with_frontend
from orchestrator.config.explain import missing
from orchestrator.config.settings import Refused

app = typer.Typer()


@app.command()
def top(
    namespace: NamespaceOption = None, redis: RedisOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Show the fleet live in the terminal; keys sort, filter, change roles and drain. With --json, print one sample."""
    handle = with_frontend(find_fleet(namespace, redis, url))
    assert handle.url is not None
    key = operator_key(handle, handle.url)
    if as_json:
        print_json(asyncio.run(sample(handle.url, key)))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Refused("top needs a terminal; `orchestrator top --json` and `orchestrator status` do not")
    asyncio.run(fleet_status(handle))  # a wrong address is one line, not a screen
    try:
        from orchestrator.cli.look.screen import Top  # takes longer to import than a sample takes to come
    except ModuleNotFoundError as error:
        raise Refused(missing("top", str(error.name), "top")) from None

    Top(handle.url, key, handle.model).run()


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
