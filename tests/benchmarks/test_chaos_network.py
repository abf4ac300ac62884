"""`benchmarks.chaos.network`: what a killed run has left is not in the way of the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos.network import Network

SUBNET = "10.215"  # other tests may use other ones meanwhile
MAKES_ONE_AND_IS_KILLED = f"""
import os, signal
from benchmarks.chaos.network import Network
Network(["prefill"], subnet="{SUBNET}")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_network_of_killed_process_is_deleted() -> None:
    try:
        Network(["prefill"], subnet=SUBNET).close()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    killed = subprocess.Popen([sys.executable, "-c", MAKES_ONE_AND_IS_KILLED], cwd=Path(__file__).parents[2])
    assert killed.wait(60) < 0
    assert f"pd{killed.pid}-" in _namespaces()

    network = Network(["prefill"], subnet=SUBNET)
    try:
        assert f"pd{killed.pid}-" not in _namespaces()
    finally:
        network.close()


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
