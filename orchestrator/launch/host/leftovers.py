"""Ends and removes what a launcher left when it was killed: processes, and shared memory that nobody maps any more.

The launcher's children end by themselves when it dies; this is for those that could not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from orchestrator.launch.host.process import started_ticks
from orchestrator.launch.host.run_folder import StartedProcess

_SHARED_MEMORY = Path("/dev/shm")
# Engines make these: Python's shared memory, POSIX semaphores, vLLM's CPU collectives, UCX and NIXL.
_PATTERNS = ("psm_*", "sem.mp-*", "vllm_*", "ucx_shm_*", "nixl_*")
_PATIENCE_S = 5.0
_POLL_S = 0.05


def end_processes(left: Iterable[StartedProcess], patience_s: float = _PATIENCE_S) -> list[str]:
    """End those that are still alive, with their process groups, by SIGTERM, then SIGKILL. Returns their names."""
    alive = [process for process in left if started_ticks(process.pid) == process.started_ticks]
    names = [process.name for process in alive]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + patience_s
        while alive and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            alive = [process for process in alive if started_ticks(process.pid) == process.started_ticks]
    return names


def shared_memory_of(groups: set[int], folder: Path = _SHARED_MEMORY) -> set[str]:
    """Names of the engines' files that the processes of these groups map or hold open now."""
    used = _in_use(folder, groups)
    return {path.name for pattern in _PATTERNS for path in folder.glob(pattern) if _inode(path) in used}


def remove_shared_memory(names: Iterable[str], folder: Path = _SHARED_MEMORY) -> list[str]:
    """Remove these files, which were noted as our processes', where no process uses them. Returns their names.

    Only noted ones: containers may share the folder, and what theirs map cannot be seen from here.
    """
    left = [path for name in sorted(names) if _inode(path := folder / name)]
    used = _in_use(folder) if left else set()
    removed = []
    for path in left:
        if _inode(path) not in used:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def _inode(path: Path) -> int:
    """0 when it is gone."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _in_use(folder: Path, groups: set[int] | None = None) -> set[int]:
    """Inodes of the folder's files that a process, or one of these process groups, maps or holds open.

    Not names: a semaphore is mapped by the one who made it under the name that it had before it was complete.
    """
    prefix = f"{folder}/"
    used: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if groups is not None and os.getpgid(int(process.name)) not in groups:
                continue
            for line in (process / "maps").read_text().splitlines():
                if prefix in line:
                    used.add(int(line.split(maxsplit=5)[4]))  # address, rights, offset, device, inode, name
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor).startswith(prefix):
                        used.add(descriptor.stat().st_ino)
    return used
