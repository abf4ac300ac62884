"""`orchestrator ratio history`: what `ratio.mode: auto` has decided, and on which numbers."""

from __future__ import annotations

import time

import msgspec
import typer

from orchestrator.cli.handle import OUT, JsonOption, NamespaceOption, RedisOption, ask, find_fleet, print_json

app = typer.Typer()
ratio_app = typer.Typer(help="Show how ratio.mode: auto chose the split of the workers.")
app.add_typer(ratio_app, name="ratio")


@ratio_app.callback()
def ratio() -> None:
    """Show how `ratio.mode: auto` chose the split of the workers."""


@ratio_app.command()
def history(namespace: NamespaceOption = None, redis: RedisOption = None, as_json: JsonOption = False) -> None:
    """Show the decisions of `ratio.mode: auto` and the numbers behind them, newest first."""
    decisions = ask(find_fleet(namespace, redis), lambda fleet: fleet.history.read())
    if as_json:
        print_json(msgspec.to_builtins(decisions))
        return
    for noted in decisions:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(noted.at))
        OUT.print(f"{when}  {noted.decision}", highlight=False, soft_wrap=True)
    if not decisions:
        OUT.print("none: the split has not changed, or ratio.mode is not auto", highlight=False)
