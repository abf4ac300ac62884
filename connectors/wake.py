"""How a rank tells its engine that KV has come or gone: see `_Waker` in `workers/vllm_engine/plugin.py`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

_SOCKET = "PD_WAKE_SOCKET"  # the engine's, where it is in another process


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
