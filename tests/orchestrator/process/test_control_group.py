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


SLICE = {"a.slice/cpu.max": "200000 100000", "a.slice/b.service/cpu.max": "max 100000"}
SLICE |= {"a.slice/memory.max": "max", "a.slice/b.service/memory.max": "1000000"}
DOCKER = "5:memory:/docker/0a1b\n4:cpu,cpuacct:/docker/0a1b\n1:name=systemd:/docker/0a1b\n"
VERSION_1 = {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}
VERSION_1 |= {"memory/memory.limit_in_bytes": "2147483648"}
NONE = (math.inf, math.inf)


@pytest.mark.parametrize(
    ("membership", "files", "found"),
    [
        ("0::/\n", {"cpu.max": "150000 100000", "memory.max": str(4 << 30)}, (1.5, 4 << 30)),
        ("0::/a.slice/b.service\n", SLICE, (2.0, 1_000_000)),  # each has limits, and the least counts
        (DOCKER, VERSION_1, (4.0, 2 << 30)),  # told its path on the host
        ("0::/\n", {"cpu.max": "max 100000", "memory.max": "max"}, NONE),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, NONE),
        ("0::/user.slice\n", {}, NONE),
        ("not what Linux writes\n", {"cpu.max": "1 1"}, NONE),
        ("0::/\n", {"cpu.max": "a lot", "memory.max": ""}, NONE),
        ("0::/\n", {"cpu.max": "100000 0"}, NONE),
    ],
)
def test_limits(tmp_path: Path, membership: str, files: dict[str, str], found: tuple[float, float]):
    assert limits(tmp_path, membership, files) == found


def test_without_control_groups(tmp_path: Path):
    assert cpu_limit(tmp_path, tmp_path / "none") == memory_limit(tmp_path, tmp_path / "none") == math.inf


def test_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch):
    whole = control_group.find_memory()
    monkeypatch.setattr(control_group, "memory_limit", lambda: 1 << 30)
    assert control_group.find_memory() == 1 << 30 < whole
