"""The command line in this process: another one for each command would cost half a second."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.main import main

SIM = str(Path(__file__).parents[1] / "configs" / "sim-2p2d.yaml")


def orchestrator(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the console script's function."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code: Any = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["orchestrator", *arguments])
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())


def refused(*arguments: str) -> str:
    """The one line on standard error."""
    done = orchestrator(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("orchestrator: "), done.stderr
    return lines[0]
