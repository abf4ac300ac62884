"""Typed, encrypted ZMQ sockets between frontends and workers. Ignores what the messages mean.

Each worker binds a ROUTER (requests in, outputs back) and a PUB (load, prefix events). Each frontend connects one
ROUTER and one SUB to all workers, so a worker costs a frontend two descriptors. A sender is identified by the key of
its connection (`curve.py`), not by its message; without keys, by its socket's identity.

A broken connection is noticed at once (the kernel closes the sockets of a killed process) or by heartbeats (a host that
is cut off). It is reported as `Disconnected`, and ZMQ makes it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Union, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from orchestrator.wire import messages
from orchestrator.wire.addresses import Listening, in_url
from orchestrator.wire.connections import Connections
from orchestrator.wire.curve import FindFrontends, Gate, KeyPair, use_as_client, use_as_server
from orchestrator.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    MessageError,
    Published,
    ToFrontend,
    ToWorker,
    Welcome,
)
from orchestrator.wire.sockets import (
    EVENTS_REFUSED,
    Assembler,
    Reader,
    Sent,
    Woken,
    ask_peers,
    bind,
    configure,
    make,
    monitor,
    send,
)

log = logging.getLogger("pd.transport")

LOG_REFUSED_EVERY_S = 60.0


class Disconnected(msgspec.Struct, frozen=True):
    """The connection to a worker broke. It may be back within milliseconds, or dead."""

    worker_id: str


class Unreadable(msgspec.Struct, frozen=True):
    """A message of a worker could not be read, or came without its first parts: what it said is lost."""

    worker_id: str


Received = tuple[str, Union[ToFrontend, Disconnected, Unreadable], list[bytes]]


class WorkerTransport:
    """The worker's end. Addresses are known once constructed; port 0 takes a free one."""

    def __init__(
        self,
        listening: Listening,
        *,
        keys: KeyPair | None,
        find_frontends: FindFrontends | None = None,
    ) -> None:
        """With `keys` only the frontends that `find_frontends` knows can connect; without keys, everybody."""
        self._context = zmq.asyncio.Context()
        self._requests = make(self._context, zmq.ROUTER)
        self._published = make(self._context, zmq.PUB)
        self._reader, self._assembler = Reader(self._requests), Assembler()
        self.corrupt = 0
        for socket in (self._requests, self._published):
            configure(socket, linger_ms=200)
            ask_peers(socket)
        self._requests.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown route is an error to the sender
        self._routes: dict[str, bytes] = {}  # frontend id -> the connection of its last Hello
        self._gate: Gate | None = None
        self._watching: list[asyncio.Task[None]] = []
        if keys is not None:
            assert find_frontends is not None, "whom to let in?"
            self._gate = Gate(self._context, find_frontends, self._routes)
            for socket in (self._requests, self._published):
                use_as_server(socket, keys)
                refused = monitor(socket, self._context, EVENTS_REFUSED)
                self._watching.append(asyncio.create_task(_log_refused(refused)))
        else:
            self._requests.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a frontend that connects again keeps its identity
        reached = f"tcp://{in_url(listening.reached_at)}"
        self.request_address = f"{reached}:{bind(self._requests, listening)}"
        self.load_address = f"{reached}:{bind(self._published, listening)}"

    async def receive(self) -> tuple[str, ToWorker, list[bytes]]:
        """The next message as (frontend id, message, payload). Corrupt ones are logged, counted and skipped."""
        while True:
            route, frames = await self._reader.next()
            try:
                frontend_id = route.bytes.decode() if self._gate is None else cast(str, route.get("User-Id"))
                if (whole := self._assembler.take(frames)) is None:
                    continue
                header, *payload = whole
                message = messages.decode_to_worker(header)
            except (MessageError, UnicodeDecodeError) as error:
                self.corrupt += 1
                log.warning("dropped a corrupt message from %r: %s", route.bytes[:40], error)
                continue
            if isinstance(message, Hello) and message.protocol == PROTOCOL_VERSION:  # to others nothing is sent
                self._routes[frontend_id] = route.bytes
            return frontend_id, message, payload

    def send(self, frontend_id: str, message: ToFrontend, payload: Sequence[bytes] = ()) -> Sent:
        """`Sent.UNREACHABLE` also if that frontend has not sent `Hello`."""
        route = self._routes.get(frontend_id)
        if route is None:
            return Sent.UNREACHABLE
        sent = send(self._requests, [messages.encode(message), *payload], route)
        self._reader.look()
        if sent is Sent.UNREACHABLE:
            del self._routes[frontend_id]
        return sent

    def publish(self, message: Published) -> None:
        """Send to every frontend. A frontend that does not read loses the message."""
        send(self._published, [messages.encode(message)])

    def close(self) -> None:
        for task in self._watching:
            task.cancel()
        if self._gate is not None:
            self._gate.close()
        self._reader.close()
        self._context.destroy(linger=200)


