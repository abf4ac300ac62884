"""No process outlives its parent: real grandchildren, whose parent is killed."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support_wait import DEADLINE_S

from orchestrator.process.parent import (
    ALIVE,
    PARENT,
    ending_signals,
    exit_reason_in,
    has_ended,
    identity_of,
    own_identity,
    report_exit,
)

ROOT = Path(__file__).parents[3]

# Each prints the child's pid once it is set up, and never ends by itself.
CHILD = """
import os, signal, sys, time
from orchestrator.process.parent import die_with_parent
if sys.argv[2:]:
    signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
die_with_parent(float(sys.argv[1]))
print(os.getpid(), flush=True)
while True:
    time.sleep(60)
"""
PARENT_OF_PYTHON = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}, *sys.argv[1:]])
time.sleep(60)
"""
PARENT_OF_ANY = """
import functools, os, subprocess, time
from orchestrator.process.parent import kill_with
child = subprocess.Popen(["sleep", "60"], preexec_fn=functools.partial(kill_with, os.getpid()))
print(child.pid, flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("code", "arguments", "told"),
    [
        (PARENT_OF_PYTHON, ["0"], 0),
        (PARENT_OF_PYTHON, ["5"], 0),
        (PARENT_OF_PYTHON, ["0.2", "stubborn"], 2),
        (PARENT_OF_ANY, [], 0),
    ],
    ids=["at once", "in order", "stubborn", "any program"],
)
def test_ends_with_its_parent(code: str, arguments: list[str], told: int) -> None:
    parent = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + DEADLINE_S
    while alive(pid):
        assert time.monotonic() < deadline, "it outlived its parent"
        time.sleep(0.02)
    assert parent.stdout.read() == "told\n" * told  # end of file: nobody else holds the pipe


# The launcher of a container: process 1 of its namespace of processes, and so the parent of the rest.
FIRST_PROCESS = f"""
import os, subprocess, sys, time
assert os.getpid() == 1
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, "0"], stdout=subprocess.PIPE, env={{**os.environ, **ENV}})
child.stdout.readline()
time.sleep(1.5)
print(child.poll(), flush=True)
"""


@pytest.mark.parametrize("told", [True, False], ids=["told", "asks"])
def test_the_first_process_of_a_container_is_a_parent_like_any_other(told: bool) -> None:
    in_container = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*in_container, "true"], capture_output=True).returncode:
        pytest.skip("this machine gives nobody namespaces of their own")
    code = f"ENV = {{'PD_PARENT': '1'}} if {told} else {{}}\n{FIRST_PROCESS}"
    done = subprocess.run(
        [*in_container, sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S
    )
    assert done.stdout == "None\n", done.stderr


def test_parent_that_died_earlier_is_noticed() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    child = [sys.executable, "-c", CHILD, "0"]
    done = subprocess.run(child, env={**os.environ, "PD_PARENT": str(gone.pid)}, cwd=ROOT, timeout=DEADLINE_S)
    assert done.returncode == -signal.SIGKILL


def test_ended_process_is_distinguished():
    own = own_identity()
    place, pid, ticks = own.split("/")
    assert not has_ended(own)
    assert has_ended(f"{place}/{pid}/{int(ticks) - 1}"), "another process has its number now"
    assert not has_ended(f"another-machine/{pid}/{int(ticks) - 1}") and not has_ended("what a person typed")


@pytest.mark.parametrize("final", [True, False])
def test_why_it_ends_is_told_to_a_parent_alone(
    final: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(PARENT, raising=False)
    report_exit("worker", "no\nmodel", final)
    assert capsys.readouterr().err == "worker: no model\n"
    monkeypatch.setenv(PARENT, "1")
    report_exit("worker", "no\nmodel", final)
    shown, told = capsys.readouterr().err.splitlines()
    assert exit_reason_in(shown) is None and exit_reason_in(told) == ("no model", final)
    sys.stderr.write("a line of an engine's that is not compl")
    report_exit("", "no model", final)
    assert capsys.readouterr().err.splitlines()[1:] == [told], "its log has shown it"


def test_who_tells_a_parent_that_has_gone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    nobody_reads = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stderr", nobody_reads)
    report_exit("worker", "no model", final=True)
    monkeypatch.undo()
    with contextlib.suppress(BrokenPipeError):  # it has that line still
        nobody_reads.close()


def test_what_had_ended_before_it_was_asked_who_it_is_has_ended() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert has_ended(identity_of(gone.pid))


def test_nothing_has_ended_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    place, pid, ticks = own_identity().split("/")

    def read_text(path: Path, **_: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", read_text)
    assert not has_ended(f"{place}/{pid}/{int(ticks) - 1}")


TELLS_WITHOUT_FILES = """
import os, resource
from orchestrator.process.parent import die_with_parent, tell_alive
for _ in range(2):  # as one that is forked from a process that has done so
    die_with_parent()
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
try:
    while True:
        os.dup(0)
except OSError:
    tell_alive()
"""


def test_one_that_has_too_many_files_open_still_tells_that_it_lives() -> None:
    """It cannot connect to Redis any more either, and would be killed with all that it serves."""
    told = subprocess.run(
        [sys.executable, "-c", TELLS_WITHOUT_FILES],
        capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, env={**os.environ, PARENT: str(os.getpid())},
    )  # fmt: skip
    assert told.returncode == 0 and told.stderr == f"\n{ALIVE}\n"


def test_a_terminal_that_is_closed_ends_a_process_in_order_but_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert set(ending_signals()) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a program
        assert set(ending_signals()) == {signal.SIGINT, signal.SIGTERM}
    finally:
        signal.signal(signal.SIGHUP, before)
