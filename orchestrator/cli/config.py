"""`orchestrator config`: check a file, list every key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.handle import OUT, JsonOption, SetOption, print_json
from orchestrator.cli.look.views import config_keys, keys_view
from orchestrator.config.engine_args import check_engine_args
from orchestrator.config.settings import Config, load_config

app = typer.Typer()
config_app = typer.Typer(help="The configuration.")
app.add_typer(config_app, name="config")


@config_app.command("check")
def config_check(file: Annotated[Path, typer.Argument()], set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Check a file without starting anything."""
    parsed = load_config(file, set_)
    check_engine_args(parsed)
    shape = f"{parsed.workers.prefill.replicas}P{parsed.workers.decode.replicas}D"
    if as_json:
        print_json({"ok": True, "fleet": shape, "engine": parsed.engine, "model": parsed.model})
    else:
        said = f"{file}: ok ({shape}, engine {parsed.engine}, model {parsed.model})"
        OUT.print(said, highlight=False, soft_wrap=True)


@config_app.command("keys")
def keys(as_json: JsonOption = False) -> None:
    """List every key with its type and default."""
    if as_json:
        print_json([{"key": key, "type": kind, "default": default} for key, kind, default in config_keys(Config)])
    else:
        OUT.print(keys_view(Config))
