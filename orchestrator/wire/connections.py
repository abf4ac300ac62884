"""A frontend's connections to its workers: which there are, which are being made, and which broke. Reads no messages.

A connection takes two handshakes of public-key cryptography, and whoever is not answered within a time limit begins
anew. All those of a large fleet at once would not end in time, and their work would be thrown away. So few are made at
a time. ZMQ makes a connection that broke again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import struct
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from orchestrator.wire.addresses import AddressError, check_address
from orchestrator.wire.sockets import (
    EVENTS_REFUSED,
    HANDSHAKE_TIMEOUT_MS,
    Socket,
    connect,
    monitor,
)

log = logging.getLogger("pd.transport")

# Handshakes under way. A handshake is about half a millisecond of a frontend's CPU time: these are 16 ms of work, more
# than a worker of the same network takes to answer, and little beside the time limit where many frontends start at once
# or share a machine.
MOST_UNDER_WAY = 32
# A host whose kernel has not accepted a connection by now may be cut off: others need not wait for it.
ACCEPT_S = 0.25
# Before a handshake that failed is tried again: doubled each time, and any time from half of it.
RETRY_S, MOST_RETRY_S, MOST_DOUBLINGS = 0.1, 1.0, 4
FAILURES_BEFORE_LOG = 4
_KEY_BYTES = 32


class Connection(msgspec.Struct):
    """A frontend's connection to one worker."""

    worker_id: str
    request_address: str
    load_address: str
    key: str  # the worker's; empty where it is not encrypted
    route: bytes = b""  # its routing id on the frontend's socket, another one for each try
    waits: bool = False  # for handshakes of others to end
    accepted: bool = False  # by the worker's kernel; a handshake follows
    open: bool = False
    subscribed: bool = False  # to its load, once it was open
    failures: int = 0  # handshakes that failed, one after the other
    refused: str = ""  # why ZMQ does not take its addresses or its key

    @property
    def addresses(self) -> tuple[str, str]:
        return self.request_address, self.load_address


