"""Odd HTTP, answered as vLLM's own server answers it: the same app, served by a frontend's server and by vLLM's.

What differs is meant, and named with its reason.
"""

import asyncio
import contextlib
import gzip
import json
import re

import pytest
from support_wait import DEADLINE_S

pytestmark = pytest.mark.vllm

BODY = json.dumps({"model": "demo", "prompt": "Say it", "max_tokens": 4}).encode()
STREAM = json.dumps({"model": "demo", "prompt": "Say it", "max_tokens": 4, "stream": True}).encode()
PATH = b"/v1/completions"
_FIRST_S, _MORE_S = 5.0, 1.5  # for an answer, and for more of it


def post(
    *headers: bytes, body: bytes = BODY, path: bytes = PATH, version: bytes = b"1.1", length: bool = True
) -> bytes:
    told = [b"host: h", b"content-type: application/json", *([b"content-length: %d" % len(body)] if length else [])]
    return b"POST %s HTTP/%s\r\n" % (path, version) + b"\r\n".join([*told, *headers]) + b"\r\n\r\n" + body


def ask(method: bytes, path: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    return b"%s %s HTTP/%s\r\n" % (method, path, version) + b"\r\n".join([b"host: h", *headers]) + b"\r\n\r\n"


def chunks(body: bytes, trailer: bytes = b"") -> bytes:
    half = len(body) // 2
    parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:]))
    return parts + b"0\r\n" + trailer + b"\r\n"


