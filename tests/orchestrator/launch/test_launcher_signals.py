"""A launcher under nohup, one that is stopped, and one that is told to end once more while it ends."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_fleet import RunningFleet, running_fleet

from orchestrator.config.settings import load_config
from orchestrator.launch import launcher
from orchestrator.launch.console import Console
from orchestrator.launch.host.run_folder import RunFolder
from orchestrator.process.parent import EXIT_AGAIN

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
UNREAD_REQUESTS = 250  # their lines in the log are more than a pipe holds by default


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a program
    try:
        one_each = ("workers.prefill.replicas=1", "workers.decode.replicas=1")
        with running_fleet("sim-2p2d.yaml", *one_each) as running:
            yield running
    finally:
        signal.signal(signal.SIGHUP, before)


def ask(fleet: RunningFleet) -> None:
    body = {"model": "demo", "prompt": "Say it", "max_tokens": 2}
    assert fleet.http.post("/v1/completions", json=body, timeout=20).status_code == 200


def test_fleet_under_nohup_survives_terminal(fleet: RunningFleet) -> None:
    fleet.process.send_signal(signal.SIGHUP)
    time.sleep(1.0)  # in which it would begin to stop
    ask(fleet)
    assert fleet.process.poll() is None and not any("Stopping" in line for line in fleet.log)


def test_stopped_launcher_stops_no_process(fleet: RunningFleet) -> None:
    """By Ctrl-Z, say. It reads nothing then of what the processes log."""
    fleet.process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(UNREAD_REQUESTS):
            ask(fleet)
    finally:
        fleet.process.send_signal(signal.SIGCONT)
    fleet.until(lambda: len(fleet.request_lines()) > UNREAD_REQUESTS, "the lines are in the log")


def test_a_signal_while_redis_does_not_answer_ends_it() -> None:
    namespace = f"early-{uuid.uuid4().hex[:6]}"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        sets = (f"namespace={namespace}", "frontend.port=0", f"redis.url={url}", "redis.timeout_s=600")
        command = [sys.executable, "-m", "orchestrator.cli.main", "up", "configs/sim-2p2d.yaml"]
        command += [part for each in sets for part in ("--set", each)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
            connection, _ = silent.accept()
            with connection:
                started.send_signal(signal.SIGINT)
                out, _ = started.communicate(timeout=60)
    assert started.returncode == 0 and "Stopping" in out, out
    assert not RunFolder(namespace).path.exists()


def test_a_signal_while_it_cleans_up_leaves_nothing_behind() -> None:
    namespace = f"twice-{uuid.uuid4().hex[:6]}"
    program = (
        "import asyncio, os, signal\n"
        "from orchestrator.cli.main import main\n"
        "from orchestrator.launch.host.run_folder import RunFolder\n"
        "run, remove = asyncio.run, RunFolder.remove\n"
        "def again():\n"
        "    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): os.kill(os.getpid(), number)\n"
        "def then_again(main):\n"
        "    try: run(main)\n"
        "    finally: again()\n"
        "asyncio.run, RunFolder.remove = then_again, lambda folder: (again(), remove(folder))\n"
        "main()"
    )
    sets = (f"namespace={namespace}", "frontend.port=0", "redis.url=redis://127.0.0.1:1")
    command = [sys.executable, "-c", program, "up", "configs/sim-2p2d.yaml", *(p for s in sets for p in ("--set", s))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_AGAIN and "cannot be used" in done.stderr
    assert not RunFolder(namespace).path.exists()


def test_a_signal_whose_exception_was_lost_stops_it_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    class Callback:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def model(*_: object) -> str:
        Callback()
        return "demo"

    monkeypatch.setattr(launcher, "locate_model", model)
    monkeypatch.setattr(launcher, "_run", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    console, said = Console(), []
    monkeypatch.setattr(console, "say", said.append)
    config = load_config(ROOT / "configs/sim-2p2d.yaml", ["namespace=lost", "frontend.port=0"])
    launcher.launch({"": config}, {}, console)
    assert said[-1] == "Stopped before anything was started"


def test_leftovers_are_ended_before_a_signal_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder, which names them, is removed after a signal."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    heard: list[str] = []

    def end_processes(left: object) -> list[str]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # a signal that is not held back interrupts here
        heard.append("ended")
        return []

    monkeypatch.setattr(launcher, "end_processes", end_processes)
    config = load_config(ROOT / "configs/sim-2p2d.yaml", ["namespace=a", "frontend.port=0"])
    monkeypatch.setattr(launcher, "_run", lambda *_: pytest.fail("it was started"))
    launcher.launch({"": config}, {}, Console())
    assert heard == ["ended"]


def test_signals_are_heard_though_ray_sets_handlers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        ROOT / "configs" / "sim-2p2d.yaml", overrides=["launcher.kind=ray", "redis.url=redis://10.0.0.1"]
    )

    def connect(config: object) -> str:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        return "here"

    monkeypatch.setattr("orchestrator.launch.ray.cluster.connect", connect)
    monkeypatch.setattr("orchestrator.launch.ray.cluster.disconnect", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    with launcher.Signals() as signals, launcher._connected(config, Console(), signals):
        signals.ignore()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.came
    assert signal.getsignal(signal.SIGTERM) is before
