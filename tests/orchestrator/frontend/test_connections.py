"""A client that never ends what it sends before or after a body is refused; whoever does is served.

So is whoever connects while one of two frontends of a port ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

import uvicorn
import uvloop

from orchestrator.frontend import connections
from orchestrator.frontend.connections import MAX_HEAD_BYTES, BoundedHttp, DrainingServer, listen, stop_accepting

ENDLESS = 16 * MAX_HEAD_BYTES
HEAD = b"POST / HTTP/1.1\r\nhost: h\r\n"
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
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedHttp, lifespan="off", log_config=None, access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = server.force_exit = True
        await serving


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
    async with asyncio.timeout(30), connected() as (reader, writer):
        await send(writer, begin, *[again] * (ENDLESS // len(again)))
        got = b""
        with contextlib.suppress(ConnectionError):
            got = await reader.read()  # it ends
        assert not got.startswith(b"HTTP/1.1 200")
        if answered and got:
            assert got.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")


async def test_request_within_limits_is_served() -> None:
    async with asyncio.timeout(30), connected() as (reader, writer):
        long = HEAD + b"x: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n"
        await send(writer, long + b"content-length: 1\r\n\r\na", long + b"content-length: 0\r\n\r\n")
        pieces = [b"1\r\na\r\n"] * 200_000  # more bytes beside the body than a head may have
        await send(writer, CHUNKED, *(b"".join(pieces[at : at + 1000]) for at in range(0, len(pieces), 1000)))
        await send(writer, b"0\r\nx: a\r\n\r\n")
        for length in (b"1", b"0", b"200000"):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(length)) == length


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
        servers = [DrainingServer(uvicorn.Config(app, **config)) for _ in listeners]
        serving = [
            asyncio.create_task(server.serve(sockets=[listener]))
            for server, listener in zip(servers, listeners, strict=True)
        ]
        while not all(server.started for server in servers):
            await asyncio.sleep(0.01)
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
        while storms and len(answers) < ENOUGH:
            await asyncio.sleep(0.01)
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


def test_frontend_drains_without_socket_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_SO_ATTACH_FILTER", 9999)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop_accepting(listener)
