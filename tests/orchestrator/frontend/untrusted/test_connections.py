"""A client that never ends what it sends before or after a body is refused; whoever does is served.

So is whoever connects while one of two frontends of a port ends. A client that waits for nothing is disconnected."""

import asyncio
import contextlib
import http.client
import logging
import math
import os
import resource
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from support_tls import make_certificate
from support_wait import DEADLINE_S, until

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

import uvicorn
import uvloop

from orchestrator.frontend.untrusted import connections
from orchestrator.frontend.untrusted.connections import (
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    BoundedHttp,
    FrontendServer,
    listen,
    stop_accepting,
)

ENDLESS = 16 * MAX_HEAD_BYTES
HEAD = b"POST / HTTP/1.1\r\nhost: h\r\n"
ASKED_TO_STAY = HEAD + b"content-length: 0\r\n\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers with the length of the body."""
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message["body"]), message["more_body"]
    said = str(length).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
    await send({"type": "http.response.body", "body": said})


@contextlib.asynccontextmanager
async def served(
    app: Any, client_timeout_s: float = 60.0, **tls: Any
) -> AsyncIterator[tuple[FrontendServer, socket.socket]]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=BoundedHttp, lifespan="off", log_config=None, access_log=False, **tls)
    server = FrontendServer(config, client_timeout_s)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield server, listener
    finally:
        server.should_exit = server.force_exit = True
        await serving


