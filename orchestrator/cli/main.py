"""The command line: the table of commands, and how every command reports a mistake.

A command's module is imported only when the command is called, since Redis, the simulator and the launcher take long to
import. Every mistake is one line on standard error and exit code 2. Imports no engine.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import importlib
import math
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core
from typer.core import TyperGroup
from typer.exceptions import Abort, TyperException

from orchestrator.config.settings import ConfigError
from orchestrator.process.command_line import open_standard_streams

# Each command's module under orchestrator.cli, and its line in the list of commands.
COMMANDS = {
    "up": ("up", "Start a fleet on this machine and run it until Ctrl-C."),
    "down": ("down", "End the fleet that runs here, and wait until it is gone."),
    "status": ("look.status", "Show workers, their KV blocks and the queue."),
    "top": ("look.status", "Show the fleet live in the terminal; keys sort, filter, change roles and drain."),
    "doctor": ("doctor.command", "Check this host, Redis and the KV paths between workers."),
    "logs": ("look.logs", "Show the output of the fleet's processes on this machine."),
    "events": ("look.logs", "Show workers that joined, left or were lost, changes of role and ratio, and retries."),
    "trace": ("look.trace", "Show how long each stage of an ended request took."),
    "scale": ("steer", "Set how many workers of each role there should be."),
    "role": ("steer", "Change a running worker's role in place; the desired ratio follows."),
    "drain": ("steer", "Let a worker finish its requests, then end it; the desired ratio follows."),
    "restart": ("rollout", "Restart workers, a few at a time, each after it has drained: no request fails."),
    "rollout": ("rollout", "Roll a new configuration out to all workers, then all frontends: no request fails."),
    "join": ("join", "Print what another host needs to run a worker of this fleet."),
    "worker": ("join", "Run one worker for a fleet that runs on another host."),
    "log-level": ("steer", "Set the log level of running processes."),
    "model": ("models.model", "List the fleet's models; add one to it while it runs, or remove one."),
    "lora": ("models.lora", "List the LoRA adapters that the fleet serves; add one while it runs, or remove one."),
    "queue": ("steer", "Show the prefill queue, or one job of it."),
    "config": ("config", "Check, show and start configuration files."),
    "simulate": ("trial.simulate", "Simulate a fleet under a load, with the router's own policies and no engines."),
    "plan": ("trial.plan", "Simulate every prefill/decode split of N workers and say which serves a load."),
    "bench": ("trial.bench", "Send load to one server, or to two in turns, and report latencies and goodput."),
    "profile": ("trial.compare", "Measure a worker's timing on a running server, for the simulator."),
    "compare": ("trial.compare", "Run part of a load on a real fleet and in the simulator, and compare."),
}


_DEMANDS = ("parser", "exists", "writable", "resolve_path", "path_type")  # options that only typer implements


class PlainValue:
    """Converts the text of an option to its type. Text, paths, choices and numbers in range are converted here: typer
    uses pydantic, even where no value is given, whose import takes longer than most commands."""

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        kind, limits = self._descriptor.annotation, self._descriptor.parameter_info
        many = param.multiple or param.nargs == -1
        if value is None:
            return () if many else None
        if kind == list[str] and many:
            return list(value)
        demands = any(getattr(limits, name) for name in _DEMANDS) or not (limits.file_okay and limits.dir_okay)
        plain = kind in (str, Path, int, float) or (isinstance(kind, type) and issubclass(kind, enum.Enum))
        if plain and not many and not demands:
            with contextlib.suppress(ValueError):
                read = kind(value)
                if isinstance(read, float) and not math.isfinite(read):
                    raise typer.BadParameter(f"expected a finite number, got {value!r}", ctx, param)
                if (limits.min is None or read >= limits.min) and (limits.max is None or read <= limits.max):
                    return read
        return _read_by_typer(self._descriptor).coerce(value, param, ctx)  # which also words the refusal


_read_by_typer: Any = typer.core.build_runtime_param
typer.core.build_runtime_param = PlainValue  # type: ignore[assignment]


class Commands(TyperGroup):
    """Lists commands without importing them; a command that is asked for is looked up in its module."""

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        name, command, rest = super().resolve_command(context, arguments)
        # Elsewhere they are two names of one option, whose last value would win.
        if name != "worker" and {"--namespace", "--model"} <= {word.partition("=")[0] for word in rest}:
            raise ConfigError("--namespace and --model: give one; a model of fleet F is --namespace F.MODEL")
        return name, command and load(command.name or ""), rest


def load(name: str) -> Any:
    """The command of this name as its module defines it: one of several there, or all that the module has."""
    where, line = COMMANDS[name]
    module = importlib.import_module(f"orchestrator.cli.{where}")
    group: Any = typer.main.get_group(module.app)
    gc.freeze()  # what was imported stays
    gc.enable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command = group.commands.get(name, group)
    command.name, command.help = name, command.help or line
    return command


app = typer.Typer(
    cls=Commands,
    help="Prefill/decode disaggregation for vLLM: a fleet of workers behind one OpenAI endpoint.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
for _name, (_, _line) in COMMANDS.items():
    app.command(_name, help=_line)(lambda: None)  # only for the list; `resolve_command` loads the command


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of  # no other command needs it, and it is slow to import

        print(f"orchestrator {version_of('pd-orchestrator')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _fail(line: str) -> NoReturn:
    print(f"orchestrator: {' '.join(line.split())}", file=sys.stderr, flush=True)
    sys.exit(2)


def _drop_output() -> None:
    """Discard what standard output did not take: at exit the interpreter would try again, and complain."""
    with contextlib.suppress(OSError):  # it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """What `orchestrator` runs. Most commands are short: to look for garbage while they import, and at their end, takes
    a quarter of their time. Ctrl-C ends the process meanwhile: an exception could be lost in an import."""
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _run()
    finally:
        gc.freeze()


def _run() -> NoReturn:
    open_standard_streams()
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()  # here, so that a full or closed output is reported
        sys.exit(code)
    except ConfigError as error:
        _fail(str(error))
    except TyperException as error:
        context = getattr(error, "ctx", None)
        wrong, command = error.format_message().rstrip("."), context.command_path if context else "orchestrator"
        _fail(f"{wrong}. See `{command} --help`.")
    except (KeyboardInterrupt, Abort):
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as error:
        _drop_output()
        _fail(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error))


if __name__ == "__main__":
    main()
