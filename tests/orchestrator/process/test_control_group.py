"""The limits of a container, from files as each version of Linux control groups has them."""

import math
from pathlib import Path

import pytest

from orchestrator.process import control_group
from orchestrator.process.control_group import cpu_limit, memory_limit


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


def test_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch):
    whole = control_group.find_memory()
    monkeypatch.setattr(control_group, "memory_limit", lambda: 1 << 30)
    assert control_group.find_memory() == 1 << 30 < whole