@contextlib.asynccontextmanager
async def connected(
    app: Any = app, client_timeout_s: float = 60.0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with served(app, client_timeout_s) as (_, listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            yield reader, writer
        finally:
            writer.close()


async def send(writer: asyncio.StreamWriter, *parts: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()


@pytest.mark.parametrize(
    ("begin", "again", "answered"),
    [
        (b"GET /", b"a" * 65536, True),
        (HEAD + b"x: ", b"a" * 65536, True),
        (HEAD, b"x: a\r\n" * 10_000, True),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"x: a\r\n" * 10_000, False),
    ],
    ids=["path", "header", "headers", "trailers"],
)
async def test_endless_request_is_cut_off(begin: bytes, again: bytes, answered: bool) -> None:
    async with asyncio.timeout(DEADLINE_S), connected() as (reader, writer):
        await send(writer, begin, *[again] * (ENDLESS // len(again)))
        got = b""
        with contextlib.suppress(ConnectionError):
            got = await reader.read()  # it ends
        assert not got.startswith(b"HTTP/1.1 200")
        if answered and got:
            assert got.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")


async def test_request_within_limits_is_served() -> None:
    async with asyncio.timeout(DEADLINE_S), connected() as (reader, writer):
        long = HEAD + b"x: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n"
        await send(writer, long + b"content-length: 1\r\n\r\na", long + b"content-length: 0\r\n\r\n")
        pieces = [b"1\r\na\r\n"] * 200_000  # more bytes beside the body than a head may have
        await send(writer, CHUNKED, *(b"".join(pieces[at : at + 1000]) for at in range(0, len(pieces), 1000)))
        await send(writer, b"0\r\nx: a\r\n\r\n")
        for length in (b"1", b"0", b"200000"):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(length)) == length


@pytest.mark.parametrize(("head", "framed"), [(b"HTTP/1.0", False), (b"HTTP/1.1\r\nconnection: close", True)])
async def test_an_answer_without_a_length_has_no_chunks_for_http_1_0(head: bytes, framed: bool) -> None:
    async def streams(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for said in (b"a", b"", b"bc"):
            await send({"type": "http.response.body", "body": said, "more_body": True})
        await send({"type": "http.response.body"})

    async with asyncio.timeout(DEADLINE_S), connected(streams) as (reader, writer):
        await send(writer, b"GET / " + head + b"\r\nhost: h\r\n\r\n")
        told, _, said = (await reader.read()).partition(b"\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200") and b"connection: close" in told
    assert (b"chunked" in told, said) == ((True, b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n") if framed else (False, b"abc"))


async def test_an_answer_with_a_length_has_it_for_http_1_0_too() -> None:
    async with asyncio.timeout(DEADLINE_S), connected() as (reader, writer):
        await send(writer, HEAD.replace(b"1.1", b"1.0") + b"content-length: 1\r\n\r\na")
        told, _, said = (await reader.read()).partition(b"\r\n\r\n")
    assert b"content-length: 1" in told and b"chunked" not in told and said == b"1"


UPGRADE = b"host: h\r\nconnection: upgrade\r\nupgrade: websocket\r\n"


@pytest.mark.parametrize(
    "asked",
    [
        b"POST / HTTP/1.1\r\n" + UPGRADE + b"content-length: 2\r\n\r\n{}",
        b"GET / HTTP/1.1\r\n" + UPGRADE + b"content-length: 2\r\n\r\n{}",
        b"GET / HTTP/1.1\r\n" + UPGRADE + b"x: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + UPGRADE + b"\r\n",
    ],
    ids=["POST", "body", "long header", "no key"],
)
async def test_what_cannot_become_a_websocket_is_refused_at_once(asked: bytes) -> None:
    async with asyncio.timeout(DEADLINE_S), connected() as (reader, writer):
        await send(writer, asked)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")


CLIENT_S = 0.5
WITH_BODY = HEAD + b"content-length: 1000\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "again"),
    [(b"", b""), (b"GET / HT", b""), (b"GET /", b"a"), (WITH_BODY + b"a", b""), (ASKED_TO_STAY + b"GET /", b"a")],
    ids=["nothing", "line", "drops of a head", "body", "second head"],
)
async def test_client_that_does_not_go_on_is_disconnected(begin: bytes, again: bytes) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        while again:
            await send(writer, again)
            await asyncio.sleep(CLIENT_S / 5)

    async with asyncio.timeout(DEADLINE_S), connected(client_timeout_s=CLIENT_S) as (reader, writer):
        await send(writer, begin)
        dripping = asyncio.create_task(drip(writer))
        with contextlib.suppress(ConnectionError):
            await reader.read()  # it ends
        dripping.cancel()


def endless(begun: asyncio.Event, left: asyncio.Event) -> Any:
    """An app that streams until it is told that the client has left."""

    async def stream(send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"a" * 65536, "more_body": True})
            await asyncio.sleep(0.01)

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await receive()
        streaming = asyncio.create_task(stream(send))
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        streaming.cancel()
        left.set()

    return app


@pytest.mark.slow
async def test_client_that_does_not_read_is_disconnected() -> None:
    begun, left = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(DEADLINE_S), connected(endless(begun, left), CLIENT_S) as (_, writer):
        await send(writer, ASKED_TO_STAY)
        await left.wait()


async def test_client_that_leaves_with_a_second_request_waiting_is_noticed() -> None:
    begun, left = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(DEADLINE_S), connected(endless(begun, left)) as (reader, writer):
        await send(writer, ASKED_TO_STAY, ASKED_TO_STAY)
        await begun.wait()
        await reader.readexactly(1 << 17)
        writer.transport.abort()
        await left.wait()


@pytest.mark.parametrize(("count", "served_all"), [(MAX_PIPELINED, True), (10 * MAX_PIPELINED, False)])
async def test_requests_that_wait_behind_another_are_bounded(count: int, served_all: bool) -> None:
    go_on, left = asyncio.Event(), asyncio.Event()

    async def waits(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await receive()
        leaving = asyncio.create_task(receive())
        await asyncio.wait({leaving, asyncio.create_task(go_on.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            left.set()
            return
        leaving.cancel()
        await app(scope, AsyncMock(return_value={"type": "http.request", "body": b"", "more_body": False}), send)

    async with asyncio.timeout(DEADLINE_S), served(waits) as (server, listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        await send(writer, ASKED_TO_STAY * count)
        if served_all:
            go_on.set()
            for _ in range(count):
                assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
        else:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            await left.wait()
            assert not server.server_state.connections
        writer.close()


@pytest.mark.slow
async def test_slow_clients_are_served() -> None:
    """Also when the answer takes longer than a client may, or the client reads and writes a little at a time."""
    pieces = 300

    async def late(scope: dict[str, Any], receive: Any, send: Any) -> None:
        length, more = 0, True
        while more:
            message = await receive()
            length, more = length + len(message["body"]), message["more_body"]
        await asyncio.sleep(3 * CLIENT_S)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-got", b"%d" % length)]})
        for left in reversed(range(pieces)):
            await send({"type": "http.response.body", "body": b"a" * 65536, "more_body": left > 0})

    async with asyncio.timeout(60), connected(late, CLIENT_S) as (reader, writer):
        writer.write(HEAD + b"content-length: 20\r\n\r\n")
        for _ in range(20):
            writer.write(b"a")
            await asyncio.sleep(CLIENT_S / 5)
        assert b"x-got: 20\r\n" in await reader.readuntil(b"\r\n\r\n")
        got = 0
        while got < pieces * 65536:
            got += (await reader.read(1 << 20)).count(b"a")
            await asyncio.sleep(CLIENT_S / 20)


ENOUGH = 50
ASKED = HEAD + b"connection: close\r\ncontent-length: 0\r\n\r\n"


def connect(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(ASKED)
    return client


def answer(client: socket.socket) -> str:
    """The first line, or what went wrong."""
    try:
        with client, client.makefile("rb") as told:
            return told.readline().decode().strip()
    except OSError as error:
        return repr(error)


@pytest.mark.slow
@pytest.mark.parametrize("crowd", [0, 200])
def test_clients_are_served_while_one_frontend_drains(crowd: int) -> None:
    """With a crowd, many wait to be accepted when it begins to end; without, they come all the time."""
    answers: list[str] = []

    async def run() -> None:
        listeners = [listen("127.0.0.1", 0)]
        port = listeners[0].getsockname()[1]
        listeners.append(listen("127.0.0.1", port))
        config = dict[str, Any](http=BoundedHttp, lifespan="off", log_config=None, access_log=False)
        servers = [FrontendServer(uvicorn.Config(app, **config), 60.0) for _ in listeners]
        serving = [
            asyncio.create_task(server.serve(sockets=[listener]))
            for server, listener in zip(servers, listeners, strict=True)
        ]
        await until(lambda: all(server.started for server in servers))
        drained = threading.Event()

        def storm() -> None:
            while not drained.is_set():
                try:
                    answers.append(answer(connect(port)))
                except OSError as error:
                    answers.append(repr(error))

        storms = [asyncio.create_task(asyncio.to_thread(storm)) for _ in range(4 if not crowd else 0)]
        waiting = [connect(port) for _ in range(crowd)]
        await servers[0].drain(listeners[:1])
        await until(lambda: not storms or len(answers) >= ENOUGH)
        drained.set()
        answers.extend([await asyncio.to_thread(answer, client) for client in waiting])
        await asyncio.gather(*storms)
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)

    uvloop.run(asyncio.wait_for(run(), 60))
    assert len(answers) >= ENOUGH
    assert set(answers) == {"HTTP/1.1 200 OK"}


async def test_draining_listener_completes_handshakes_only() -> None:
    listener = listen("127.0.0.1", 0)
    listener.listen()
    port = listener.getsockname()[1]
    begun = socket.create_connection(("127.0.0.1", port))
    stop_accepting(listener)
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", port), timeout=0.5)
    accepted, _ = listener.accept()
    begun.sendall(b"a")
    assert accepted.recv(1) == b"a"
    for each in (begun, accepted, listener):
        each.close()


def test_frontend_drains_without_socket_filters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "pd")
    monkeypatch.setattr(connections, "_SO_ATTACH_FILTER", 9999)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop_accepting(listener)
    assert "no socket filter can be set here (Protocol not available)" in caplog.text


def test_client_that_is_accepted_last_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handshake is completed at the last moment, and it sends its request later."""
    clients, waiting = list[socket.socket](), connections._waiting

    def late(listeners: list[socket.socket]) -> bool:
        if not clients:
            clients.append(socket.create_connection(listeners[0].getsockname()))
        return waiting(listeners)

    monkeypatch.setattr(connections, "stop_accepting", lambda listener: None)
    monkeypatch.setattr(connections, "_waiting", late)

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), served(app) as (server, listener):
            await until(lambda: server.started)
            draining = asyncio.create_task(server.drain([listener]))
            await asyncio.wait({draining}, timeout=4 * connections._HANDSHAKE_S)
            assert clients and not draining.done()
            reader, writer = await asyncio.open_connection(sock=clients[0])
            await send(writer, ASKED_TO_STAY)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            await draining

    uvloop.run(run())


class Gated:
    """An app that begins an answer, or waits before it begins one, until it is told to go on."""

    def __init__(self, begins: bool) -> None:
        self.begins, self.asked, self.go_on = begins, asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        await receive()
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        if self.begins:
            await send(start)
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        self.asked.set()
        await self.go_on.wait()
        if not self.begins:
            await send(start)
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b", "more_body": False})


@pytest.mark.parametrize(("idle_end_s", "within_s"), [(0.5, math.inf), (2 * DEADLINE_S, 0.7)])
@pytest.mark.parametrize("begins", [True, False], ids=["answer begun", "answer not begun"])
async def test_draining_frontend_closes_no_connection_without_having_said_so(
    begins: bool, idle_end_s: float, within_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends its next request right after the last byte of an answer that could not say that it is the last;
    meanwhile idle connections have been closed."""
    monkeypatch.setattr(connections, "_IDLE_END_S", idle_end_s)
    gated = Gated(begins)
    async with asyncio.timeout(DEADLINE_S), served(gated) as (server, listener):
        address = listener.getsockname()
        (idle, idle_writer), (reader, writer) = [await asyncio.open_connection(*address) for _ in range(2)]
        await send(writer, ASKED_TO_STAY)
        await gated.asked.wait()
        draining = asyncio.create_task(server.drain([listener], within_s))
        assert await idle.read() == b""
        gated.go_on.set()
        head = await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(2) == b"ab"
        if begins:
            assert b"connection: close" not in head
            await send(writer, ASKED_TO_STAY)
            head = await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(2) == b"ab"
        assert b"connection: close" in head
        assert await reader.read() == b""
        await draining
        for each in (idle_writer, writer):
            each.close()


@contextlib.asynccontextmanager
async def kept_alive() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, BoundedHttp]]:
    """The client's end of a connection that has had one answer, and the server's."""
    async with served(app) as (server, listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        await send(writer, ASKED_TO_STAY)
        await reader.readuntil(b"\r\n\r\n0")
        (connection,) = server.server_state.connections
        assert isinstance(connection, BoundedHttp)
        yield reader, writer, connection
        writer.close()


async def test_no_idle_connection_is_waited_for_once_nobody_else_serves() -> None:
    async with asyncio.timeout(DEADLINE_S), served(app) as (server, listener):
        idle, idle_writer = await asyncio.open_connection(*listener.getsockname())
        draining = asyncio.create_task(server.drain([listener], 2 * DEADLINE_S))
        await asyncio.sleep(0.5)
        assert not draining.done()
        server.end_idle()
        assert await idle.read() == b""
        await draining
        idle_writer.close()


async def test_a_client_that_does_not_hear_that_its_connection_ends_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TLS it would have to answer: one whose connection lies in a pool reads nothing."""
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 10 * DEADLINE_S)  # type: ignore[attr-defined]
    certificate, key = make_certificate(tmp_path, "IP:127.0.0.1")
    async with served(app, ssl_certfile=certificate, ssl_keyfile=key) as (server, listener):
        trust = ssl.create_default_context(cafile=certificate)
        client = http.client.HTTPSConnection(*listener.getsockname(), context=trust)

        def ask() -> bytes:
            client.request("GET", "/")
            return client.getresponse().read()

        await asyncio.to_thread(ask)
        server.end_idle()
        await server.drain([listener], 10 * DEADLINE_S)
        client.close()


async def test_connection_whose_next_request_has_come_is_not_idle() -> None:
    """The process did not run while it came, and looks for idle connections before it reads."""
    async with kept_alive() as (reader, writer, connection):
        later = asyncio.get_running_loop().time() + 100
        assert connection.idle_s(later) > 90
        os.write(writer.get_extra_info("socket").fileno(), ASKED_TO_STAY)  # nothing is read until this test waits
        assert connection.idle_s(later) == 0
        connection.timeout_keep_alive_handler()
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")


async def test_connection_that_has_closed_is_looked_at_without_an_error() -> None:
    """Its timers may come due, and whoever looks for idle connections may have listed it, before it is forgotten."""
    async with kept_alive() as (reader, writer, connection):
        connection.transport.close()
        assert await reader.read() == b""
        assert connection.transport.get_extra_info("socket").fileno() == -1
        connection.timeout_keep_alive_handler()
        assert connection.idle_s(connection._free_since) == 0


async def test_who_finds_hardly_a_descriptor_left_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with served(app) as (_, listener), contextlib.AsyncExitStack() as open_ones:
        address = listener.getsockname()
        taken = max(map(int, os.listdir("/proc/self/fd")))  # some below it are free
        monkeypatch.setattr(resource, "getrlimit", lambda _: (taken + connections._SPARE_DESCRIPTORS + 20, hard))
        with caplog.at_level(logging.WARNING, logger="pd.frontend"):
            answers = []
            for _ in range(taken + 20):
                reader, writer = await asyncio.open_connection(*address)
                open_ones.callback(writer.close)
                writer.write(ASKED_TO_STAY)
                answers.append(await reader.readuntil(b"\r\n\r\n"))
        statuses = [int(answer.split()[1]) for answer in answers]
        assert statuses == sorted(statuses) and set(statuses) == {200, 503}, "who came first is served"
        assert b"retry-after: 1" in answers[-1] and b"connection: close" in answers[-1]
        assert "file descriptors" in str(await asyncio.wait_for(reader.read(), DEADLINE_S))
    assert [record.message for record in caplog.records if "ulimit" in record.message] == caplog.messages
    assert len(caplog.messages) == 1, "it is told once, not for each"
