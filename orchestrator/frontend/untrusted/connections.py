"""Connections of clients: where they arrive, what head a request may have, and when they end.

A head is bounded because it is kept until it is complete, before anybody has asked for a key or counted a body's bytes;
so is what follows a body, and how many requests may wait behind one that is being answered. A client that does not go
on with its request, or does not read its answer, is left. A connection whose last answer did not say that it ends is
closed only when it has been idle: its client may have sent the next request already. One for which the process hardly
had a descriptor left is answered 503.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import errno
import fcntl
import logging
import math
import resource
import select
import socket
import struct
import termios
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from orchestrator.config.settings import ConfigError
from orchestrator.process.tasks import left_s

log = logging.getLogger("pd.frontend")

MAX_HEAD_BYTES = 1 << 18  # a request's line and headers, and headers after a body
MAX_PIPELINED = 100  # one read may have ten thousand, of which each would take a hundred times its bytes
_REFUSAL = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
_HANDSHAKE_S = 0.2  # a connection that has begun is made within this time: a few round trips
_ACCEPT_S = 2.0  # and accepted within this time more
# How long a connection has no request before a server that drains closes it. Clients made with httpx, as OpenAI's are,
# use it no more then: they keep one for 5 s (https://www.python-httpx.org/advanced/resource-limits/), which begin when
# they read the answer, and busy ones read it late.
_IDLE_END_S = 8.0
_IDLE_PART = 0.75  # of the time in which the server has to end, if that is less
_LOOK_S = _TICK_S = 0.1
_LOOK_PART = 0.1  # of the time that clients have: how often they are looked at
_SPARE_DESCRIPTORS = 32  # for workers, Redis and files. With none left the event loop closes connections without a word
_TELL_AGAIN_S = 10.0
_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
# struct sock_filter (linux/filter.h): the flags of a TCP header; those that only ask for a connection are dropped.
_NO_SYN = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load byte 13
        (0x54, 0, 0, 0x12),  # and SYN | ACK
        (0x15, 0, 1, 0x02),  # SYN alone?
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # keep
    )
)


def listen(host: str, port: int) -> socket.socket:
    """A socket that other frontends can share. Raises ConfigError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Accepted connections inherit it. Without it a token waits for the client's delayed acknowledgement (~40 ms).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        key = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        raise ConfigError(
            f"frontend.{key}: {host}:{port} cannot be listened on ({error.strerror}); free it or choose another"
        ) from None
    return listener


def stop_accepting(listener: socket.socket) -> None:
    """Drop requests for new connections; handshakes under way still complete. A client whose request was dropped
    repeats it after a second, and the kernel gives it to another frontend. Some sandboxes have no socket filters: there
    the listener goes on to accept new connections.
    """
    program = ctypes.create_string_buffer(_NO_SYN, len(_NO_SYN))
    attached = struct.pack("@HP", len(_NO_SYN) // 8, ctypes.addressof(program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)
    except OSError as error:
        log.warning(
            "no socket filter can be set here (%s): clients that connect while this frontend leaves may find their "
            "connection reset, and have to connect again",
            error.strerror,
        )


def _waiting(listeners: Sequence[socket.socket]) -> bool:
    """Whether a listener has connections that nobody has accepted yet."""
    poll = select.poll()
    for listener in listeners:
        poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))


