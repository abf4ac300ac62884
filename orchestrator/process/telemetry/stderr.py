"""Standard error of a process of the fleet, for its log: lines that nobody reads are dropped, and counted.

The launcher reads the other end. While it is stopped, by Ctrl-Z say, it reads nothing, and a process that waited for it
would serve nobody. A terminal that is stopped has the same effect.
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

# It holds the lines of some hundred requests, so that a reader may be late by them. Linux limits the pipes of a user to
# 64 MiB together; above that it makes tiny ones.
_PIPE_BYTES = 1 << 18
_PATIENCE_S = 0.25  # the wait for a slow reader; after a dropped line, nothing waits until a line is written again


class LossyStderr:
    """A text file with the methods that logging needs."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` must not block."""
        self._descriptor = descriptor
        self._lines_dropped = 0
        self._cut = False  # whether the last line was written in part only
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
        """Does nothing: `write` keeps no buffer."""

    def _write_all(self, data: bytes) -> int:
        """Write to the descriptor. Returns how many bytes are left."""
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


def stderr() -> TextIO | LossyStderr:
    """sys.stderr, or a `LossyStderr` file on it if it is a pipe or a terminal."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there is no stderr, or a test replaced it
        descriptor = sys.stderr.fileno()
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        if is_pipe or os.isatty(descriptor):
            # Opened again: processes that share a descriptor share O_NONBLOCK, and others write to this one.
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            if is_pipe:
                with contextlib.suppress(OSError):
                    fcntl.fcntl(own, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            return LossyStderr(own)
    return sys.stderr