class FrontendTransport:
    """The frontend's end of the mesh."""

    def __init__(
        self, frontend_id: str, on_corrupt: Callable[[], None] = lambda: None, *, keys: KeyPair | None
    ) -> None:
        """With `keys` it connects to workers that have keys too, and to no others.

        `on_corrupt` is called for each message that cannot be read, which is logged.
        """
        self.frontend_id = frontend_id
        self._on_corrupt = on_corrupt
        self._context = zmq.asyncio.Context()
        self._requests = make(self._context, zmq.ROUTER)
        self._published = make(self._context, zmq.SUB)
        for socket in (self._requests, self._published):
            configure(socket, linger_ms=0)
            if keys is not None:
                use_as_client(socket, keys)
        if keys is None:
            self._requests.setsockopt(zmq.IDENTITY, frontend_id.encode())
        self._requests.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._published.setsockopt(zmq.SUBSCRIBE, b"")
        self._connections = Connections(
            self._context,
            self._requests,
            self._published,
            encrypted=keys is not None,
            on_open=lambda connection: self.greet(connection.worker_id),
            on_broken=lambda connection: self._note_broken(connection.worker_id),
        )
        self._broken: deque[str] = deque()  # workers whose `Disconnected` has not been received yet
        self._reader, self._reports = Reader(self._requests), Reader(self._published)
        self._assembler, self._of_reports = Assembler(), Assembler()

    def connect(self, worker_id: str, request_address: str, load_address: str, key: str) -> None:
        """Connect, or reconnect when the addresses changed; now, or when others have been connected. Sends `Hello`
        after each connection. Raises AddressError.
        """
        self._connections.connect(worker_id, request_address, load_address, key)
        self._look()

    def disconnect(self, worker_id: str) -> None:
        self._connections.disconnect(worker_id)
        self._look()

    def is_coming(self, worker_id: str) -> bool:
        """Whether a worker that is not connected lives for all that is known: its connection is being made."""
        return self._connections.is_coming(worker_id)

    def _look(self) -> None:
        self._reader.look()
        self._reports.look()

    def greet(self, worker_id: str) -> None:
        """Have it say `Welcome`, if it is connected."""
        self.send(worker_id, Hello())
        self._look()

    def _note_broken(self, worker_id: str) -> None:
        self._broken.append(worker_id)
        self._reader.wake()

    def send(self, worker_id: str, message: ToWorker, payload: Sequence[bytes] = ()) -> Sent:
        connection = self._connections.by_worker.get(worker_id)
        if connection is None or not connection.open:
            return Sent.UNREACHABLE
        sent = send(self._requests, [messages.encode(message), *payload], connection.route)
        self._reader.look()
        return sent

    async def receive(self) -> Received:
        """The next message of a worker, or that its connection broke, or that one cannot be read."""
        while True:
            if self._broken:
                worker_id = self._broken.popleft()
                return worker_id, Disconnected(worker_id), []
            try:
                route, frames = await self._reader.next()
            except Woken:
                continue
            connection = self._connections.by_route.get(route.bytes)
            if connection is None:
                continue  # a late message of a worker that is gone
            try:
                if (whole := self._assembler.take(frames)) is None:
                    continue
                header, *payload = whole
                message = messages.decode_to_frontend(header)
            except MessageError as error:
                self._on_corrupt()
                log.warning("dropped a corrupt message from worker %s: %s", connection.worker_id, error)
                return connection.worker_id, Unreadable(connection.worker_id), []
            if not isinstance(message, Welcome) or connection.open:  # else of the connection that broke
                return connection.worker_id, message, payload

    async def receive_published(self, pause_s: float = 0.0) -> list[Published]:
        """All load reports and prefix events that have arrived, each worker's in order. Waits for the first one.
        `pause_s`: see `Reader.all`."""
        found: list[Published] = []
        while not found:
            for frame in await self._reports.all(pause_s):
                try:
                    if whole := self._of_reports.take([frame]):
                        found.append(messages.decode_published(whole[0]))
                except MessageError as error:
                    self._on_corrupt()
                    log.warning("dropped a corrupt publication: %s", error)
        return found

    def close(self) -> None:
        self._connections.close()
        self._reader.close()
        self._reports.close()
        self._context.destroy(linger=0)


async def _log_refused(events: zmq.asyncio.Socket) -> None:
    """Log refused connections, at most one line a minute. Runs until cancelled."""
    silent_until = 0.0
    while True:
        event = await recv_monitor_message(events)
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or time.monotonic() < silent_until:
            continue  # it connected and disconnected, as probes of other workers do
        silent_until = time.monotonic() + LOG_REFUSED_EVERY_S
        log.warning(
            "refused a connection to %s: whoever connects has no key of this fleet. If it is a frontend, start it with "
            "the same Redis, namespace and security.mesh as this worker",
            event["endpoint"].decode(),
        )
