"""`up --detach` and `down` beside what another launcher of this namespace has left, or is about to write."""

import errno
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_cli import SIM, orchestrator, refused
from support_wait import DEADLINE_S

from orchestrator.cli import down, up
from orchestrator.config.settings import parse_config
from orchestrator.launch.fleet_processes import StartFailed, StartLater
from orchestrator.launch.host.run_folder import Ready, RunFolder, StartedProcess
from orchestrator.process.parent import EXIT_AGAIN, identity_of

SAYS_NOTHING_FOR_LONG = "import sys, time; time.sleep(0.5); print('orchestrator: no luck'); sys.exit(2)"


@pytest.fixture(autouse=True)
def own_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def held_by(launcher: str) -> RunFolder:
    folder = RunFolder("a")
    folder.claim()
    (folder.path / "launcher").write_text(f"{launcher}\n")
    return folder


def test_the_fleet_of_a_killed_launcher_is_not_taken_for_the_one_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = RunFolder("a")
    killed.claim()
    killed.note_ready(Ready("http://127.0.0.1:1", "demo", "1P1D"))
    assert killed._lock is not None
    killed._lock.close()  # as the kernel does when it ends
    assert not killed.is_held and killed.ready() is not None

    def popen(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", SAYS_NOTHING_FOR_LONG], stdout=subprocess.PIPE)

    monkeypatch.setattr(up, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=0, PIPE=0, STDOUT=0))
    assert refused("up", SIM, "--set", "namespace=a", "--detach") == "orchestrator: no luck"


@pytest.mark.parametrize(("kind", "code"), [(StartLater, EXIT_AGAIN), (StartFailed, 2)])
def test_a_start_that_may_succeed_the_next_time_is_told_from_one_that_cannot(
    monkeypatch: pytest.MonkeyPatch, kind: type[StartFailed], code: int
) -> None:
    def launch(*_: object) -> None:
        raise kind("worker-0 did not start")

    monkeypatch.setattr(up, "launch", launch)
    done = orchestrator("up", SIM, "--set", "namespace=a")
    assert done.returncode == code and done.stderr.endswith("orchestrator: worker-0 did not start\n")


BECOMES_READY_ON_A_FULL_DISK = """
import signal
from types import SimpleNamespace
from orchestrator.config.settings import parse_config
from orchestrator.launch.announcement import announce
from orchestrator.launch.console import Console
from orchestrator.types import DesiredRatio
fleet = SimpleNamespace(config=parse_config({"model": "demo"}), desired=DesiredRatio(1, 1), url="http://127.0.0.1:1")
announce({"": fleet}, "CPU", SimpleNamespace(note_ready=lambda ready: None), Console())
signal.alarm(30)
signal.pause()
"""


def test_up_returns_once_the_fleet_is_ready_though_the_disk_has_no_room_for_a_file(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    started = list[subprocess.Popen[bytes]]()

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", BECOMES_READY_ON_A_FULL_DISK], **options))
        return started[0]

    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT")}
    monkeypatch.setattr(up, "subprocess", SimpleNamespace(Popen=popen, **names))
    up.start_detached("a", [], as_json=True)
    said = json.loads(capfd.readouterr().out)
    assert (said["url"], said["pid"]) == ("http://127.0.0.1:1", started[0].pid)
    started[0].kill()
    started[0].wait()


def test_down_ends_no_process_that_has_the_pid_of_a_launcher_before(other: subprocess.Popen[bytes]) -> None:
    """A launcher has the folder, and has not written yet which process it is."""
    place, pid, ticks = identity_of(other.pid).split("/")
    folder = held_by(f"{place}/{pid}/{int(ticks) - 1}")
    assert "just starting or ending; try again" in refused("down", "--namespace", "a")
    assert other.poll() is None
    folder.remove()


def test_down_waits_for_a_launcher_that_has_just_ended(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = held_by(identity_of(other.pid))

    def ended(pid: int, number: int) -> None:
        other.terminate()
        other.wait()
        folder.remove()
        raise ProcessLookupError(errno.ESRCH, "No such process")

    monkeypatch.setattr(down, "os", SimpleNamespace(kill=ended))
    done = orchestrator("down", "--namespace", "a")
    assert done.returncode == 0 and "ended" in done.stdout, done.stderr


def test_down_ends_a_launcher_that_was_stopped_in_order(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = held_by(identity_of(other.pid))
    other.send_signal(signal.SIGSTOP)

    def wait_until_free(_: RunFolder, timeout_s: float) -> bool:
        other.wait(DEADLINE_S)
        folder.remove()
        return True

    monkeypatch.setattr(RunFolder, "wait_until_free", wait_until_free)
    assert orchestrator("down", "--namespace", "a").returncode == 0
    assert other.returncode == -signal.SIGTERM


@pytest.mark.parametrize("stop_timeout_s", [0.5, 300.0])
def test_down_gives_a_launcher_the_time_that_its_processes_have(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, stop_timeout_s: float
) -> None:
    """Frontends end first, then workers."""
    folder = held_by(identity_of(other.pid))
    folder.write_config(parse_config({"model": "m", "launcher": {"stop_timeout_s": stop_timeout_s}}))
    waited: list[float] = []

    def wait_until_free(_: RunFolder, timeout_s: float) -> bool:
        waited.append(timeout_s)
        folder.remove()
        return True

    monkeypatch.setattr(RunFolder, "wait_until_free", wait_until_free)
    assert orchestrator("down", "--namespace", "a").returncode == 0
    assert waited[0] > 2 * stop_timeout_s and waited[0] > 30


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_down_ends_what_a_killed_launcher_of_another_release_has_left(options: list[str]) -> None:
    """Its configuration may have keys that this one does not know."""
    folder = RunFolder("a")
    folder.claim()
    folder.write_config(parse_config({"model": "m", "namespace": "a"}))
    config = folder.path / "config.yaml"
    config.write_text(config.read_text().replace('"model"', '"of_then": 1, "model"', 1))
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as left:
        folder.note_started([StartedProcess("worker-0", identity_of(left.pid))])
        assert folder._lock is not None
        folder._lock.close()  # as the kernel does when it ends
        done = orchestrator("down", "--namespace", "a", *options)
        assert left.wait(10) == -signal.SIGTERM
    assert done.returncode == 0 and not folder.path.exists(), done.stderr
    assert "written by another release: of_then: unknown key" in " ".join(done.stdout.split())
