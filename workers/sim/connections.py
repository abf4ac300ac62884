"""Connections between simulated engines: messages of the transfer protocol over TCP, instead of NIXL's notifications.

Each engine listens, and opens one connection to every engine that it sends to. They carry messages only: `transfers.py`
models the time that KV takes, and handles the messages.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from connectors.push import wire
from orchestrator.process.tasks import cancelled

log = logging.getLogger("pd.sim")

CONNECT_TIMEOUT_S = 2.0
_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 1 << 24


class ConnectionEvents(Protocol):
    """Called from tasks of the event loop. `engine` is the engine id at the other end."""

    def connected(self, engine: str) -> None: ...

    def unreachable(self, engine: str, why: str) -> None: ...

    def lost(self, engine: str) -> None:
        """An open connection was closed: the other process has ended."""
        ...

    def received(self, engine: str, data: bytes) -> None: ...


class SimConnections:
    def __init__(self, engine_id: str, events: ConnectionEvents) -> None:
        self._engine_id = engine_id
        self._events = events
        self._server: asyncio.Server | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent: dict[str, list[wire.Message]] = {}  # by engine, while a connection to it is made
        self._writers: dict[str, asyncio.StreamWriter] = {}  # by engine, once connected

    async def listen(self, host: str, port: int) -> int:
        """Accept connections. Returns the port. Raises OSError."""
        self._server = await asyncio.start_server(self._accept, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    def connect(self, peer: wire.Endpoint) -> None:
        """Connect to a peer. Reports `connected` or `unreachable`, after `CONNECT_TIMEOUT_S` at the latest."""
        if peer.engine_id in self._writers:
            self._events.connected(peer.engine_id)
        elif peer.engine_id not in self._unsent:
            self._unsent[peer.engine_id] = []
            self._track(asyncio.create_task(self._hold(peer), name=f"sim-kv-{peer.engine_id}"))

    def is_connected(self, engine: str) -> bool:
        return engine in self._writers

    def send(self, engine: str, message: wire.Message) -> bool:
        """Send without waiting: messages are small and few. Returns False if no connection to `engine` is open or being
        made."""
        if engine in self._unsent:
            self._unsent[engine].append(message)
        elif engine in self._writers:
            _write(self._writers[engine], wire.pack(message))
        else:
            return False
        return True

    async def close(self) -> None:
        """Close all connections. Nothing is reported afterwards."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        await cancelled(*self._tasks)

    async def _hold(self, peer: wire.Endpoint) -> None:
        """Connect, and keep the connection until the other end closes it."""
        engine = peer.engine_id
        try:
            reader, writer = await self._open(peer)
        except (OSError, EOFError, ValueError, OverflowError) as error:  # the last two: it has named no address
            del self._unsent[engine]
            self._events.unreachable(engine, f"{peer.host}:{peer.port}: {str(error) or 'no answer'}")
            return
        self._writers[engine] = writer
        try:
            for message in self._unsent.pop(engine):
                self.send(engine, message)
            self._events.connected(engine)
            await reader.read(1)  # the peer sends nothing here: this returns when its process ends
        except OSError:
            pass  # reset by the peer
        finally:
            del self._writers[engine]
            writer.close()
        self._events.lost(engine)

    async def _open(self, peer: wire.Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, and exchange engine ids. Raises EOFError, OSError; ConnectionError if another engine answers."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(peer.host, peer.port)
            try:
                _write(writer, self._engine_id.encode())
                found = (await _read(reader)).decode(errors="replace")
                if found != peer.engine_id:
                    raise ConnectionError(f"engine {found} is here now")
            except BaseException:
                writer.close()
                raise
        return reader, writer

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:  # it was accepted just before
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="sim-kv-accepted")
        task.add_done_callback(lambda _: writer.close())  # also if it is cancelled before it begins
        self._track(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read from a connection that another engine opened."""
        try:
            _write(writer, self._engine_id.encode())
            engine = (await _read(reader)).decode(errors="replace")
            while True:
                self._events.received(engine, await _read(reader))
        except (OSError, EOFError) as error:
            log.debug("a KV connection was closed: %s", error)

    def _track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    if not writer.is_closing():
        writer.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Raises OSError, EOFError."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length > _MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {length} bytes; the longest may have {_MAX_FRAME_BYTES}")
    return await reader.readexactly(length)