CLOSE = b"connection: close"
CASES: dict[str, bytes] = {
    "plain": post(),
    "HEAD /health": ask(b"HEAD", b"/health"),
    "HEAD of nothing": ask(b"HEAD", b"/nothing"),
    "OPTIONS": ask(b"OPTIONS", PATH),
    "OPTIONS *": ask(b"OPTIONS", b"*"),
    "OPTIONS of another origin": ask(b"OPTIONS", PATH, b"origin: http://o", b"access-control-request-method: POST"),
    "GET of a POST": ask(b"GET", PATH),
    "PUT": ask(b"PUT", PATH, b"content-length: 0"),
    "TRACE": ask(b"TRACE", PATH),
    "CONNECT": ask(b"CONNECT", b"h:80"),
    "no such method": ask(b"BREW", PATH),
    "trailing slash": ask(b"GET", b"/v1/models/"),
    "trailing slash of a POST": post(path=PATH + b"/"),
    "two slashes": ask(b"GET", b"//v1/models"),
    "absolute form": ask(b"GET", b"http://h/v1/models"),
    "absolute form of a POST": post(path=b"http://h" + PATH),
    "percent in the path": ask(b"GET", b"/v1%2Fmodels"),
    "dots in the path": ask(b"GET", b"/v1/../v1/models"),
    "a broken escape": ask(b"GET", b"/%zz"),
    "fragment": ask(b"GET", b"/v1/models#here"),
    "gzip body": post(b"content-encoding: gzip", body=gzip.compress(BODY, mtime=0)),
    "h2c": post(b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAAP__"),
    "websocket of a POST": post(b"connection: Upgrade", b"upgrade: websocket"),
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "pipelined": ask(b"GET", b"/v1/models") + post() + ask(b"GET", b"/health"),
    "pipelined after an error": ask(b"GET", b"/nothing") + ask(b"GET", b"/health"),
    "chunked": post(b"transfer-encoding: chunked", body=chunks(BODY), length=False),
    "chunked with a trailer": post(
        b"transfer-encoding: chunked", b"trailer: x-t", body=chunks(BODY, b"x-t: 1\r\n"), length=False
    ),
    "chunked with an extension": post(
        b"transfer-encoding: chunked", body=b"%x;a=b\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), length=False
    ),
    "chunked with a length": post(b"transfer-encoding: chunked", body=chunks(BODY)),
    "a chunk of no size": post(b"transfer-encoding: chunked", body=b"zz\r\n", length=False),
    "an unknown coding": post(b"transfer-encoding: odd"),
    "expect": post(b"expect: 100-continue"),
    "another expectation": post(b"expect: 200-ok"),
    "no length": post(length=False, body=b""),
    "two lengths, alike": post(b"content-length: %d" % len(BODY)),
    "two lengths": post(b"content-length: 3"),
    "a negative length": post(b"content-length: -1", length=False),
    "a header of 64 KiB": post(b"x-long: " + b"a" * (64 << 10)),
    "a target of 64 KiB": ask(b"GET", b"/v1/models?" + b"a" * (64 << 10)),
    "a folded header": post(b"x-folded: a\r\n b"),
    "a header without a name": post(b": a"),
    "a space before the colon": post(b"x-odd : a"),
    "a byte above 127": post(b"x-odd: \xff"),
    "a zero byte": post(b"x-odd: a\x00b"),
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": ask(b"GET", b"/health", b"host: other"),
    "lines end in LF": b"GET /health HTTP/1.1\nhost: h\n\n",
    "empty lines first": b"\r\n\r\n" + ask(b"GET", b"/health"),
    "HTTP/1.0": post(version=b"1.0"),
    "HTTP/1.0, keep-alive": post(b"connection: keep-alive", version=b"1.0"),
    "HTTP/1.0, a stream": post(version=b"1.0", body=STREAM),
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/1.1, a stream": post(body=STREAM),
    "close": post(CLOSE),
    "close, a stream": post(CLOSE, body=STREAM),
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "form": post(b"content-type: text/plain"),
    "no body": post(body=b""),
}
HALF_CLOSED = ("plain", "close", "close, a stream", "HEAD /health")  # asked again by clients that say no more
# What a frontend answers otherwise, and why.
MEANT = {
    "gzip body": "it says what is wrong with the body; vLLM's server takes no compressed ones either",
    "HTTP/1.0, a stream": "it ends with the connection; vLLM's server sends chunks, which HTTP/1.0 has not",
    "websocket of a POST": "it is refused; vLLM's server says nothing and keeps the connection",
}
Answer = tuple[list[bytes], bytes, bool]


async def answer(port: int, asked: bytes, half_closes: bool) -> Answer:
    """Status lines, what else does not differ each time, and whether the server has closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    got, closed = b"", False
    writer.write(asked)
    if half_closes:
        writer.write_eof()
    with contextlib.suppress(TimeoutError, ConnectionError):
        while not closed:
            async with asyncio.timeout(_MORE_S if got else _FIRST_S):
                data = await reader.read(1 << 16)
            got, closed = got + data, not data
    writer.close()
    status = rb"HTTP/1\.[01] [^\r]*"
    rest = re.sub(
        rb"(?i)(date|x-request-id|x-accel-buffering|server|content-length): [^\r]*\r\n", b"", re.sub(status, b"", got)
    )
    rest = re.sub(rb"(cmpl|modelperm)-[0-9a-f-]+", b"ID", re.sub(rb"\r\n[0-9a-f]+\r\n", b"", rest))
    return re.findall(status, got), re.sub(rb'"created":\d+', b'"created":0', rest), closed


async def answers(plain: bool) -> dict[str, Answer]:
    from support_served import ENDS, serving

    asked = [(name, name, False) for name in CASES] + [(f"{name}, half-closed", name, True) for name in HALF_CLOSED]
    async with asyncio.timeout(DEADLINE_S), serving(plain) as served:
        served.core.script = [([5], None, None), ENDS["length"]]
        found = await asyncio.gather(*(answer(served.port, CASES[name], half) for _, name, half in asked))
    return {called: it for (called, _, _), it in zip(asked, found, strict=True)}


async def test_odd_http_is_answered_as_by_plain_vllm() -> None:
    ours, plain = await answers(plain=False), await answers(plain=True)
    differ = {name: (ours[name], plain[name]) for name in ours if ours[name] != plain[name]}
    assert differ.keys() == MEANT.keys(), {name: both for name, both in differ.items() if name not in MEANT}
    assert ours["plain"][0] == [b"HTTP/1.1 200 OK"] and ours["gzip body"][0] == plain["gzip body"][0]
    assert ours["websocket of a POST"][0] == [b"HTTP/1.1 400 Bad Request"] and plain["websocket of a POST"][0] == []
    assert len(ours["pipelined"][0]) == 3 and ours["expect"][0][0] == b"HTTP/1.1 100 Continue"
