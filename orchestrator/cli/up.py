"""`orchestrator up`: start a fleet on this machine, and run it.

With `--detach` its launcher runs in the background; its output is shown until it is ready or has failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Annotated, NoReturn

import msgspec
import typer

from orchestrator.cli.config import checked_models
from orchestrator.cli.handle import JsonOption, SetOption, option, print_json
from orchestrator.config.models import fleet_namespace
from orchestrator.config.settings import ConfigError, Refused, overridden, read_tree
from orchestrator.launch.announcement import READY_FD
from orchestrator.launch.console import Console
from orchestrator.launch.fleet_processes import StartLater
from orchestrator.launch.host.run_folder import FleetRunning, Ready, RunFolder
from orchestrator.launch.launcher import launch
from orchestrator.process.parent import EXIT_AGAIN
from orchestrator.store.client import RedisAway, RedisUnfit

DEMO_FILE = Path(__file__).parents[1] / "config" / "demo" / "demo-1p1d-cpu.yaml"
app = typer.Typer()


@app.command()
def up(
    config: Annotated[
        Path | None, typer.Argument(help="A YAML file, see `orchestrator config keys`; default: a demo on CPU.")
    ] = None,
    set_: SetOption = None,
    detach: Annotated[bool, option("--detach", "Return once the fleet is ready, and leave it running.")] = False,
    verbose: Annotated[bool, option("--verbose", "Also show the output of all processes.")] = False,
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
        try:
            launch(models, overridden(read_tree(file), set_ or []), Console(verbose=verbose))
        except RedisUnfit:
            raise
        except (RedisAway, StartLater) as error:
            _end_for_now(str(error))


_POLL_S = 0.1
_SIGNAL_WAIT_S = 60.0


def _end_for_now(why: str) -> NoReturn:
    """Redis may answer the next time, or a port be free: a service manager is to try again."""
    print(f"orchestrator: {' '.join(why.split())}", file=sys.stderr, flush=True)
    raise typer.Exit(EXIT_AGAIN)


def start_detached(namespace: str, arguments: list[str], as_json: bool) -> None:
    """Start a launcher with these arguments of `up`, without --detach. `as_json` prints only where the fleet is. Raises
    ConfigError with its last line if it ends. Once it is ready nobody reads its output: it writes to its log only."""
    folder = RunFolder(namespace)
    if folder.is_held:
        raise FleetRunning(namespace, folder.launcher())
    told, tells = os.pipe()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli.main", "up", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", READY_FD: str(tells)},
        pass_fds=[tells],
        start_new_session=True,
    )
    os.close(tells)
    assert launcher.stdout is not None
    with launcher.stdout as shown, open(told, "rb", buffering=0) as is_ready:
        for pipe in (shown, is_ready):
            os.set_blocking(pipe.fileno(), False)
        try:
            ready = _show_until_ready(launcher, is_ready, shown, as_json)
        except KeyboardInterrupt:
            launcher.terminate()
            try:
                launcher.wait(_SIGNAL_WAIT_S)
            except subprocess.TimeoutExpired:
                raise ConfigError(
                    f"process {launcher.pid} still ends the fleet; wait for it with `orchestrator down --namespace "
                    f"{namespace}`, which kills it in the end"
                ) from None
            raise
    if as_json:
        where = {"namespace": namespace, "pid": launcher.pid, "log": str(folder.log_path)}
        print_json({**msgspec.to_builtins(ready), **where})
        return
    print(f"runs on as process {launcher.pid}; log: {folder.log_path}; end it with `orchestrator down`", flush=True)


def _show_until_ready(launcher: subprocess.Popen[bytes], is_ready: IO[bytes], shown: IO[bytes], quiet: bool) -> Ready:
    last = rest = told = b""
    while True:
        # Asked before the output is read, so that everything written before that is shown.
        ended = launcher.poll() is not None
        told += is_ready.read() or b""
        *lines, rest = (rest + (shown.read() or b"")).split(b"\n")
        for line in lines:
            last = line.strip() or last
            if not quiet and not (ended and line.startswith(b"orchestrator: ")):
                print(line.decode(errors="replace"), flush=True)
        if ended:
            said = last.decode(errors="replace").removeprefix("orchestrator: ")
            if launcher.returncode == EXIT_AGAIN:
                _end_for_now(said)
            raise ConfigError(said or f"the launcher ended with exit code {launcher.returncode} and said nothing")
        if told.endswith(b"\n"):
            return msgspec.json.decode(told, type=Ready)
        time.sleep(_POLL_S)
