"""A port for an engine's handshakes, chosen before the engine process binds it."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000


def free_port(host: str) -> int:
    """A port that nobody uses now, and that the kernel gives to no outgoing connection while the engine loads.

    Raises OSError when `host` is not an address of this machine.
    """
    for port in random.sample(range(_LOWEST, _first_ephemeral_port()), 100):
        if _is_free(host, port):
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _first_ephemeral_port() -> int:
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        first = 32_768  # Linux's default
    return max(first, _LOWEST + 1000)


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True
