"""Steps that the simulated engines of a group take together, as those that share a model's experts must.

The first rank listens at the group's address, the others connect to it. A step begins once every rank has come to it,
and takes as long as the slowest one's batch; a rank without a batch computes a dummy one. While no rank has a batch,
none takes steps: the first that has one wakes the others. A rank that has ended ends all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Union

import msgspec

from orchestrator.process.tasks import cancelled
from workers.engine import EngineDead, Group

_CONNECT_EVERY_S = 0.1
_ENDED = "another rank of its group has ended"


class Come(msgspec.Struct, frozen=True, tag="come"):
    """A rank is at the step."""

    duration_s: float  # of its batch
    works: bool  # not a dummy one


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Another rank is at the next step: come, too."""


class Go(msgspec.Struct, frozen=True, tag="go"):
    """All have come: the step takes so long; whether another one follows at once."""

    duration_s: float
    more: bool


class Agree(msgspec.Struct, frozen=True, tag="agree"):
    """A rank was told to pause, or to go on. From the first one: all were."""

    pausing: bool


_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(Union[Come, Wake, Go, Agree]).decode


class Lockstep:
    """`start`, then `meet` for each step, in which nobody needs to wait in a group of one."""

    def __init__(self, group: Group, wake: Callable[[], None]) -> None:
        """`wake` is called when another rank waits for this one."""
        self.ended = False  # this rank, or another
        self.running = self._stepping = False  # the group takes steps; this rank has taken one of them
        self.waves = 0  # times that the group has begun to take steps
        self._group, self._wake = group, wake
        self._come: dict[int, Come] = {}  # at the first rank: who is at the step
        self._peers: dict[int, asyncio.StreamWriter] = {}
        self._complete = asyncio.Event()
        self._met: asyncio.Future[Go] | None = None
        self._told: dict[bool, set[int]] = {True: set(), False: set()}  # at the first rank: who is to pause, or go on
        self._agreed: dict[bool, asyncio.Future[None]] = {}
        self._server: asyncio.Server | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when all ranks are connected. Raises OSError."""
        host, port = self._group.host, self._group.port
        if self._group.size == 1:
            return
        if self._group.rank == 0:
            self._server = await asyncio.start_server(self._serve, host, port)
            await self._complete.wait()
            return
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                break
            await asyncio.sleep(_CONNECT_EVERY_S)
        self._peers[0] = writer
        self._send(0, self._group.rank)
        await reader.readline()  # all are there
        self._reader = asyncio.create_task(self._follow(reader), name="sim-lockstep")

    async def meet(self, duration_s: float, works: bool) -> float:
        """Wait until all ranks are at this step. Returns how long it takes, seconds. Raises EngineDead."""
        met = self._met = self._awaited()
        self.waves += not self._stepping
        self.running = self._stepping = True
        if self._group.rank == 0:
            self._arrived(0, Come(duration_s, works))
        else:
            self._send(0, Come(duration_s, works))
        try:
            return float((await met).duration_s)
        finally:
            self._met = None

    async def met(self) -> None:
        """Returns when no step waits for another rank: an engine that waits answers nothing. Raises EngineDead."""
        while self._met is not None and not self._met.done():
            await asyncio.wait({self._met})

    async def agree(self, pausing: bool) -> None:
        """Returns when all ranks have been told to pause, or all to go on, as vLLM's do. Raises EngineDead."""
        if self._group.size == 1:
            return
        agreed = self._agreed[pausing] = self._awaited()
        if self._group.rank == 0:
            self._note(0, Agree(pausing))
        else:
            self._send(0, Agree(pausing))
        await agreed

    def _awaited(self) -> asyncio.Future[Any]:
        """What other ranks do next; `_end` ends the wait. Raises EngineDead."""
        if self.ended:
            raise EngineDead(_ENDED)
        return asyncio.get_running_loop().create_future()

    def _note(self, rank: int, agree: Agree) -> None:
        told = self._told[agree.pausing]
        told.add(rank)
        if len(told) == self._group.size:
            told.clear()
            for peer in self._peers:
                self._send(peer, agree)
            self._all_agreed(agree.pausing)

    def _all_agreed(self, pausing: bool) -> None:
        if not self._agreed[pausing].done():  # else a rank has ended meanwhile
            self._agreed[pausing].set_result(None)

    async def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        if self._server is not None:
            self._server.close()
        await cancelled(self._reader)

    def _arrived(self, rank: int, come: Come) -> None:
        if not self._come:
            for peer in self._peers:
                if peer != rank:
                    self._send(peer, Wake())
            if rank != 0:
                self._woken()
        self._come[rank] = come
        if len(self._come) == self._group.size:
            everybody = self._come.values()
            go = Go(max(one.duration_s for one in everybody), any(one.works for one in everybody))
            self._come = {}
            for peer in self._peers:
                self._send(peer, go)
            self._go(go)

    def _woken(self) -> None:
        self.running = True
        self._wake()

    def _go(self, go: Go) -> None:
        # Now, not when `meet` goes on: a Wake may have come with it.
        self.running = self._stepping = go.more
        if self._met is not None and not self._met.done():
            self._met.set_result(go)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            rank = int(await reader.readline())
            self._peers[rank] = writer
            if len(self._peers) == self._group.size - 1:
                for peer in self._peers:
                    self._send(peer, "complete")
                self._complete.set()
            while line := await reader.readline():
                match _decode(line):
                    case Come() as come:
                        self._arrived(rank, come)
                    case Agree() as agree:
                        self._note(rank, agree)
        self._end()

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                match _decode(line):
                    case Go() as go:
                        self._go(go)
                    case Wake():
                        self._woken()
                    case Agree(pausing):
                        self._all_agreed(pausing)
        self._end()

    def _end(self) -> None:
        self.ended = True
        for awaited in (self._met, *self._agreed.values()):
            if awaited is not None and not awaited.done():
                awaited.set_exception(EngineDead(_ENDED))
        self._wake()
        for peer in self._peers.values():
            peer.close()

    def _send(self, rank: int, message: object) -> None:
        self._peers[rank].write(_encode(message) + b"\n")
