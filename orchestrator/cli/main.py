"""The command line: `orchestrator up`, `down`, `status`, `scale`, `role`, `drain`, `queue`, `config`, `simulate`.

Parses, asks, prints. Every user error is one line on standard error and exit code 2. Imports no engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import typer
from rich.console import Console as RichConsole
from rich.live import Live

from orchestrator.cli.compare import compare_command, profile_command
from orchestrator.cli.detach import start_detached
from orchestrator.cli.operator import FleetHandle, FleetOperator, Refused, find_fleet, open_fleet
from orchestrator.cli.simulate import simulate_command
from orchestrator.cli.views import fields_view, fleet_view, keys_view, queue_view
from orchestrator.config.engine_args import check_engine_args
from orchestrator.config.settings import Config, ConfigError, load_config
from orchestrator.launch.console import Console
from orchestrator.launch.host.leftovers import end_processes, remove_shared_memory
from orchestrator.launch.host.run_folder import RunFolder, abandoned_namespaces, held_namespaces
from orchestrator.launch.launcher import launch
from orchestrator.parent import pid_here, started_ticks
from orchestrator.types import Role

app = typer.Typer(
    help="Prefill/decode disaggregation for vLLM: a fleet of workers behind one OpenAI endpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
queue_app = typer.Typer(help="The prefill queue.", invoke_without_command=True)
config_app = typer.Typer(help="The configuration.", no_args_is_help=True)
app.add_typer(queue_app, name="queue")
app.add_typer(config_app, name="config")

NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", help="Fleet; by default the one running here.", show_default=False)
]
RedisOption = Annotated[
    str | None, typer.Option("--redis", help="The fleet's Redis; by default the running one's.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: a.b=value. May be repeated.", show_default=False)
]
ForceOption = Annotated[bool, typer.Option("--force", help="Also when it is the last worker of its role.")]
WorkerArgument = Annotated[str, typer.Argument(help="A worker's id, as `orchestrator status` shows it.")]
T = TypeVar("T")
_out = RichConsole(width=None if sys.stdout.isatty() else 200)
_KILL_AFTER_S = 60.0
_EXIT_AFTER_S = 5.0  # how long the interpreter may run on after the fleet has ended
_WATCH_EVERY_S = 1.0


@app.command()
def up(
    config: Annotated[Path, typer.Argument(help="A YAML file; see `orchestrator config keys`.")],
    set_: SetOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the fleet is ready; it runs on.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the whole output of the fleet's processes.")] = False,
) -> None:
    """Start a fleet on this machine and run it until Ctrl-C."""
    parsed = load_config(config, set_)
    if detach:
        sets = [part for item in set_ or [] for part in ("--set", item)]
        start_detached(parsed, [str(config), *sets, *(["--verbose"] if verbose else [])])
    else:
        launch(parsed, Console(verbose=verbose))


@app.command()
def down(namespace: NamespaceOption = None) -> None:
    """End the fleet that runs here, and wait until it is gone."""
    held = held_namespaces()
    if namespace is None and len(held) > 1:
        raise Refused(f"several fleets run here ({', '.join(held)}); name one with --namespace")
    if namespace is None and not held:
        abandoned = abandoned_namespaces()
        if not abandoned:
            raise Refused("no fleet runs here")
        for name in abandoned:
            _remove_killed(RunFolder(name))
        return
    namespace = namespace or held[0]
    folder = RunFolder(namespace)
    launcher = folder.launcher()
    if not folder.is_held:
        if launcher is None:
            raise Refused(f"no fleet runs in namespace {namespace!r}")
        _remove_killed(folder)
        return
    if launcher is None:
        raise Refused(f"the fleet in namespace {namespace!r} is just starting or ending; try again")
    pid = pid_here(launcher)
    if pid is None:
        raise Refused(f"the fleet in namespace {namespace!r} runs in another container: run `orchestrator down` there")
    ticks = started_ticks(pid)
    os.kill(pid, signal.SIGTERM)
    if not folder.wait_until_free(_KILL_AFTER_S):
        _out.print(f"process {pid} did not end within {_KILL_AFTER_S:g} s; killing it")
        os.kill(pid, signal.SIGKILL)
        folder.wait_until_free(_KILL_AFTER_S)
        _remove_killed(folder)
    deadline = time.monotonic() + _EXIT_AFTER_S
    while ticks is not None and started_ticks(pid) == ticks and time.monotonic() < deadline:
        time.sleep(0.01)
    _out.print(f"fleet {namespace!r} ended")


@app.command()
def status(
    namespace: NamespaceOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second, until Ctrl-C.")] = False,
) -> None:
    """Show workers, their KV blocks and the queue."""
    handle = find_fleet(namespace, redis)
    if not watch:
        seen = _ask(handle, FleetOperator.status)
        _print_json(seen) if as_json else _out.print(fleet_view(seen))
    elif as_json:
        _ask(handle, lambda fleet: _repeat(fleet, _print_json))
    else:
        with Live(console=_out, auto_refresh=False) as live:
            _ask(handle, lambda fleet: _repeat(fleet, lambda seen: live.update(fleet_view(seen), refresh=True)))


@app.command()
def scale(
    targets: Annotated[list[str], typer.Argument(help="prefill=X, decode=Y, or both.")],
    namespace: NamespaceOption = None,
    redis: RedisOption = None,
) -> None:
    """Set how many workers of each role there should be."""
    counts: dict[str, int] = {}
    for target in targets:
        name, _, value = target.partition("=")
        if name not in ("prefill", "decode") or not value.isdigit():
            raise Refused(f"{target}: expected prefill=X or decode=Y with an integer >= 0")
        counts[name] = int(value)
    wanted = _ask(find_fleet(namespace, redis), lambda fleet: fleet.scale(counts.get("prefill"), counts.get("decode")))
    _out.print(f"desired: {wanted.prefill} prefill, {wanted.decode} decode")


@app.command()
def role(
    worker: WorkerArgument,
    new_role: Annotated[Role, typer.Argument(metavar="prefill|decode")],
    namespace: NamespaceOption = None,
    redis: RedisOption = None,
    force: ForceOption = False,
) -> None:
    """Change a running worker's role in place; the desired ratio follows."""
    changed = _ask(find_fleet(namespace, redis), lambda fleet: fleet.change_role(worker, new_role, force))
    _out.print(f"{worker}: {'becomes' if changed else 'is already'} a {new_role.value} worker")


