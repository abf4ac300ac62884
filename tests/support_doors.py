"""Ports that accept each connection at once, and let it through to a worker when told: workers whose CPU is busy."""

import asyncio
import contextlib


class Door:
    """One connection, which waits for `open`."""

    def __init__(self):
        self._opened = asyncio.Event()
        self.open, self.wait = self._opened.set, self._opened.wait


class Doors:
    def __init__(self):
        self.tries = 0
        self.most_shut = 0
        self.shut = []  # the connections that wait, oldest first
        self._stay_open = False
        self._servers, self._relays, self._ends = [], set(), []

    async def to(self, address):
        """Opens a port that leads to `address`. Returns its own address."""
        host, port = address.removeprefix("tcp://").split(":")

        async def accepted(reader, writer):
            self._relays.add(task := asyncio.current_task())
            task.add_done_callback(self._relays.discard)
            self._ends.append(writer)
            self.tries += 1
            opened, first = await self._pass(reader)
            if not opened:
                writer.close()
                return
            there_reader, there = await asyncio.open_connection(host, int(port))
            there.write(first)
            await asyncio.gather(_pump(reader, there), _pump(there_reader, writer))

        self._servers.append(await asyncio.start_server(accepted, "127.0.0.1", 0))
        return f"tcp://127.0.0.1:{self._servers[-1].sockets[0].getsockname()[1]}"

    async def _pass(self, reader):
        """Whether the door was opened before the frontend gave up, and what came meanwhile."""
        door, first = Door(), bytearray()
        if self._stay_open:
            return True, first
        self.shut.append(door)
        self.most_shut = max(self.most_shut, len(self.shut))
        opened = asyncio.create_task(door.wait())
        reading = asyncio.create_task(reader.read(65536))
        try:
            while True:
                await asyncio.wait({opened, reading}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    try:
                        data = reading.result()
                    except OSError:
                        data = b""
                    if not data:
                        return False, b""
                    first += data
                    reading = asyncio.create_task(reader.read(65536))
                if opened.done():
                    return True, first
        finally:
            self.shut.remove(door)
            for task in (opened, reading):
                task.cancel()

    def open_all(self):
        """From now on nothing waits."""
        self._stay_open = True
        for door in self.shut:
            door.open()

    def break_all(self):
        """End the connections that are through. Those that come wait."""
        self._stay_open = False
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()

    async def close(self):
        for server in self._servers:
            server.close()
        for task in list(self._relays):
            task.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)


async def _pump(source, target):
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            target.write(data)
    target.close()
