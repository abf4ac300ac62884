"""What a container may use of this machine: CPU time and memory, as its control group says (Linux, versions 1 and 2).

Neither shows in the number of cores or in the size of the memory, which are the machine's.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_NO_LIMIT = ("max", "-1")  # version 2, version 1


def cpu_limit(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> float:
    """Cores' worth of CPU time that this process may use (cgroups(7): cpu.max, cpu.cfs_quota_us), or infinity."""
    return min(map(_cores, _groups("cpu", root, membership)), default=math.inf)


def memory_limit(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> float:
    """Bytes that this process and its group may use (memory.max, memory.limit_in_bytes), or infinity."""
    return min(map(_bytes, _groups("memory", root, membership)), default=math.inf)


def find_memory() -> int:
    """The bytes of memory that this machine has, or that its container may use of it."""
    return int(min(memory_limit(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The groups that limit this process, from its own outwards. A container without a namespace for control groups is
    told its path on the host, which it cannot see: its own group is then at the root."""
    with contextlib.suppress(OSError, ValueError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            outermost = root / controller if controllers else root
            inside = outermost / path.strip("/")
            yield inside
            yield from inside.parents[: len(inside.parts) - len(outermost.parts)]


def _cores(group: Path) -> float:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text().split()
        return math.inf if quota in _NO_LIMIT else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota = (group / "cpu.cfs_quota_us").read_text().strip()
        return math.inf if quota in _NO_LIMIT else int(quota) / int((group / "cpu.cfs_period_us").read_text())
    return math.inf


def _bytes(group: Path) -> float:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = (group / name).read_text().strip()
            return math.inf if limit in _NO_LIMIT else int(limit)
    return math.inf
