"""Typed ZMQ sockets of the frontend-worker mesh, and nothing about what the messages mean.

Each worker binds a ROUTER (requests in, outputs back) and a PUB (load, prefix events). Each frontend connects one
DEALER to every worker, its identity the frontend's id, and one SUB to all. A broken connection is noticed at once
(the kernel closes the sockets of a killed process), reported as `Disconnected`, and retried by ZMQ.
"""

from __future__ import annotations

import asyncio
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


class Disconnected(msgspec.Struct, frozen=True):
    """The connection to a worker broke. It may be back within milliseconds, or dead."""

    worker_id: str


Received = tuple[str, Union[ToFrontend, Disconnected], list[bytes]]


def _send(socket: zmq.asyncio.Socket, frames: list[Any]) -> bool:
    """Hand frames to ZMQ without waiting. False when there is no connection, or the peer does not read."""
    future = cast("asyncio.Future[Any]", socket.send_multipart(frames, flags=zmq.DONTWAIT))
    if future.done() and (error := future.exception()) is not None:
        if isinstance(error, zmq.ZMQError):
            return False
        raise error
    return True


class WorkerTransport:
    """The worker's end. Addresses are known once constructed; port 0 takes a free one."""

    def __init__(self, host: str, request_port: int = 0, load_port: int = 0) -> None:
        self._context = zmq.asyncio.Context()
        self._requests = self._context.socket(zmq.ROUTER)
        self._published = self._context.socket(zmq.PUB)
        self.corrupt = 0
        for socket in (self._requests, self._published):
            socket.setsockopt(zmq.LINGER, 200)
            socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
            socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        # An unknown frontend is an error to the sender, and a reconnecting one takes its identity over.
        self._requests.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._requests.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.request_address = _bind(self._requests, host, request_port)
        self.load_address = _bind(self._published, host, load_port)

    async def receive(self) -> tuple[str, ToWorker, list[bytes]]:
        """The next message as (frontend id, message, payload). Corrupt ones are logged, counted and skipped."""
        while True:
            identity, *frames = await self._requests.recv_multipart()
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


class FrontendTransport:
    """The frontend's end of the mesh."""

    def __init__(self, frontend_id: str) -> None:
        self.frontend_id = frontend_id
        self.corrupt = 0
        self._context = zmq.asyncio.Context()
        self._dealers: dict[str, zmq.asyncio.Socket] = {}
        self._addresses: dict[str, tuple[str, str]] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._received: asyncio.Queue[Received] = asyncio.Queue()
        self._published = self._context.socket(zmq.SUB)
        self._published.setsockopt(zmq.SUBSCRIBE, b"")
        self._published.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)

    def connect(self, worker_id: str, request_address: str, load_address: str) -> None:
        """Connect, or reconnect when the addresses changed. Greets the worker once, and after each reconnection."""
        if self._addresses.get(worker_id) == (request_address, load_address):
            return
        self.disconnect(worker_id)
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, self.frontend_id.encode())
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        dealer.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        # Queue only on completed connections: what cannot be sent now is the caller's to place elsewhere.
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        dealer.connect(request_address)
        self._published.connect(load_address)
        self._dealers[worker_id] = dealer
        self._addresses[worker_id] = (request_address, load_address)
        self._tasks[worker_id] = [
            asyncio.create_task(self._read(worker_id, dealer)),
            asyncio.create_task(self._monitor(worker_id, dealer, monitor)),
        ]

    def disconnect(self, worker_id: str) -> None:
        dealer = self._dealers.pop(worker_id, None)
        if dealer is None:
            return
        for task in self._tasks.pop(worker_id):
            task.cancel()
        _, load_address = self._addresses.pop(worker_id)
        try:
            self._published.disconnect(load_address)
        except zmq.ZMQError as error:
            log.debug("load socket was not connected to %s: %s", load_address, error)
        dealer.disable_monitor()
        dealer.close(linger=0)

    def send(self, worker_id: str, message: ToWorker, payload: Sequence[bytes] = ()) -> bool:
        """False when that worker is not connected right now."""
        dealer = self._dealers.get(worker_id)
        return dealer is not None and _send(dealer, [messages.encode(message), *payload])

    async def receive(self) -> Received:
        return await self._received.get()

    async def receive_published(self) -> Published:
        """The next load report or prefix events of any worker, each worker's in order."""
        while True:
            frames = await self._published.recv_multipart()
            try:
                return messages.decode_published(frames[0])
            except MessageError as error:
                self.corrupt += 1
                log.warning("dropped a corrupt publication: %s", error)

    def close(self) -> None:
        for worker_id in list(self._dealers):
            self.disconnect(worker_id)
        self._context.destroy(linger=0)

    async def _read(self, worker_id: str, dealer: zmq.asyncio.Socket) -> None:
        while True:
            header, *payload = await dealer.recv_multipart()
            try:
                self._received.put_nowait((worker_id, messages.decode_to_frontend(header), payload))
            except MessageError as error:
                self.corrupt += 1
                log.warning("dropped a corrupt message from worker %s: %s", worker_id, error)

    async def _monitor(self, worker_id: str, dealer: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                _send(dealer, [messages.encode(Hello())])
            elif event == zmq.EVENT_DISCONNECTED:
                self._received.put_nowait((worker_id, Disconnected(worker_id), []))


def _bind(socket: zmq.asyncio.Socket, host: str, port: int) -> str:
    socket.bind(f"tcp://{host}:{port or '*'}")
    return cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT)).decode()
