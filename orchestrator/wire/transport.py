"""Typed ZMQ sockets of the frontend-worker mesh, and nothing about what the messages mean.

Each worker binds a ROUTER (requests in, outputs back) and a PUB (load, prefix events). Each frontend connects one
ROUTER to every worker, its identity the frontend's id, and one SUB. So a worker costs a frontend two descriptors, and
no socket of its own. A broken connection is noticed at once (the kernel closes the sockets of a killed process) or by
heartbeats (a host that is cut off), is reported as `Disconnected`, and is made again by ZMQ.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
from collections.abc import Sequence
from typing import Any, Union, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from orchestrator.wire import messages
from orchestrator.wire.messages import Hello, MessageError, Published, ToFrontend, ToWorker

log = logging.getLogger("pd.transport")

# A peer that does not read for this many messages is treated as unreachable rather than buffered without end.
HIGH_WATER_MARK = 200_000
# ZMQ's own threads ask and answer, so a busy event loop breaks no connection. A host that is cut off does within the
# sum of both: a timeout begins with the next question.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 3500
CONNECT_TIMEOUT_MS = 2000  # the kernel's own retries would be minutes apart when a link is mended
READ_BATCH = 256  # messages that are read from a socket before others run, however many there are


class Disconnected(msgspec.Struct, frozen=True):
    """The connection to a worker broke. It may be back within milliseconds, or dead."""

    worker_id: str


class AddressError(ValueError):
    """A worker's address that cannot be connected to. One line with the address."""


Received = tuple[str, Union[ToFrontend, Disconnected], list[bytes]]


def _send(socket: zmq.asyncio.Socket, frames: list[Any]) -> bool:
    """Hand frames to ZMQ without waiting. False when there is no connection, or the peer does not read."""
    future = cast("asyncio.Future[Any]", socket.send_multipart(frames, flags=zmq.DONTWAIT))
    if future.done() and (error := future.exception()) is not None:
        if isinstance(error, zmq.ZMQError):
            return False
        raise error
    return True


class _Reader:
    """Reads messages of a socket. To await one that is there already lets nobody else run, so every so many it does."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket, self._left = socket, READ_BATCH

    async def next(self) -> list[bytes]:
        self._left -= 1
        if not self._left:
            self._left = READ_BATCH
            await asyncio.sleep(0)
        return await self._socket.recv_multipart()


def _configure(socket: zmq.asyncio.Socket, linger_ms: int) -> None:
    for option, value in {
        zmq.LINGER: linger_ms,
        zmq.SNDHWM: HIGH_WATER_MARK,
        zmq.RCVHWM: HIGH_WATER_MARK,
        zmq.CONNECT_TIMEOUT: CONNECT_TIMEOUT_MS,
        zmq.RECONNECT_IVL: 50,
        zmq.RECONNECT_IVL_MAX: 1000,
    }.items():
        socket.setsockopt(option, value)
    if socket.type != zmq.PUB:  # a PUB is told by its subscribers when to give them up
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)


class WorkerTransport:
    """The worker's end. Addresses are known once constructed; port 0 takes a free one."""

    def __init__(self, host: str, request_port: int = 0, load_port: int = 0) -> None:
        self._context = zmq.asyncio.Context()
        self._requests = self._context.socket(zmq.ROUTER)
        self._published = self._context.socket(zmq.PUB)
        self._reader = _Reader(self._requests)
        self.corrupt = 0
        for socket in (self._requests, self._published):
            _configure(socket, linger_ms=200)
        # An unknown frontend is an error to the sender, and a reconnecting one takes its identity over.
        self._requests.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._requests.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.request_address = _bind(self._requests, host, request_port)
        self.load_address = _bind(self._published, host, load_port)

    async def receive(self) -> tuple[str, ToWorker, list[bytes]]:
        """The next message as (frontend id, message, payload). Corrupt ones are logged, counted and skipped."""
        while True:
            identity, *frames = await self._reader.next()
            try:
                if not frames:
                    raise MessageError("empty message")
                return identity.decode(), messages.decode_to_worker(frames[0]), frames[1:]
            except (MessageError, UnicodeDecodeError) as error:
                self.corrupt += 1
                log.warning("dropped a corrupt message from %r: %s", identity[:40], error)

    def send(self, frontend_id: str, message: ToFrontend, payload: Sequence[bytes] = ()) -> bool:
        return _send(self._requests, [frontend_id.encode(), messages.encode(message), *payload])

    def publish(self, message: Published) -> None:
        """To every frontend; lost to those that do not read."""
        _send(self._published, [messages.encode(message)])

    def close(self) -> None:
        self._context.destroy(linger=200)


class _Connection(msgspec.Struct):
    """A frontend's connection to one worker. `route` names it on the frontend's socket, and nothing after it."""

    worker_id: str
    request_address: str
    load_address: str
    route: bytes
    open: bool = False