@app.command()
def drain(
    worker: WorkerArgument, namespace: NamespaceOption = None, redis: RedisOption = None, force: ForceOption = False
) -> None:
    """Let a worker finish what it has, then end it; the desired ratio follows."""
    changed = _ask(find_fleet(namespace, redis), lambda fleet: fleet.drain(worker, force))
    _out.print(f"{worker}: {'draining' if changed else 'is draining already'}")


@queue_app.callback()
def queue(
    context: typer.Context,
    namespace: NamespaceOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Jobs to show.")] = 20,
) -> None:
    """Show the head of the prefill queue, next first."""
    if context.invoked_subcommand is not None:
        return

    async def read(fleet: FleetOperator) -> tuple[list[dict[str, Any]], dict[str, int]]:
        return await fleet.queue.peek(limit), msgspec.to_builtins(await fleet.queue.depth())

    waiting, depth = _ask(find_fleet(namespace, redis), read)
    _print_json({**depth, "waiting": waiting}) if as_json else _out.print(queue_view(waiting, depth))


@queue_app.command("show")
def queue_show(
    request_id: Annotated[str, typer.Argument(metavar="ID")],
    namespace: NamespaceOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one job, waiting or claimed."""
    job = _ask(find_fleet(namespace, redis), lambda fleet: fleet.queue.show(request_id))
    if job is None:
        raise Refused(f"request {request_id!r} is not in the queue: it was never queued, or is done")
    _print_json(job) if as_json else _out.print(fields_view(job))


@config_app.command("check")
def config_check(file: Annotated[Path, typer.Argument()], set_: SetOption = None) -> None:
    """Check a file without starting anything."""
    parsed = load_config(file, set_)
    check_engine_args(parsed)
    shape = f"{parsed.workers.prefill.replicas}P{parsed.workers.decode.replicas}D"
    _out.print(f"{file}: ok ({shape}, engine {parsed.engine}, model {parsed.model})", highlight=False, soft_wrap=True)


@config_app.command("keys")
def config_keys() -> None:
    """List every key with its type and default."""
    _out.print(keys_view(Config))


def _ask(handle: FleetHandle, what: Callable[[FleetOperator], Awaitable[T]]) -> T:
    async def connected() -> T:
        async with open_fleet(handle) as fleet:
            return await what(fleet)

    return asyncio.run(connected())


async def _repeat(fleet: FleetOperator, show: Callable[[dict[str, Any]], None]) -> None:
    while True:
        show(await fleet.status())
        await asyncio.sleep(_WATCH_EVERY_S)


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def _remove_killed(folder: RunFolder) -> None:
    left = folder.claim()
    end_processes(left)
    remove_shared_memory(folder.shared_memory)
    folder.remove()
    _out.print(f"cleaned up after the launcher of {folder.namespace!r}, which was killed")


def _fail(line: str) -> NoReturn:
    print(f"orchestrator: {' '.join(line.split())}", file=sys.stderr, flush=True)
    sys.exit(2)


app.command("simulate")(simulate_command)
app.command("profile")(profile_command)
app.command("compare")(compare_command)


def main() -> None:
    """The console script `orchestrator`."""
    try:
        app()
    except ConfigError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        sys.exit(1)


if __name__ == "__main__":
    main()
