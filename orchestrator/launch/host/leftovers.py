"""Cleans up after killed processes: ends a launcher's processes, and removes shared memory that no process maps.

A launcher's children end by themselves when it dies. This is for those that could not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from orchestrator.launch.host.run_folder import StartedProcess
from orchestrator.process.parent import has_ended, local_pid

log = logging.getLogger("pd.launcher")

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - shared memory has this place
# Engines make these: Python's shared memory, POSIX semaphores, vLLM's CPU collectives, UCX and NIXL.
_PATTERNS = ("psm_*", "sem.mp-*", "vllm_*", "ucx_shm_*", "nixl_*")
_PATIENCE_S = 5.0
_POLL_S = 0.05


def end_processes(left: Iterable[StartedProcess], patience_s: float = _PATIENCE_S) -> list[str]:
    """End those that are still alive, with their process groups, by SIGTERM, then SIGKILL. Returns their names."""
    alive = [process for process in left if _runs(process)]
    names = [process.name for process in alive]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in alive:
            pid = local_pid(process.identity)
            assert pid is not None, "it runs here"
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
        deadline = time.monotonic() + patience_s
        while alive and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            alive = [process for process in alive if _runs(process)]
    for process in alive:
        what = "%s (%s) has not ended within %g s of SIGKILL: it may still hold memory and devices"
        log.warning(what, process.name, process.identity, patience_s)
    return names


def _runs(process: StartedProcess) -> bool:
    return local_pid(process.identity) is not None and not has_ended(process.identity)


def shared_memory_of(groups: set[int], folder: Path = _SHARED_MEMORY) -> dict[int, set[str]]:
    """The names of the engines' files that processes map or hold open now, by process group."""
    names = {_inode(path): path.name for pattern in _PATTERNS for path in folder.glob(pattern)}
    used = _in_use(folder, groups)
    return {group: {names[inode] for inode in inodes & names.keys()} for group, inodes in used.items()}


class SharedMemory:
    """Records which of the engines' files each process group was seen to use. A group's id is its leader's pid."""

    def __init__(self, folder: Path = _SHARED_MEMORY) -> None:
        self._folder = folder
        self._used: dict[int, set[str]] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*self._used.values())

    def scan(self, groups: set[int]) -> None:
        for group, names in shared_memory_of(groups, self._folder).items():
            self._used.setdefault(group, set()).update(names)

    def remove_files_of(self, group: int) -> list[str]:
        """Remove the files of a group that has ended but those that another was seen to use. Returns their names."""
        own = self._used.pop(group, set())
        return remove_shared_memory(own - self.names, self._folder)


def remove_shared_memory(names: Iterable[str], folder: Path = _SHARED_MEMORY) -> list[str]:
    """Remove those that no process uses; returns their names. Only what our processes were seen to use may be named:
    containers may share the folder, and what the processes of others map cannot be seen from here."""
    left = [path for name in sorted(names) if _inode(path := folder / name)]
    used = set[int]().union(*_in_use(folder).values()) if left else set()
    removed = []
    for path in left:
        if _inode(path) not in used:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def _inode(path: Path) -> int:
    """The inode of a file; 0 if the file is gone."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _in_use(folder: Path, groups: set[int] | None = None) -> dict[int, set[int]]:
    """The inodes of the folder's files that processes map or hold open, by process group. `groups`: only these. Not the
    names: the process that made a semaphore maps it under the name that it had before it was complete."""
    prefix = f"{folder}/"
    used: dict[int, set[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            group = os.getpgid(int(process.name))
            if groups is not None and group not in groups:
                continue
            inodes = used.setdefault(group, set())
            for line in (process / "maps").read_text(errors="replace").splitlines():  # names are any bytes
                if prefix in line:
                    inodes.add(int(line.split(maxsplit=5)[4]))  # address, rights, offset, device, inode, name
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor).startswith(prefix):
                        inodes.add(descriptor.stat().st_ino)
    return used
