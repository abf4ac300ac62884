"""Standard error of a process of the fleet, for its log: lines that nobody takes are dropped, and counted.

The launcher reads the other end. Stopped, by Ctrl-Z say, it reads nothing, and a process that waited for it would
serve nobody. Where a terminal was stopped it is the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import sys
import time
from typing import TextIO

# A reader that is late by some hundred requests misses nothing. Linux lets a user have 64 MiB in all pipes together,
# and whoever has more gets tiny ones.
_PIPE_BYTES = 1 << 18
_PATIENCE_S = 0.25  # for a reader that is slow; once it was in vain, only until the next line


class Lossy:
    """A text file as far as logging needs one."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` must not block."""
        self._descriptor = descriptor
        self._lines_dropped = 0
        self._cut = False  # the last line that was written has no end
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, text: str) -> int:
        note = f"({self._lines_dropped} lines were not logged, since nobody took them)\n" if self._lines_dropped else ""
        data = ("\n" * self._cut + note + text).encode(errors="backslashreplace")
        left = self._write_all(data)
        if left == len(data):
            self._lines_dropped += text.count("\n")
        else:
            self._lines_dropped, self._cut = 0, left > 0
        return len(text)

    def flush(self) -> None:
        """What was written is out."""

    def _write_all(self, data: bytes) -> int:
        """Returns how many bytes are left."""
        deadline = time.monotonic() + (0.0 if self._lines_dropped or self._cut else _PATIENCE_S)
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                if (left_s := deadline - time.monotonic()) <= 0:
                    break
                self._poll.poll(left_s * 1e3)
            except OSError:  # the reader has gone
                break
        return len(data)


def stderr() -> TextIO | Lossy:
    """sys.stderr; a `Lossy` one where it is a pipe or a terminal."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # none at all, or one of a test
        descriptor = sys.stderr.fileno()
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        if is_pipe or os.isatty(descriptor):
            # Opened anew: whether it blocks is a matter of those who share a descriptor, and others write to this one.
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            if is_pipe:
                with contextlib.suppress(OSError):
                    fcntl.fcntl(own, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            return Lossy(own)
    return sys.stderr
