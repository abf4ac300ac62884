"""What one file's tests leave to the next file's in the same process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TITLE = """
import os
import setproctitle

def test_title():
    if not (child := os.fork()):
        setproctitle.setproctitle("VLLM::Worker")
        os._exit(open("/proc/self/cmdline").read().startswith("VLLM::Worker"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
"""


def test_engines_can_be_given_titles_after_another_file(tmp_path: Path) -> None:
    """By which tests find their ranks. `setproctitle` finds the place of a title by the first variable, where it was
    when the process began: one that is set again, if only to what it was, moves."""
    for name in ("test_first.py", "test_second.py"):
        (tmp_path / name).write_text(_TITLE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
