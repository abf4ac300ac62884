"""What the ranks of a group say to each other, as lines of JSON, and a connection of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Union

import msgspec

from orchestrator.types import PauseState


class Come(msgspec.Struct, frozen=True, tag="come"):
    """From a rank to the first one. `host`: where others reach it."""

    token: str
    worker_id: str
    ranks: tuple[str, ...]
    generation: int
    host: str


class Met(msgspec.Struct, frozen=True, tag="met"):
    """All have come: their engines meet there. `rank`: of the one that is told."""

    host: str
    port: int
    one_host: bool
    rank: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The group cannot start, or not with this rank. `final`: nor will it, as it is."""

    why: str
    final: bool = False


class Paused(msgspec.Struct, frozen=True, tag="paused"):
    """See pause.py."""

    state: PauseState


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life."""


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The sender's engine has died by itself. The first rank says it back to the one that said it first."""


Message = Union[Come, Met, Refused, Paused, Beat, Died]
decode = msgspec.json.Decoder(Message).decode


class Peer:
    """A connection with another rank."""

    def __init__(self, writer: asyncio.StreamWriter, host: str = "") -> None:
        self.writer, self.host, self.missed = writer, host, 0

    def send(self, message: Message) -> None:
        if not self.writer.is_closing():
            self.writer.write(msgspec.json.encode(message) + b"\n")

    def close(self) -> None:
        """The other end notices at once, also where an engine that was forked from here has the socket too."""
        there = self.writer.get_extra_info("socket")
        if there is not None:  # uvloop has none any more where the connection has broken
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(there.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)
        self.writer.close()
