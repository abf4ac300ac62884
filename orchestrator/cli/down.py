"""`orchestrator down`: ends the fleet that runs here, or cleans up after a launcher that was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import typer

from orchestrator.cli.handle import OUT, JsonOption, WholeFleetOption, namespace_here, say
from orchestrator.config.settings import Refused
from orchestrator.launch.host.leftovers import end_processes, remove_shared_memory
from orchestrator.launch.host.run_folder import OtherRelease, RunFolder, abandoned_namespaces, held_namespaces
from orchestrator.process.parent import has_ended, local_pid

_KILL_AFTER_S = 60.0
_EXIT_AFTER_S = 5.0  # how long the interpreter may run on after the fleet has ended
app = typer.Typer()


@app.command()
def down(namespace: WholeFleetOption = None, as_json: JsonOption = False) -> None:
    if namespace is None and not held_namespaces():
        abandoned = abandoned_namespaces()
        if not abandoned:
            raise Refused("no fleet runs here")
        for name in abandoned:
            _remove_killed(RunFolder(name), as_json)
        return
    namespace = namespace_here(namespace)
    folder = RunFolder(namespace)
    launcher = folder.launcher()
    if not folder.is_held:
        if launcher is None:
            raise Refused(f"no fleet runs in namespace {namespace!r}")
        _remove_killed(folder, as_json)
        return
    if launcher is None or has_ended(launcher):  # not written yet: what is there is of one before
        raise Refused(f"the fleet in namespace {namespace!r} is just starting or ending; try again")
    pid = local_pid(launcher)
    if pid is None:
        raise Refused(f"the fleet in namespace {namespace!r} runs in another container: run `orchestrator down` there")
    _send(launcher, signal.SIGTERM)
    _send(launcher, signal.SIGCONT)  # one that was stopped (Ctrl-Z) would end by SIGKILL only
    if not folder.wait_until_free(within_s := _ends_within_s(folder)):
        if not as_json:
            OUT.print(f"process {pid} did not end within {within_s:g} s; killing it")
        _send(launcher, signal.SIGKILL)
        folder.wait_until_free(_KILL_AFTER_S)
        _remove_killed(folder, as_json)
        return
    deadline = time.monotonic() + _EXIT_AFTER_S
    while not has_ended(launcher) and time.monotonic() < deadline:
        time.sleep(0.01)
    say({"namespace": namespace, "ended": "in order"}, f"fleet {namespace!r} ended", as_json)


def _ends_within_s(folder: RunFolder) -> float:
    """In it a launcher ends in order: its frontends first, then its workers."""
    with contextlib.suppress(OtherRelease):
        if (config := folder.config()) is not None:
            return _KILL_AFTER_S + 2 * config.launcher.stop_timeout_s
    return _KILL_AFTER_S


def _send(identity: str, number: signal.Signals) -> None:
    """Its pid may be another's once it has ended."""
    if (pid := local_pid(identity)) is not None and not has_ended(identity):
        with contextlib.suppress(ProcessLookupError):  # just now
            os.kill(pid, number)


def _remove_killed(folder: RunFolder, as_json: bool) -> None:
    config, why = None, None
    try:
        config = folder.config()
    except OtherRelease as error:
        why = f"what it ran on a Ray cluster, if on one, runs on: {error}"
    left = folder.claim()
    end_processes(left)
    remove_shared_memory(folder.shared_memory)
    if config is not None and config.launcher.kind == "ray":
        from orchestrator.launch.ray.cluster import end_fleet

        end_fleet(config, config.launcher.stop_timeout_s)
    folder.remove()
    told = {"namespace": folder.namespace, "ended": "was killed"} | ({"why": why} if why else {})
    said = f"cleaned up after the launcher of {folder.namespace!r}, which was killed"
    say(told, f"{said}; {why}" if why else said, as_json)
