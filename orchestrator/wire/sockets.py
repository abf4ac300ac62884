"""ZMQ as both ends of the mesh use it: options, sending without waiting, reading, and events of connections.

A message is one frame, or one for each part of a very large message. Never several frames: libzmq 4.3.5 may go on with
the frames of another sender, or end the process, if a connection is closed while a message of several frames is read.
(`fq_t::pipe_terminated` in its `src/fq.cpp` moves the connection that is being read, and then looks for it in the first
place.)
"""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, Union, cast

import msgspec
import zmq
import zmq.asyncio

from orchestrator.wire.addresses import Listening, free_ports, in_url
from orchestrator.wire.messages import MessageError

log = logging.getLogger("pd.transport")

# Sockets take no larger frame, so a peer that was not let in costs no more memory.
MAX_FRAME_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 30
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - (MAX_MESSAGE_BYTES >> 4)  # its message also has all tokens generated so far
UNFINISHED_S = 60.0  # for which a part waits for the next one, at least
# A peer that does not read for this many messages is treated as unreachable rather than buffered without end.
HIGH_WATER_MARK = 200_000
# ZMQ's own threads ask and answer, so a busy event loop breaks no connection. Workers ask, and both ends notice a host
# that is cut off within the sum of both: a timeout begins with the next question. Frontends do not: each answer would
# end a timer, which ZMQ looks for among those of all connections, and with a thousand workers that is most of its work.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1500, 3000
# A worker whose reports are missing is given up long before this: it only ends connections to a host that is cut off.
PUBLISHED_HEARTBEAT_MS, PUBLISHED_HEARTBEAT_TIMEOUT_MS = 5000, 5000
# A worker asks for the first time after HEARTBEAT_MS. Until then, and for what a frontend has sent, the frontend's
# kernel notices a link that is cut: it asks after so long without news, and ends a connection when nothing has been
# acknowledged for 3 s. The kernel of a slow or stopped process answers, too. ZMQ takes whole seconds.
UNHEARD_S, ASK_AGAIN_S, UNACKNOWLEDGED_S = 1, 1, 3
CONNECT_TIMEOUT_MS = 2000  # the kernel's own retries would be minutes apart when a link is mended
HANDSHAKE_TIMEOUT_MS = 5000  # a peer that does not say who it is loses its connection
READ_BATCH = 256  # messages that are read from a socket before others run, however many there are

_ENCRYPTION_BYTES = 256  # that encryption adds to a frame, at most
EVENTS_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


Socket: TypeAlias = "zmq.Socket[bytes]"  # nothing of it waits


def make(context: zmq.asyncio.Context, kind: int) -> Socket:
    """A socket none of whose calls wait."""
    return cast(Socket, context.socket(kind, socket_class=cast(Any, zmq.Socket)))


class Sent(enum.Enum):
    """What became of a message. Only `YES` is true: the others say nothing about whether the peer lives, but
    `UNREACHABLE`."""

    YES = "sent"
    UNREACHABLE = "it is not connected"
    NOT_READ = "it does not read what it is sent"
    TOO_LARGE = "the message is too large"

    def __bool__(self) -> bool:
        return self is Sent.YES


def send(socket: Socket, message: list[bytes], *route: bytes) -> Sent:
    """Hand a header and its payload to ZMQ without waiting. A message that is too large is logged. A `Reader` of the
    same socket has to be told (`Reader.look`)."""
    try:
        for frame in frames_of(message):
            socket.send_multipart([*route, frame], flags=zmq.DONTWAIT)
    except MessageError as too_large:
        log.error("not sent: %s", too_large)
        return Sent.TOO_LARGE
    except zmq.Again:
        return Sent.NOT_READ
    except zmq.ZMQError:
        return Sent.UNREACHABLE
    return Sent.YES


class Woken(Exception):
    """The wait was ended without a message."""


