"""`orchestrator up`: start a fleet on this machine, and run it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.config import checked_models
from orchestrator.cli.detach import start_detached
from orchestrator.cli.handle import JsonOption, SetOption
from orchestrator.config.models import fleet_namespace
from orchestrator.config.settings import Refused, overridden, read_tree
from orchestrator.launch.console import Console
from orchestrator.launch.launcher import launch

DEMO_FILE = Path(__file__).parents[1] / "config" / "demo" / "demo-1p1d-cpu.yaml"
app = typer.Typer()


@app.command()
def up(
    config: Annotated[
        Path | None, typer.Argument(help="A YAML file, see `orchestrator config keys`; default: a demo on CPU.")
    ] = None,
    set_: SetOption = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the fleet is ready, and leave it running.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also show the output of all processes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a fleet on this machine and run it until Ctrl-C. With --detach and --json, print where it runs."""
    if as_json and not detach:
        raise Refused(
            "--json: with --detach only; an attached fleet's lines are a person's, see `orchestrator status --json`"
        )
    file = config or DEMO_FILE
    models = checked_models(file, set_ or ())
    if config is None and not as_json:
        print(f"No file is named: this is the demo, {file}", flush=True)
    if detach:
        sets = [part for item in set_ or [] for part in ("--set", item)]
        start_detached(fleet_namespace(models), [str(file), *sets, *(["--verbose"] if verbose else [])], as_json)
    else:
        launch(models, overridden(read_tree(file), set_ or []), Console(verbose=verbose))
