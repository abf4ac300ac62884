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

from orchestrator.launch.process import started_ticks
from orchestrator.launch.run_folder import StartedProcess

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


def remove_shared_memory(newer_than: float, folder: Path = _SHARED_MEMORY) -> list[str]:
    """Remove engines' files of this user that are newer than `newer_than` (unix seconds) and that no process uses.

    Returns their names. A running engine maps its files, so it keeps them.
    """
    ours = []
    for pattern in _PATTERNS:
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_uid == os.getuid() and status.st_ctime >= newer_than:
                    ours.append((path, status.st_ino))
    if not ours:
        return []
    used = _in_use(folder)
    removed = []
    for path, inode in ours:
        if inode not in used:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def _in_use(folder: Path) -> set[int]:
    """Inodes of the folder's files that a process maps or holds open.

    Not names: a semaphore is mapped by the one who made it under the name that it had before it was complete.
    """
    prefix = f"{folder}/"
    used: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for line in (process / "maps").read_text().splitlines():
                if prefix in line:
                    used.add(int(line.split(maxsplit=5)[4]))  # address, rights, offset, device, inode, name
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor).startswith(prefix):
                        used.add(descriptor.stat().st_ino)
    return used
