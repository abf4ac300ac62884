"""A port on this machine that leads to another server: what passes can be seen or changed, and the server replaced."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any


class Relay:
    """`change` gets all bytes that pass, and whether they go to the server; it returns what is passed on."""

    def __init__(self, host: str, port: int, change: Callable[[bytes, bool], bytes] = lambda data, forth: data) -> None:
        self.target = host, port  # of new connections
        self._change = change
        self._pumps: set[asyncio.Task[None]] = set()
        self.accepted = 0  # connections so far
        self.port = 0  # once it listens

    @contextlib.asynccontextmanager
    async def listening(self, host: str = "127.0.0.1", port: int = 0, **options: Any) -> AsyncIterator[int]:
        """Yields the relay's port. `options` of asyncio.start_server."""
        server = await asyncio.start_server(self._accept, host, port, **options)
        try:
            self.port = server.sockets[0].getsockname()[1]
            yield self.port
        finally:
            server.close()
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        """Close what passes here, and whatever comes from now on until there is a `target` again."""
        self.target = "", 0
        for pump in self._pumps:
            pump.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if not self.target[1]:
            return writer.close()
        there_reader, there = await asyncio.open_connection(*self.target)
        for way in ((reader, there, True), (there_reader, writer, False)):
            self._pumps.add(asyncio.create_task(self._pump(*way)))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, forth: bool) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    target.write(self._change(data, forth))
                    await target.drain()
        finally:
            target.close()
