"""Network namespaces that stand for hosts, named after the process that runs the tests. They need root."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from support_wait import DEADLINE_S

NAME = f"pd{os.getpid()}"
_MADE = re.compile(r"^pd(\d+)(?:-\w+)?$")


def _ip(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=DEADLINE_S)


def ip(command: str) -> str:
    done = _ip(command)
    if done.returncode:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
    return done.stdout


def add_hosts(*names: str) -> None:
    """Those of tests that were killed go first: they would be found in the way, or lead away what is sent here."""
    made = [(line.split()[0], _MADE.match(line.split()[0])) for line in ip("netns list").splitlines() if line.strip()]
    remove_hosts(name for name, by in made if by is not None and not Path(f"/proc/{by[1]}").exists())
    for name in names:
        ip(f"netns add {name}")


def remove_hosts(names: Iterable[str]) -> None:
    """With the processes that still run there, and the end of a link that is here."""
    for name in names:
        for pid in map(int, _ip(f"netns pids {name}").stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _ip(f"link del {name}a")
        _ip(f"netns del {name}")
