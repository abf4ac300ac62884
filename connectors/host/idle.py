"""Copies within this machine's memory that take only time for which no core has anything else to do (Linux, glibc).

A thread of such a priority must run no Python: where all cores are busy it would wait for one with the interpreter's
lock in its hands, and so would every other thread of the process. Nor can it be given back its priority without a
privilege. So the copies are made by the thread of glibc's asynchronous I/O, which writes to a file in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

_NAME, _FOREVER_S = "pd-host-idle", 2**30
_AT_ONCE = 512  # writes in one call: it walks its list for each of them
_LIO_WAIT, _LIO_WRITE, _SIGEV_NONE = 0, 1, 1
# struct aiocb of aio.h, with 64 bits.
_CONTROL: np.dtype[np.void] = np.dtype(
    {
        "names": ["file", "operation", "buffer", "size", "notify", "written", "offset"],
        "formats": ["i4", "i4", "u8", "u8", "i4", "i8", "i8"],
        "offsets": [0, 4, 16, 24, 44, 120, 128],
        "itemsize": 168,
    }
)


class _Settings(ctypes.Structure):
    """struct aioinit."""

    _fields_ = [(name, ctypes.c_int) for name in ("threads", "num", "locks", "usedba", "debug", "users", "idle_s", "_")]


class IdleFile:
    """Memory of so many bytes, as a file in memory."""

    def __init__(self, size: int, begin: Callable[[], None]) -> None:
        """`begin`: called on the thread from which the one that writes inherits what it may use. Raises OSError where
        the system has no such memory or thread, or refuses it."""
        self._rt = ctypes.CDLL("librt.so.1", use_errno=True)  # of newer systems' it leads to libc, which has all
        self._file = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self._file)
        os.posix_fallocate(self._file, 0, size)  # an error now, not a signal later
        self.memory = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.int8)
        with ThreadPoolExecutor(1) as starting:
            starting.submit(self._start, begin).result()

    def _start(self, begin: Callable[[], None]) -> None:
        """The first thread that writes starts glibc's, which inherits its name. That takes over the priority of whoever
        writes only when it changes, so what is set from here on stays."""
        begin()
        name = Path("/proc/thread-self/comm")
        name.write_text(_NAME)
        settings = _Settings(threads=1, num=1024, idle_s=_FOREVER_S)
        self._rt.aio_init(ctypes.byref(settings))
        self.write([self.memory.data_ptr()], [0], [1])
        name.write_text("pd-host-start")
        there = [task for task in Path("/proc/self/task").iterdir() if _name(task) == _NAME]
        if not there:
            raise OSError("no thread of glibc's was started")
        for task in there:
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))

    def write(self, addresses: Sequence[int] | np.ndarray, offsets: Sequence[int] | np.ndarray, sizes: object) -> None:
        """Returns when these bytes from anywhere in this process's memory are there. From then on no signal reaches the
        thread that calls it. Raises OSError."""
        controls: np.ndarray = np.zeros(len(addresses), _CONTROL)
        controls["file"], controls["operation"], controls["notify"] = self._file, _LIO_WRITE, _SIGEV_NONE
        controls["buffer"], controls["offset"], controls["size"] = addresses, offsets, sizes
        each: np.ndarray = controls.ctypes.data + np.arange(len(controls), dtype=np.uint64) * _CONTROL.itemsize
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # one would end the wait
        for some in (each[start : start + _AT_ONCE] for start in range(0, len(each), _AT_ONCE)):
            if self._rt.lio_listio(_LIO_WAIT, ctypes.c_void_p(some.ctypes.data), len(some), None):
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
        if (short := controls["written"] != controls["size"]).any():
            raise OSError(f"{int(short.sum())} of {len(controls)} copies to host memory ended early")


def _name(task: Path) -> str | None:
    with contextlib.suppress(OSError):  # it has ended
        return (task / "comm").read_text().strip()
    return None