class Reader:
    """Reads messages of a socket by its descriptor in the event loop: no future for a message that is there already.

    The descriptor tells of changes, once each (https://libzmq.readthedocs.io/en/latest/zmq_getsockopt.html, ZMQ_FD),
    and whatever is done with the socket may take note of one: hence `look`.
    """

    def __init__(self, socket: Socket) -> None:
        self._socket, self._left, self._woken = socket, READ_BATCH, False
        self._waiting: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def next(self) -> tuple[zmq.Frame, list[bytes]]:
        """The first frame, which knows who has sent it, and the others. One task at a time may wait. Raises Woken."""
        self._left -= 1
        if not self._left:
            self._left = READ_BATCH
            await asyncio.sleep(0)
        while True:
            if self._woken:
                self._woken = False
                raise Woken
            try:
                first = self._socket.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                await self._change()
            else:
                return first, self._socket.recv_multipart() if first.more else []

    async def all(self, pause_s: float = 0.0) -> list[bytes]:
        """All frames that are there, at most READ_BATCH and at least one. One task at a time may wait.

        With `pause_s` what comes is not looked at before: of many senders each message would wake the process by
        itself."""
        if not self._left:  # a full batch was read
            self._left = READ_BATCH
            await asyncio.sleep(0)
        while not (found := self._take()):
            if pause_s:
                self.close()
                await asyncio.sleep(pause_s)
            else:
                await self._change()
        self._left = READ_BATCH - len(found)
        return found

    def _take(self) -> list[bytes]:
        found, recv = list[bytes](), self._socket.recv
        try:
            while len(found) < READ_BATCH:
                # Bytes, and without asking whether more follow: this is most of what a frontend of a large fleet does.
                found.append(recv(zmq.DONTWAIT))
        except zmq.Again:
            pass
        return found

    def look(self) -> None:
        """Whoever waits goes on if a message has come. Call it when something was done with the socket."""
        # Read also when no task waits: until then the descriptor stays readable.
        events = cast(int, self._socket.getsockopt(zmq.EVENTS))
        if events & zmq.POLLIN:
            self._go_on()

    def wake(self) -> None:
        """Whoever waits gets Woken; else who calls `next` next."""
        self._woken = True
        self._go_on()

    def _go_on(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _change(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self.look)
        self._waiting = self._loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def close(self) -> None:
        """Watch the descriptor no more. Before the socket is closed."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None


def configure(socket: Socket, linger_ms: int) -> None:
    for option, value in {
        zmq.LINGER: linger_ms,
        zmq.SNDHWM: HIGH_WATER_MARK,
        zmq.RCVHWM: HIGH_WATER_MARK,
        zmq.CONNECT_TIMEOUT: CONNECT_TIMEOUT_MS,
        zmq.RECONNECT_IVL: 50,
        zmq.RECONNECT_IVL_MAX: 1000,
        zmq.HANDSHAKE_IVL: HANDSHAKE_TIMEOUT_MS,
        zmq.MAXMSGSIZE: MAX_FRAME_BYTES + _ENCRYPTION_BYTES,
    }.items():
        socket.setsockopt(option, value)


def ask_peers(socket: Socket) -> None:
    """Ask each peer of a worker's socket now and then whether it is there; both ends give up one that is not."""
    published = socket.type == zmq.PUB
    interval_ms = PUBLISHED_HEARTBEAT_MS if published else HEARTBEAT_MS
    timeout_ms = PUBLISHED_HEARTBEAT_TIMEOUT_MS if published else HEARTBEAT_TIMEOUT_MS
    socket.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, interval_ms + timeout_ms)  # for the peer, from one question to the next


def monitor(socket: Socket, context: zmq.asyncio.Context, events: int) -> zmq.asyncio.Socket:
    """Where these events of a socket's connections can be read. Its queue has no limit: ZMQ's threads would wait."""
    address = f"inproc://monitor-{id(socket)}"
    socket.monitor(address, events)
    reader = context.socket(zmq.PAIR)
    reader.setsockopt(zmq.RCVHWM, 0)
    reader.connect(address)
    return reader


def connect(socket: Socket, address: str) -> None:
    """Connect. The kernel ends the connection when the peer's kernel does not answer."""
    for option, value in {
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: UNHEARD_S,
        zmq.TCP_KEEPALIVE_INTVL: ASK_AGAIN_S,
        zmq.TCP_KEEPALIVE_CNT: UNACKNOWLEDGED_S // ASK_AGAIN_S,
        zmq.TCP_MAXRT: UNACKNOWLEDGED_S * 1000,
    }.items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.IPV6, "[" in address)  # read when a connection is made; with it IPv4 would be shown as IPv6
    socket.connect(address)


