"""A command whose output nobody takes, or whose file cannot be written: one line at most, and its exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SIM = "configs/sim-2p2d.yaml"
COMMANDS = [["--help"], ["config", "keys"], ["config", "keys", "--json"], ["config", "init"], ["config", "show", SIM]]


def run(arguments: list[str], stdout: int | None, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator.cli.main", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, **more)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_closed_pipe_is_no_error(arguments: list[str]) -> None:
    """As `| head -0`."""
    reads, writes = os.pipe()
    os.close(reads)
    done = run(arguments, writes)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_full_disk_is_reported(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run(arguments, full.fileno())
    assert (done.returncode, done.stderr) == (2, "orchestrator: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_closed_stdout_is_no_error(arguments: list[str]) -> None:
    done = run(arguments, None, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "init", "{folder}/none/c.yaml"],
        ["bench", "http://127.0.0.1:1", "--json", "{folder}/none/figures.json"],
        ["bench", "http://127.0.0.1:1", "--html", "{folder}"],
        ["profile", "--url", "http://127.0.0.1:1", "--out", "{folder}/none/p.json"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_unwritable_file_is_reported_before_work(arguments: list[str], tmp_path: Path) -> None:
    done = run([argument.format(folder=tmp_path) for argument in arguments], subprocess.PIPE)
    assert done.returncode == 2 and str(tmp_path) in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