class Connections:
    """All connections, by worker and by route. Calls `on_open` and `on_broken` for each."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        requests: Socket,
        published: Socket,
        *,
        encrypted: bool,
        on_open: Callable[[Connection], None],
        on_broken: Callable[[Connection], None],
    ) -> None:
        self._context, self._requests, self._published = context, requests, published
        self._encrypted = encrypted
        self._on_open, self._on_broken = on_open, on_broken
        self._numbers = itertools.count(1)
        self.by_worker: dict[str, Connection] = {}
        self.by_route: dict[bytes, Connection] = {}
        self._by_address: dict[str, Connection] = {}  # by both addresses, which ZMQ's monitor reports
        self._waiting: list[Connection] = []  # and some that wait no more
        self._under_way: dict[str, asyncio.TimerHandle] = {}  # by address; at the time limit others begin
        self._tasks: list[asyncio.Task[None]] = []

    def connect(self, worker_id: str, request_address: str, load_address: str, key: str) -> None:
        """Connect, or reconnect when the addresses changed.

        Another worker with the same address is disconnected, since an address has one process. Raises AddressError,
        also if only one of the two ends has a key.
        """
        known = self.by_worker.get(worker_id)
        given = (request_address, load_address, key)
        if known is not None and (known.request_address, known.load_address, known.key) == given:
            return
        for address in (request_address, load_address):
            check_address(address)
        if key and not _is_key(key):
            raise AddressError(f"{request_address} has {key!r} in place of a public key")
        if bool(key) != self._encrypted:
            raise AddressError(
                f"{request_address} is {'encrypted' if key else 'not encrypted'}, unlike this frontend's connections; "
                "start both with the same security.mesh"
            )
        self.disconnect(worker_id)
        for address in (request_address, load_address):
            if (other := self._by_address.get(address)) is not None:
                self._broke(other)
                self.disconnect(other.worker_id)
        self._start()
        connection = Connection(worker_id, request_address, load_address, key)
        self.by_worker[worker_id] = connection
        self._by_address[request_address] = self._by_address[load_address] = connection
        self._wait(connection)
        if connection.refused:
            raise AddressError(connection.refused)

    def disconnect(self, worker_id: str) -> None:
        connection = self.by_worker.pop(worker_id, None)
        if connection is None:
            return
        for address in connection.addresses:
            self._by_address.pop(address, None)
        self._end(connection)

    def is_coming(self, worker_id: str) -> bool:
        """Whether the connection waits for others, or the worker's kernel has accepted it and the handshake goes on."""
        connection = self.by_worker.get(worker_id)
        return connection is not None and (connection.waits or connection.accepted)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks, self._waiting = [], []
        for timer in self._under_way.values():
            timer.cancel()

    def _wait(self, connection: Connection) -> None:
        connection.waits = True
        self._waiting.append(connection)
        self._make()

    def _make(self) -> None:
        """Begin connections, in any order: frontends that start together are not to ask the same workers first."""
        while self._waiting and len(self._under_way) < MOST_UNDER_WAY:
            number = random.randrange(len(self._waiting))
            self._waiting[number], self._waiting[-1] = self._waiting[-1], self._waiting[number]
            connection = self._waiting.pop()
            if not connection.waits:
                continue
            connection.waits = False
            connection.route = b"%d" % next(self._numbers)
            self.by_route[connection.route] = connection
            self._requests.setsockopt(zmq.CONNECT_ROUTING_ID, connection.route)
            self._begin(self._requests, connection, connection.request_address)

    def _begin(self, socket: Socket, connection: Connection, address: str) -> None:
        """Whoever names a worker again whose connection ZMQ refuses has it tried again."""
        try:
            if connection.key:
                socket.setsockopt(zmq.CURVE_SERVERKEY, connection.key.encode())
            connect(socket, address)
        except zmq.ZMQError as error:
            connection.refused = f"{address} cannot be connected to: {error}"
            log.warning("worker %s: %s", connection.worker_id, connection.refused)
            self._broke(connection)
            self.disconnect(connection.worker_id)
        else:
            self._count(address, ACCEPT_S)

    def _count(self, address: str, limit_s: float) -> None:
        """Count a handshake as under way until it ends, `limit_s` at most."""
        self._uncount(address)
        self._under_way[address] = asyncio.get_running_loop().call_later(limit_s, self._done, address)

    def _uncount(self, address: str) -> None:
        if (timer := self._under_way.pop(address, None)) is not None:
            timer.cancel()

    def _done(self, address: str) -> None:
        """This handshake has ended, or waits for a host that may be cut off: others begin."""
        self._uncount(address)
        self._make()

    def _end(self, connection: Connection) -> None:
        """Close the connection's sockets."""
        connection.waits = connection.accepted = connection.subscribed = False
        self.by_route.pop(connection.route, None)
        for socket, address in zip((self._requests, self._published), connection.addresses, strict=True):
            with contextlib.suppress(zmq.ZMQError):  # not begun yet, or ZMQ has given it up where it was denied
                socket.disconnect(address)
            self._uncount(address)
        self._make()

    def _start(self) -> None:
        if self._tasks:
            return
        events = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | EVENTS_REFUSED
        for socket in (self._requests, self._published):
            noticed = monitor(socket, self._context, events)
            self._tasks.append(asyncio.create_task(self._notice(socket, noticed)))

    async def _notice(self, socket: Socket, events: zmq.asyncio.Socket) -> None:
        while True:
            event = await recv_monitor_message(events)
            try:
                self._noticed(socket, event["endpoint"].decode(), event["event"])
            except Exception:  # else nothing would be known of any connection any more
                log.exception("could not handle news of the connection to %s", event["endpoint"])

    def _noticed(self, socket: Socket, address: str, happened: int) -> None:
        connection = self._by_address.get(address)
        if connection is None or connection.route not in self.by_route:
            return  # late news of a try that was given up
        if happened == zmq.EVENT_CONNECTED:
            self._count(address, HANDSHAKE_TIMEOUT_MS / 1000)
        if socket is self._requests:
            self._requests_changed(connection, happened)
        elif happened == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._failed(connection, happened)
        if happened != zmq.EVENT_CONNECTED:
            self._done(address)

    def _requests_changed(self, connection: Connection, happened: int) -> None:
        connection.accepted = happened == zmq.EVENT_CONNECTED
        if happened == zmq.EVENT_CONNECTED:
            return
        if happened == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            connection.open, connection.failures = True, 0
            if not connection.subscribed:
                connection.subscribed = True
                self._begin(self._published, connection, connection.load_address)
            if connection.open:
                self._on_open(connection)
        elif happened == zmq.EVENT_DISCONNECTED:
            self._broke(connection)
        else:
            self._failed(connection, happened)

    def _failed(self, connection: Connection, event: int) -> None:
        """A handshake failed: it is tried again after a while, when others are not under way."""
        connection.failures += 1
        if connection.failures == FAILURES_BEFORE_LOG:  # one or two may be a process that is ending
            log.warning(
                "worker %s at %s and this frontend do not accept each other's keys (%s): both must use the same Redis, "
                "namespace and security.mesh; if they do, something else listens there",
                connection.worker_id,
                connection.request_address,
                zmq.Event(event).name,
            )
        self._broke(connection)
        self._end(connection)
        retry_s = min(MOST_RETRY_S, RETRY_S * 2 ** min(connection.failures - 1, MOST_DOUBLINGS))
        asyncio.get_running_loop().call_later(retry_s * random.uniform(0.5, 1.0), self._retry, connection)

    def _retry(self, connection: Connection) -> None:
        if self.by_worker.get(connection.worker_id) is connection and self._tasks:
            self._wait(connection)

    def _broke(self, connection: Connection) -> None:
        if connection.open:
            connection.open = False
            self._on_broken(connection)


def _is_key(text: str) -> bool:
    """Whether ZMQ takes it for a public key. Not all groups of five characters are four bytes (Z85, RFC 32)."""
    try:
        return len(z85.decode(text)) == _KEY_BYTES
    except (ValueError, KeyError, struct.error):
        return False