def bind(socket: Socket, listening: Listening) -> int:
    """Listen at a free port. Returns it. Raises OSError."""
    host = listening.bind
    socket.setsockopt(zmq.IPV6, ":" in host)
    for port in free_ports(host, listening.ports):
        try:
            socket.bind(f"tcp://{in_url(host)}:{port}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:  # else another process was faster
                raise
            continue
        return port
    raise OSError(errno.EADDRINUSE, f"no free port of workers.ports at {host}")


# ---- messages as frames ----------------------------------------------------------------------------------------

_PART_BYTES = 64  # that `Part` adds to its data, at most
_REMEMBERED = 64  # broken messages: as many may have been on their way when a connection broke
_encoder = msgspec.msgpack.Encoder()


class Part(msgspec.Struct, frozen=True):
    """A part of a message that is too large for one frame. The parts are sent in order."""

    message: int  # a random number, the same in all parts
    index: int
    count: int
    data: bytes


_of_frame = msgspec.msgpack.Decoder(Union[list[bytes], Part])
_of_whole = msgspec.msgpack.Decoder(list[bytes])
D = TypeVar("D")


def frames_of(message: Sequence[bytes]) -> Sequence[bytes]:
    """The frames to send, one by one. `message`: a header and its payload. Raises MessageError for one above
    MAX_MESSAGE_BYTES."""
    whole = _encoder.encode(message)
    if len(whole) <= MAX_FRAME_BYTES:
        return (whole,)
    if len(whole) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(whole)} bytes; the largest may have {MAX_MESSAGE_BYTES}")
    size = MAX_FRAME_BYTES - _PART_BYTES
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    number = secrets.randbits(63)
    return [_encoder.encode(Part(number, index, len(pieces), piece)) for index, piece in enumerate(pieces)]


class Assembler:
    """Makes messages of the frames that a socket receives. Parts of several messages may come in turns."""

    def __init__(self) -> None:
        # By `Part.message`, when the last part came, and the parts so far; first the one whose last part is oldest.
        self._unfinished: dict[int, tuple[float, list[bytes]]] = {}
        self._broken: deque[int] = deque(maxlen=_REMEMBERED)  # messages that came without their first parts

    @property
    def unfinished_parts(self) -> int:
        return sum(len(pieces) for _, pieces in self._unfinished.values())

    def take(self, frames: Iterable[bytes]) -> list[bytes] | None:
        """The message that was given to `frames_of`; None while parts of it are missing. Raises MessageError; for a
        message without its first parts once, not for each part.

        `frames`: those that ZMQ delivered as one message.
        """
        frame, *more = frames
        if more:
            raise MessageError(f"a message of {1 + len(more)} frames; all have one")
        found = _decoded(_of_frame, frame)
        if isinstance(found, Part):
            whole = self._add(found)
            return None if whole is None else _decoded(_of_whole, whole)
        if self._unfinished:
            self._forget_late()
        return found

    def _forget_late(self) -> None:
        """Those whose sender has gone: they have up to MAX_MESSAGE_BYTES, and the next large message may be long in
        coming."""
        while self._unfinished:
            number, (came_at, _) = next(iter(self._unfinished.items()))
            if time.monotonic() - came_at <= UNFINISHED_S:
                return
            del self._unfinished[number]

    def _add(self, part: Part) -> bytes | None:
        """All parts together when this is the last one."""
        _, pieces = self._unfinished.pop(part.message, (0.0, []))
        self._forget_late()  # not this message, whose next part has come
        if part.message in self._broken:
            return None
        if len(pieces) != part.index:
            self._broken.append(part.message)
            raise MessageError(f"part {part.index + 1} of {part.count} of a message whose other parts did not come")
        pieces.append(part.data)
        if part.index == part.count - 1:
            return b"".join(pieces)
        self._unfinished[part.message] = time.monotonic(), pieces
        # Parts count, not bytes: a member could send empty ones without end.
        while self.unfinished_parts > -(-MAX_MESSAGE_BYTES // (MAX_FRAME_BYTES - _PART_BYTES)):
            del self._unfinished[next(iter(self._unfinished))]
        return None


def _decoded(decoder: msgspec.msgpack.Decoder[D], data: bytes) -> D:
    try:
        found = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"not a framed message ({len(data)} bytes): {error}") from error
    if not found:
        raise MessageError("empty message")
    return found
