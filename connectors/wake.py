"""What ends waits: a rank tells its engine that KV has come or gone (`Waker` in `workers/vllm_engine/loop.py`), and
UCX's connections tell the thread that owns NIXL of a message.

UCX has the sockets of its connections in an epoll instance of its own, which can be read while one of them can. NIXL
does not name it. Where messages come another way, as over RDMA, nothing here sees them: that thread also looks by time,
often until sockets have told of most messages.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Collection

_SOCKET = "PD_WAKE_SOCKET"  # the engine's, where it is in another process
_POLL_S, _PAUSE_S = 0.001, 0.0005  # the least time that a poll of descriptors takes, and between two looks at them
_EXPECTED_S = 0.05  # what waits no longer than this expects a message
_TOLD_S, _LOOK_MOST_S = 0.02, 0.004  # between two looks where descriptors have told of most messages, and elsewhere
_LATEST = 16  # messages, by which that is known


class WakeEvent(threading.Event):
    """Set with every result, for an engine loop that waits instead of polling."""

    def __init__(self) -> None:
        super().__init__()
        self._path = os.environ.get(_SOCKET, "")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if self._path else None

    def set(self) -> None:
        super().set()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it does not listen yet, has ended, or is being woken as it is
                self._socket.sendto(b"\0", self._path)


def epolls() -> set[int]:
    """The epoll instances of this process, by their descriptors, but for those with a timer, which are of no
    connections: NIXL's telemetry has one, which can be read now and then without any message."""
    found = set[int]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has just been closed
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]" and not _has_timer(name):
                found.add(int(name))
    return found


def _has_timer(name: str) -> bool:
    with open(f"/proc/self/fdinfo/{name}") as info:
        watched = [line.split()[1] for line in info if line.startswith("tfd:")]
    for one in watched:
        with contextlib.suppress(OSError):  # it has just been closed
            if os.readlink(f"/proc/self/fd/{one}") == "anon_inode:[timerfd]":
                return True
    return False


class MessageEvent(threading.Event):
    """An event, of which a wait also ends when one of these descriptors can be read. One thread waits, clears, and says
    what it then found.

    Where looking at what has come leaves a descriptor readable, waits are of `_PAUSE_S`: data comes, of which each look
    reads a part. Through long waits, when none is expected, each is twice the one before: nothing reads it, so nothing
    spins.
    """

    def __init__(self, descriptors: Collection[int]) -> None:
        super().__init__()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready, self._came, self._pause_s = select.poll(), False, _PAUSE_S
        self._watched, self._told = False, 0.0  # whether the last wait was for descriptors; the share that they told of
        for descriptor in (self._bell, *descriptors):
            self._ready.register(descriptor, select.POLLIN)

    def set(self) -> None:
        if not self.is_set():  # else what waits, or waits next, is woken as it is
            super().set()
            os.eventfd_write(self._bell, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        super().clear()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is set."""
        self._watched = False
        if timeout is not None and timeout < _POLL_S:
            return super().wait(timeout)
        came, self._came = self._came, False
        if came and super().wait(self._pause_s):
            return True
        self._watched = True
        for descriptor, state in self._ready.poll(None if timeout is None else timeout * 1e3):
            self._came = self._came or descriptor != self._bell
            if state & select.POLLNVAL:  # it was closed
                self._ready.unregister(descriptor)
        unread = came and self._came and (timeout is None or timeout > _EXPECTED_S)
        self._pause_s = min(2 * self._pause_s, _EXPECTED_S) if unread else _PAUSE_S
        return self.is_set()

    def looked(self, found: bool) -> None:
        """After a wait: whether a message was there."""
        if found and self._watched:
            self._told += (self._came - self._told) / _LATEST

    def look_s(self, waited_s: float, connecting: bool) -> float:
        """Seconds until who has expected a message for so long looks for one of which no descriptor tells. It is late
        by 1% of the wait at most, by more only where they told of most of the latest ones. While UCX connects, it has
        messages of its own."""
        if self._told > 0.5 and not connecting:
            return _TOLD_S
        return min(_LOOK_MOST_S, max(_POLL_S, 0.005 * waited_s))
