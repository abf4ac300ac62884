"""The limits of a container, from files as each version of Linux control groups has them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from orchestrator.launch.host import machine
from orchestrator.launch.host.control_group import cpu_limit, memory_limit


def limits(folder: Path, membership: str, files: dict[str, str]) -> tuple[float, float]:
    """The limits of a process with this /proc/self/cgroup, where these files are."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    own = folder / "self"
    own.write_text(membership)
    return cpu_limit(folder, own), memory_limit(folder, own)


def test_container_with_version_2(tmp_path: Path):
    found = limits(tmp_path, "0::/\n", {"cpu.max": "150000 100000", "memory.max": str(4 << 30)})
    assert found == (1.5, 4 << 30)


def test_outer_groups_limit_too(tmp_path: Path):
    """A service under a slice: each has limits, and the least counts."""
    files = {
        "a.slice/cpu.max": "200000 100000",
        "a.slice/b.service/cpu.max": "max 100000",
        "a.slice/memory.max": "max",
        "a.slice/b.service/memory.max": "1000000",
    }
    assert limits(tmp_path, "0::/a.slice/b.service\n", files) == (2.0, 1_000_000)


def test_container_with_version_1_that_is_told_its_path_on_the_host(tmp_path: Path):
    files = {
        "cpu/cpu.cfs_quota_us": "400000",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "2147483648",
    }
    membership = "5:memory:/docker/0a1b\n4:cpu,cpuacct:/docker/0a1b\n1:name=systemd:/docker/0a1b\n"
    assert limits(tmp_path, membership, files) == (4.0, 2 << 30)


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/\n", {"cpu.max": "max 100000", "memory.max": "max"}),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}),
        ("0::/user.slice\n", {}),
        ("not what Linux writes\n", {"cpu.max": "1 1"}),
        ("0::/\n", {"cpu.max": "a lot", "memory.max": ""}),
        ("0::/\n", {"cpu.max": "100000 0"}),
    ],
)
def test_no_limit(tmp_path: Path, membership: str, files: dict[str, str]):
    assert limits(tmp_path, membership, files) == (math.inf, math.inf)


def test_without_control_groups(tmp_path: Path):
    assert cpu_limit(tmp_path, tmp_path / "none") == memory_limit(tmp_path, tmp_path / "none") == math.inf


@pytest.mark.parametrize(("limit", "count"), [(math.inf, 8), (64.0, 8), (2.5, 2), (0.5, 1)])
def test_a_container_computes_on_neighbouring_cores_within_its_limit(monkeypatch, limit: float, count: int):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8, 16)))
    monkeypatch.setattr(machine, "cpu_limit", lambda: limit)
    beginnings = set()
    for name in (f"container-{number}" for number in range(50)):
        monkeypatch.setattr(machine.socket, "gethostname", lambda name=name: name)
        cores = machine.find_cores()
        assert cores == list(range(cores[0], cores[0] + count)) and 8 <= cores[0] and cores[-1] < 16
        beginnings.add(cores[0])
    assert len(beginnings) == 8 - count + 1, "containers beside each other choose others"


def test_memory_is_that_of_the_container(monkeypatch):
    whole = machine.find_memory()
    monkeypatch.setattr(machine, "memory_limit", lambda: 1 << 30)
    assert machine.find_memory() == 1 << 30 < whole