class FrontendServer(uvicorn.Server):
    """A uvicorn server that can drain, and closes the connections of clients that make it wait for `client_timeout_s`.

    It has no signal handlers: uvicorn's own would end the process at once.
    """

    draining = False
    _idle_end_s = math.inf

    def __init__(self, config: uvicorn.Config, client_timeout_s: float) -> None:
        super().__init__(config)
        self._client_timeout_s, self._looked_at = client_timeout_s, 0.0

    async def main_loop(self) -> None:
        """uvicorn's, which calls `on_tick` ten times a second, by this process's ticks."""
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            await asyncio.sleep(left_s(_TICK_S))

    async def on_tick(self, counter: int) -> bool:
        """Sets the date of answers at each tenth call, and says whether the server is to end."""
        now = time.monotonic()
        if now - self._looked_at > self._client_timeout_s * _LOOK_PART:
            self._looked_at = now
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedHttp) and connection.waits_s(now) > self._client_timeout_s:
                    connection.transport.abort()  # to close it would wait until the client has read
        return await super().on_tick(counter)

    def end_idle(self) -> None:
        """Nobody else serves: idle connections are not waited for."""
        self._idle_end_s = 0.0

    async def drain(self, listeners: Sequence[socket.socket], within_s: float = math.inf) -> None:
        """Take no new connections, close each one after an answer that says so, and return when none is left.

        The kernel resets the connections in a listener's queue when the listener is closed, so they are accepted first.
        An answer that has begun cannot say any more that it is the last. Its connection stays open: the next answer
        says so, or the connection is closed when it has been idle for a while. `within_s`: the caller waits no longer.
        """
        self._idle_end_s = min(self._idle_end_s, _IDLE_END_S, _IDLE_PART * within_s)
        self.draining = True
        ends = (b"connection", b"close")
        self.config.encoded_headers.append(ends)
        self.server_state.default_headers = [*self.server_state.default_headers, ends]  # uvicorn does so once a second
        for connection in self.server_state.connections:
            if isinstance(connection, BoundedHttp):
                connection.end_with_next_answer()
        for listener in listeners:
            stop_accepting(listener)
        await asyncio.sleep(_HANDSHAKE_S)
        until = time.monotonic() + _ACCEPT_S
        while _waiting(listeners):
            if time.monotonic() > until:
                log.warning("more connections came than could be accepted within %g s: the rest is reset", _ACCEPT_S)
                break
            await asyncio.sleep(0)  # in which the event loop accepts one
        for server in self.servers:
            server.close()
        for listener in listeners:
            listener.close()
        began = time.monotonic()
        await asyncio.sleep(_LOOK_S)  # one that was accepted last is among the connections in the next turn of the loop
        while self.server_state.connections:
            if (now := time.monotonic()) - began > self._idle_end_s:
                for connection in list(self.server_state.connections):
                    if not isinstance(connection, BoundedHttp):
                        connection.shutdown()  # of a WebSocket: it tells the client
                    elif connection.idle_s(now) > self._idle_end_s:
                        connection.end()
            await asyncio.sleep(_LOOK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class BoundedHttp(HttpToolsProtocol):
    _unfinished = 0  # bytes since a head, a piece of a body or a request was complete
    _received = _drained = 0  # bytes received; times that the client has read what filled the buffer
    _awaited: tuple[int, ...] = ()  # what the client had to do and how far it was, as `waits_s` saw it last
    _since = 0.0  # when it was seen like that first, monotonic
    _running: RequestResponseCycle | None = None
    _free_since = 0.0  # when the connection was made, or its last answer was complete, monotonic

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._free_since = time.monotonic()
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # A socket gets the lowest number that is free (socket(2), open(2)): with a high one nearly all are taken.
        if transport.get_extra_info("socket").fileno() >= most - _SPARE_DESCRIPTORS >= 0:
            self.app = _TooMany(most)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._free_since = time.monotonic()

    def idle_s(self, now: float) -> float:
        """How long there has been no request; 0 while there is one, or a part of one has come."""
        answering = self.cycle is not None and not self.cycle.response_complete
        return 0.0 if answering or self._unfinished or _unread(self.transport) else now - self._free_since

    def end(self) -> None:
        """Close it. Over TLS the client has to say that it has heard so, which one that uses it no more does not."""
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.shutdown()

    def end_with_next_answer(self) -> None:
        """Let the answer that has not begun yet say that it is the last."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        if not _unread(self.transport):  # else it came while this process did not run
            super().timeout_keep_alive_handler()

    def waits_s(self, now: float) -> float:
        """How long the client was seen not to send what it has begun, or not to read what it is sent; 0 while it need
        not. A head must be complete in that time; of a body or an answer any progress begins it anew."""
        cycle = self.cycle
        awaited: tuple[int, ...] = ()
        if unsent := self.transport.get_write_buffer_size():
            awaited = (1, unsent, self._drained, _unacknowledged(self.transport))
        elif cycle is None or (self._unfinished and cycle.response_complete):
            awaited = (2,)
        elif cycle.more_body and not self.flow.read_paused:
            awaited = (3, self._received)
        if awaited != self._awaited:
            self._awaited, self._since = awaited, now
        return now - self._since if awaited else 0.0

    def resume_writing(self) -> None:
        self._drained += 1
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        running = self._running  # uvicorn has told the last request, which may wait behind this one
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, _Unframed(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def data_received(self, data: bytes) -> None:
        self._unfinished += len(data)
        self._received += len(data)
        super().data_received(data)
        if self._unfinished > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                said = f"the head of a request may have {MAX_HEAD_BYTES} bytes".encode()
                head = f"HTTP/1.1 {_REFUSAL.value} {_REFUSAL.phrase}\r\ncontent-type: text/plain\r\n"
                self.transport.write(
                    head.encode() + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(said) + said
                )
            self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        # It has been given the whole head, and says nothing of one that it cannot read, as that of a POST.
        if not getattr(self.transport.get_protocol(), "handshake_initiated", True):
            self.send_400_response("Invalid WebSocket request.")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._unfinished = 0
        if len(self.pipeline) > MAX_PIPELINED:
            self.pipeline.clear()
            self.transport.abort()
            raise ConnectionAbortedError(f"more than {MAX_PIPELINED} requests wait")  # so that no more are parsed

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unfinished = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._unfinished = 0


class _Unframed:
    """The ASGI app of a client of HTTP/1.0, which knows no chunks (RFC 9112, 6.1): an answer without a length ends with
    its connection. uvicorn would send it in chunks."""

    def __init__(self, app: Any, cycle: RequestResponseCycle) -> None:
        self._app, self._cycle, self._has_length = app, cycle, True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
                # As if the app had named a length. Each part then has just the bytes that uvicorn expects to be left.
                self._cycle.chunked_encoding = None if self._has_length else False
            elif not self._has_length:
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, answer)


class _TooMany:
    """The ASGI app of connections for which there is hardly a descriptor left: it answers 503."""

    _told_at = -math.inf  # when the log was told last, monotonic

    def __init__(self, most: int) -> None:
        said = f"this frontend has too many connections for its {most} file descriptors"
        self._answer = msgspec.json.encode({"error": {"message": said, "type": "Service Unavailable", "code": 503}})
        if time.monotonic() - _TooMany._told_at > _TELL_AGAIN_S:
            _TooMany._told_at = time.monotonic()
            log.warning("%s: more get 503; raise its limit (ulimit -n) or frontend.replicas", said)

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        said = {"content-type": "application/json", "retry-after": "1", "connection": "close"}
        headers = [(name.encode(), value.encode()) for name, value in said.items()]
        headers.append((b"content-length", b"%d" % len(self._answer)))
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": self._answer})


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes that the kernel has sent or is to send, and the client has not taken (tcp(7), SIOCOUTQ)."""
    return _asked(transport, termios.TIOCOUTQ)


def _unread(transport: asyncio.Transport) -> int:
    """Bytes of the client that the kernel has, and the event loop has not read (tcp(7), SIOCINQ)."""
    return _asked(transport, termios.FIONREAD)


def _asked(transport: asyncio.Transport, what: int) -> int:
    count = array.array("i", [0])
    with contextlib.suppress(OSError, ValueError):  # its descriptor is -1 once it is closed
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), what, count)
    return count[0]
