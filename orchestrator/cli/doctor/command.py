"""`orchestrator doctor`, and how its lines are shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from orchestrator.cli.doctor.fleet import kv_checks, port_checks, redis_checks
from orchestrator.cli.doctor.host import Check, host_checks
from orchestrator.cli.handle import OUT, Named, SetOption, find_fleet, fleet_command, models_here, option, print_json
from orchestrator.config.models import load_models
from orchestrator.config.settings import Config, Refused

app = typer.Typer(invoke_without_command=True)
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@fleet_command(app.callback())
def doctor(
    fleet: Named,
    context: typer.Context,
    host: Annotated[bool, option("--host", "Check only this host, not the fleet's Redis.")] = False,
    config: Annotated[Path | None, option("--config", "Also check the port, models and Redis of this file.")] = None,
    set_: SetOption = None,
    as_json: bool = False,
) -> None:
    """Check this host, Redis and the KV paths between workers. Exit code 1 if a check fails."""
    if context.invoked_subcommand is not None:
        return
    configs = list(load_models(config, set_).values()) if config is not None else []
    _report(_all_checks(configs, host, fleet), as_json)


async def _all_checks(configs: Sequence[Config], host: bool, fleet: Named) -> AsyncIterator[Check]:
    for check in host_checks(configs):
        yield check
    redis = fleet.redis or next((each.redis.url for each in configs if each.redis.url != "embedded"), None)
    try:
        models: list[str | None] = [*models_here(fleet.namespace).values()]
        for model in [] if host else models or [fleet.namespace]:
            async for check in redis_checks(find_fleet(model, redis)):
                yield check
    except Refused as error:  # none runs here, or several do and none was named
        yield Check("Redis", "ok", f"not checked: {error}")


@fleet_command(app.command("kv"))
def kv(
    fleet: Named,
    source: Annotated[str, typer.Argument(metavar="A", help="The worker that sends KV.")],
    target: Annotated[str, typer.Argument(metavar="B", help="The worker that receives KV.")],
    as_json: bool = False,
) -> None:
    """Check whether worker A can send KV to worker B, and how fast."""
    _report(kv_checks(fleet.find(), source, target), as_json)


@fleet_command(app.command("ports"))
def ports(
    fleet: Named,
    host: Annotated[str, typer.Argument(metavar="HOST", help="Address or name of a host on which the fleet runs.")],
    as_json: bool = False,
) -> None:
    """Check whether this host reaches each port of the fleet's processes on another host."""
    _report(port_checks(fleet.find(), host), as_json)


def _report(checks: AsyncIterator[Check], as_json: bool) -> None:
    """Each is printed when it is known: some take seconds. Raises typer.Exit with 1 where one failed."""

    async def shown() -> list[Check]:
        return [show_check(check, as_json) async for check in checks]

    found = asyncio.run(shown())
    if as_json:
        print_json(found)
    if any(check.level == "fail" for check in found):
        raise typer.Exit(1)


def show_check(check: Check, as_json: bool = False) -> Check:
    if not as_json:
        line = Text.assemble((f"{check.level:<4}", _COLOURS[check.level]), f"  {check.name:<14} {check.said}")
        if check.fix:
            line.append(f"  → {check.fix}", "dim")
        OUT.print(line, soft_wrap=True)
    return check
