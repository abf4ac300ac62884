"""The simulated KV network: who owes whose KV to whom, told over real TCP connections between sim engines.

A receiver registers a request with the engine that prefills it, is told when the KV has arrived or will not, and may
withdraw. Only messages travel; how long the bytes would take is the sending engine's business. A connection that
breaks ends everything that went over it, as a dead peer's transfers end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Union

import msgspec

from orchestrator.types import KVEndpoint

log = logging.getLogger("pd.sim")

CONNECT_TIMEOUT_S = 2.0
_LENGTH_BYTES = 4
_MAX_MESSAGE_BYTES = 1 << 16


class Register(msgspec.Struct, tag="register", frozen=True):
    """To the sender: blocks are reserved for `key`, push its KV. `engine_id` is whom the receiver means to ask."""

    engine_id: str
    key: str
    receiver_id: str  # the receiver's engine id


class Withdraw(msgspec.Struct, tag="withdraw", frozen=True):
    """To the sender: the KV of `key` is not wanted any more. Answered with Settled once nothing is in flight; or with
    Computing, where it is wanted as long as its prefill goes on."""

    key: str
    unless_computing: bool = False


class Computing(msgspec.Struct, tag="computing", frozen=True):
    """To the receiver: not withdrawn, its prefill takes longer."""

    key: str


class Settled(msgspec.Struct, tag="settled", frozen=True):
    """To the receiver: no write for `key` is in flight or to come. `arrived`: all of its KV is there."""

    key: str
    arrived: bool
    why: str = ""


Message = Union[Register, Withdraw, Computing, Settled]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class Peer:
    """One connection, from either end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: Message) -> None:
        """Never waits: messages are small and few. What a broken connection loses, its end is told of by `receive`."""
        if not self._writer.is_closing():
            body = _encoder.encode(message)
            self._writer.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)

    async def receive(self) -> Message | None:
        """The next message; None once the connection is over or speaks another language."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            if length > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes")
            return _decoder.decode(await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError):
            return None
        except ValueError as error:  # msgspec's errors are ValueErrors
            log.warning("closed a KV connection that sent %s", error)
            return None

    def close(self) -> None:
        self._writer.close()


class SimLink:
    """One engine's end of the network: a listening port for receivers, a connection to each sender it waits for."""

    def __init__(
        self,
        engine_id: str,
        on_message: Callable[[Peer, Register | Withdraw], None],
        on_receiver_lost: Callable[[Peer], None],
        on_settled: Callable[[Settled], None],
        on_computing: Callable[[str], None],
    ) -> None:
        """`on_message`, `on_receiver_lost`: as a sender. The others: as a receiver; `on_settled` is called exactly once
        for each key expected, also when the sender died or could not be reached."""
        self._engine_id = engine_id
        self._on_message = on_message
        self._on_receiver_lost = on_receiver_lost
        self._on_settled = on_settled
        self._on_computing = on_computing
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._senders: dict[str, _Sender] = {}

    async def listen(self, host: str, port: int) -> int:
        """Returns the port. Raises OSError."""
        self._server = await asyncio.start_server(self._accepted, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    def expect(self, key: str, endpoint: KVEndpoint) -> None:
        """Register `key` with the engine at `endpoint`."""
        sender = self._senders.get(endpoint.engine_id)
        if sender is None:
            sender = self._senders[endpoint.engine_id] = _Sender(endpoint)
            self._start(self._serve_sender(sender))
        sender.expected.add(key)
        sender.say(Register(endpoint.engine_id, key, self._engine_id))

    def withdraw(self, key: str, endpoint: KVEndpoint, unless_computing: bool = False) -> None:
        """Settled follows, unless it was called already; or, if allowed, Computing."""
        sender = self._senders.get(endpoint.engine_id)
        if sender is not None and key in sender.expected:
            sender.say(Withdraw(key, unless_computing))

    def fail_sender(self, engine_id: str) -> None:
        """That engine is known to be dead: settle everything expected of it now."""
        sender = self._senders.pop(engine_id, None)
        if sender is not None:
            sender.close()
            self._settle_all(sender, "its sender died")

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self._start(self._serve_receiver(peer))

    async def _serve_receiver(self, peer: Peer) -> None:
        try:
            while isinstance(message := await peer.receive(), (Register, Withdraw)):
                self._on_message(peer, message)
        finally:
            peer.close()
            self._on_receiver_lost(peer)

    async def _serve_sender(self, sender: _Sender) -> None:
        why = "its sender died"
        try:
            endpoint = sender.endpoint
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            sender.connected(Peer(reader, writer))
            while isinstance(message := await sender.receive(), (Computing, Settled)):
                if message.key not in sender.expected:
                    continue
                if isinstance(message, Computing):
                    self._on_computing(message.key)
                else:
                    sender.expected.remove(message.key)
                    self._on_settled(message)
        except (OSError, TimeoutError) as error:
            why = f"its sender cannot be reached: {error or 'no answer'}"
        finally:
            sender.close()
            if self._senders.get(sender.endpoint.engine_id) is sender:
                del self._senders[sender.endpoint.engine_id]
            self._settle_all(sender, why)

    def _settle_all(self, sender: _Sender, why: str) -> None:
        expected, sender.expected = sender.expected, set()
        for key in expected:
            self._on_settled(Settled(key, arrived=False, why=why))

    def _start(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Sender:
    """The receiver's connection to one sending engine; what is said before it stands is kept in order."""

    def __init__(self, endpoint: KVEndpoint) -> None:
        self.endpoint = endpoint
        self.expected: set[str] = set()
        self._peer: Peer | None = None
        self._unsaid: list[Message] = []
        self._closed = False

    def say(self, message: Message) -> None:
        if self._peer is None:
            self._unsaid.append(message)
        else:
            self._peer.send(message)

    def connected(self, peer: Peer) -> None:
        self._peer = peer
        if self._closed:  # given up while connecting
            peer.close()
        for message in self._unsaid:
            peer.send(message)
        self._unsaid.clear()

    async def receive(self) -> Message | None:
        return await self._peer.receive() if self._peer is not None else None

    def close(self) -> None:
        self._closed = True
        if self._peer is not None:
            self._peer.close()