class FrontendTransport:
    """The frontend's end of the mesh."""

    def __init__(self, frontend_id: str) -> None:
        self.frontend_id = frontend_id
        self.corrupt = 0
        self._context = zmq.asyncio.Context()
        self._requests = self._context.socket(zmq.ROUTER)
        self._published = self._context.socket(zmq.SUB)
        for socket in (self._requests, self._published):
            _configure(socket, linger_ms=0)
        self._requests.setsockopt(zmq.IDENTITY, frontend_id.encode())
        self._requests.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._published.setsockopt(zmq.SUBSCRIBE, b"")
        self._numbers = itertools.count(1)
        self._by_worker: dict[str, _Connection] = {}
        self._by_route: dict[bytes, _Connection] = {}
        self._by_address: dict[str, _Connection] = {}  # by both, as ZMQ's monitor names them
        self._received: asyncio.Queue[Received] = asyncio.Queue()
        self._reports = _Reader(self._published)
        self._tasks: list[asyncio.Task[None]] = []

    def connect(self, worker_id: str, request_address: str, load_address: str) -> None:
        """Connect, or reconnect when the addresses changed. Greets the worker once, and after each reconnection.

        Raises AddressError. An address has one process: another worker that had it is disconnected.
        """
        known = self._by_worker.get(worker_id)
        if known is not None and (known.request_address, known.load_address) == (request_address, load_address):
            return
        for address in (request_address, load_address):
            _check(address)
        self.disconnect(worker_id)
        for address in (request_address, load_address):
            if (other := self._by_address.get(address)) is not None:
                self._note_broken(other)
                self.disconnect(other.worker_id)
        self._start()
        connection = _Connection(worker_id, request_address, load_address, b"%d" % next(self._numbers))
        self._by_worker[worker_id] = connection
        self._by_route[connection.route] = connection
        self._by_address[request_address] = self._by_address[load_address] = connection
        self._requests.setsockopt(zmq.CONNECT_ROUTING_ID, connection.route)
        self._requests.connect(request_address)
        self._published.connect(load_address)

    def disconnect(self, worker_id: str) -> None:
        connection = self._by_worker.pop(worker_id, None)
        if connection is None:
            return
        del self._by_route[connection.route]
        for address in (connection.request_address, connection.load_address):
            self._by_address.pop(address, None)
        self._requests.disconnect(connection.request_address)
        self._published.disconnect(connection.load_address)

    def send(self, worker_id: str, message: ToWorker, payload: Sequence[bytes] = ()) -> bool:
        """False when that worker is not connected right now."""
        connection = self._by_worker.get(worker_id)
        if connection is None or not connection.open:
            return False  # what cannot be sent now is the caller's to place elsewhere
        return _send(self._requests, [connection.route, messages.encode(message), *payload])

    async def receive(self) -> Received:
        return await self._received.get()

    async def receive_published(self) -> Published:
        """The next load report or prefix events of any worker, each worker's in order."""
        while True:
            frames = await self._reports.next()
            try:
                return messages.decode_published(frames[0])
            except MessageError as error:
                self.corrupt += 1
                log.warning("dropped a corrupt publication: %s", error)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)

    def _start(self) -> None:
        if self._tasks:
            return
        # One monitor for all connections. Its own queue is without limit: at one ZMQ's threads would wait for us.
        self._requests.monitor("inproc://monitor", zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect("inproc://monitor")
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._monitor(monitor))]

    async def _read(self) -> None:
        reader = _Reader(self._requests)
        while True:
            route, *frames = await reader.next()
            connection = self._by_route.get(route)
            if connection is None:
                continue  # the last of a worker that is gone
            try:
                if not frames:
                    raise MessageError("empty message")
                message = messages.decode_to_frontend(frames[0])
                self._received.put_nowait((connection.worker_id, message, frames[1:]))
            except MessageError as error:
                self.corrupt += 1
                log.warning("dropped a corrupt message from worker %s: %s", connection.worker_id, error)

    async def _monitor(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            connection = self._by_address.get(event["endpoint"].decode())
            if connection is None:
                continue
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connection.open = True
                self.send(connection.worker_id, Hello())
            else:
                self._note_broken(connection)

    def _note_broken(self, connection: _Connection) -> None:
        if not connection.open:
            return
        connection.open = False
        self._received.put_nowait((connection.worker_id, Disconnected(connection.worker_id), []))


def _check(address: str) -> None:
    """Raises AddressError. A name would be looked up by ZMQ's thread, which meanwhile serves no other worker."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        if not address.startswith("tcp://") or not 0 < int(port) < 65536:
            raise ValueError
    except ValueError:
        raise AddressError(f"{address!r} is not an address like tcp://127.0.0.1:5000") from None


def _bind(socket: zmq.asyncio.Socket, host: str, port: int) -> str:
    socket.bind(f"tcp://{host}:{port or '*'}")
    return cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT)).decode()
