"""Programs that are started with `python -m`: what help and wrong use of each look like."""

import subprocess
import sys
from pathlib import Path

import pytest
from support_here import as_main, run_here

SERVER = pytest.param("orchestrator.frontend.server", marks=pytest.mark.vllm)
PROGRAMS = [
    "orchestrator.cli.main",
    "orchestrator.config.demo.convert",
    "orchestrator.config.model",
    "workers.main",
    "workers.vllm_engine.kv_probe",
    SERVER,
]

pytestmark = pytest.mark.slow


def ran(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Here, where what they import has been imported."""
    return run_here(as_main(module, *arguments))


@pytest.mark.parametrize("module", PROGRAMS)
def test_help_is_printed_and_wrong_use_is_one_line(module: str) -> None:
    told = ran(module, "--help")
    assert told.returncode == 0 and "sage:" in told.stdout and told.stderr == ""
    wrong = ran(module, "--nonsense")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1), wrong.stderr


@pytest.mark.parametrize("module", ["orchestrator.config.demo.convert", "workers.main", SERVER])
def test_a_program_that_needs_arguments_names_them(module: str) -> None:
    bare = ran(module)
    assert (bare.returncode, bare.stdout, bare.stderr.count("\n")) == (2, "", 1)
    assert "required" in bare.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["encode"], "invalid choice: 'encode'"),
        (["prefill"], "--model: required"),
        (["prefill", "--model", "demo", "--kv-port", "x"], "--kv-port: expected a port from 0 to 65535, got 'x'"),
    ],
)
def test_what_is_wrong_with_a_workers_command_line_is_named(arguments: list[str], told: str) -> None:
    wrong = ran("workers.main", *arguments)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1) and told in wrong.stderr
    assert ran("workers.main", "decode", "--help").stdout.startswith("usage: decode-worker")


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", ">&- 2>&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("opened_by", ["open_standard_streams", "CommandLine"])
def test_no_file_gets_the_descriptor_of_a_closed_standard_stream(tmp_path: Path, closed: str, opened_by: str) -> None:
    """What C libraries print would go there: into the lock of a fleet, say, or to a peer."""
    code = f"""
import os, sys
from orchestrator.process.command_line import {opened_by}
{opened_by}()
with open(sys.argv[1], "w") as file:
    streams = [os.path.realpath(f"/proc/self/fd/{{number}}") for number in range(3)]
    print(file.fileno() > 2, sys.argv[1] in streams, None in (sys.stdin, sys.stdout, sys.stderr), file=file)
"""
    said = tmp_path / "said"
    subprocess.run(["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", code, str(said)], check=True)
    assert said.read_text() == "True False False\n"
