"""ASGI middleware around vLLM's HTTP app: request ids, keys, what a body may be, and the headers of a refusal.

Headers also say a request's latency objectives and its tenant. Objectives are in milliseconds, in headers that llm-d
and the Gateway API's predictor use too, or a class of the configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import ClientDisconnect

from orchestrator.config.settings import SLOClass
from orchestrator.frontend import tracing
from orchestrator.frontend.access import Access, Admission, Refusal
from orchestrator.process.telemetry.requests import RequestLine

log = logging.getLogger("pd.frontend")

MAX_REQUEST_ID_LENGTH, MAX_ENGINE_ID_LENGTH = 200, 300  # a client's, and with what vLLM's server adds to it
_POLICY_VIOLATION = 1008  # RFC 6455
# Text of JSON up to the first escape of half a surrogate pair: no character, and tokenizers raise at it.
_PAIRED = re.compile(
    rb"""(?: [^\\]++ | \\u(?![dD][89a-fA-F]) | \\u[dD][89abAB]..\\u[dD][c-fC-F] | \\[^u] )*+""", re.DOTALL | re.VERBOSE
)
_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
_FAILED = HTTPStatus.INTERNAL_SERVER_ERROR
_ENDING = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "this frontend is ending: ask again", 1.0)
TTFT, TPOT, CLASS, TENANT = b"x-slo-ttft-ms", b"x-slo-tpot-ms", b"x-slo-class", b"x-tenant"
MIN_MS, MAX_MS = 1e-3, 86_400_000.0  # to a day; what is divided by less may have no result
_SHOWN = 100
PIECE_S = 0.005  # of work that comes at once: so long, at most, a stream waits for the next token
_FEW = 16  # prompts of a request, of which each waits for others, as for Redis


class Objectives(NamedTuple):
    """What a request's headers say. Seconds; None: the fleet's."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    name: str = ""  # of its class
    tenant: str = ""

    def resolved(self, classes: Mapping[str, SLOClass]) -> Objectives:
        """What the headers leave open is as its class has it. Raises ValueError for a class that there is not."""
        if not self.name:
            return self
        if (known := classes.get(self.name)) is None:
            there = ", ".join(sorted(classes)) or "none; slo.classes in the configuration adds them"
            raise ValueError(f"{CLASS.decode()}: no class {self.name!r}; there are: {there}")
        return self._replace(ttft_s=self.ttft_s or known.ttft_s, tpot_s=self.tpot_s or known.tpot_s)


def read_objectives(headers: Iterable[tuple[bytes, bytes]]) -> Objectives:
    """Raises ValueError for what is no number of milliseconds that may be an objective."""
    found = {name: value for name, value in headers if name in (TTFT, TPOT, CLASS, TENANT)}
    ttft_s, tpot_s = (_seconds(name, found[name]) if name in found else None for name in (TTFT, TPOT))
    return Objectives(ttft_s, tpot_s, *(_text(found.get(name, b"")) for name in (CLASS, TENANT)))


def _text(value: bytes) -> str:
    return value[:_SHOWN].decode("latin-1")


def _seconds(name: bytes, value: bytes) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = 0.0
    if not MIN_MS <= milliseconds <= MAX_MS:  # not for NaN either
        expected = f"expected milliseconds from {MIN_MS} to {MAX_MS:.0f}"
        raise ValueError(f"{name.decode()}: {expected}, got {_text(value)!r}")
    return milliseconds / 1e3


class Pieces:
    """A request's prompts and choices, which come at once, in pieces: between two of them the loop serves others."""

    def __init__(self) -> None:
        self._until, self._turn, self._few = 0.0, asyncio.Lock(), asyncio.Semaphore(_FEW)

    async def begin(self) -> None:
        """To be awaited before each step of each of these tasks. It returns at once while the present piece lasts, else
        in a later turn of the loop, to one task in each."""
        async with self._turn:
            if self._until and time.monotonic() < self._until:
                return
            if self._until:
                await asyncio.sleep(0)
            self._until = time.monotonic() + PIECE_S

    @contextlib.asynccontextmanager
    async def few(self) -> AsyncIterator[None]:
        """In this context are few of these tasks at a time, which begin in pieces: the others cost nothing yet."""
        async with self._few:
            await self.begin()
            yield


@dataclass(slots=True, eq=False)
class RequestContext:
    """One HTTP request's id, its arrival (unix seconds), its response, and its refusal if it was refused."""

    request_id: str
    admission: Admission | None = None
    objectives: Objectives = Objectives()
    received_at: float = field(default_factory=time.time)
    on_request_ended: Callable[[RequestLine], None] | None = None  # called for each engine request
    refusal: Refusal | None = None
    reply: Reply | None = None
    plain: bool = False  # whether it is an event stream whose events mostly differ in their text only
    stream: Stream | None = None  # sends those events
    pieces: Pieces = field(default_factory=Pieces)  # in which its prompts and choices are taken


class Stream(Protocol):
    """Sends events of a response that do not come from the app."""

    def begin(self) -> None:
        """Called when the app has sent all that it had, and waits for the next output."""

    def take(self) -> bytes:
        """Bytes to send before the app's next message."""


current: ContextVar[RequestContext | None] = ContextVar("pd_request_context", default=None)


class EdgeMiddleware:
    """Takes the client's `x-request-id` or makes one, passes it to the app, and returns it with every response.

    The start of an event stream is held back until its first event. vLLM begins to answer with 200 before the request
    is placed; a request that is then refused still gets its 429 and `Retry-After`.

    A body over the limit is answered with 413, as soon as its header says so or that much has arrived. A body with text
    that is no Unicode is answered with 400: the app would raise wherever it first encodes that text.
    """

    def __init__(self, app: Any, max_body_bytes: int, access: Access, traced: bool = False) -> None:
        self.app, self._max_body_bytes, self.access, self._traced = app, max_body_bytes, access, traced

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        admitted = self.access.admit(scope, time.monotonic())
        try:
            if scope["type"] == "http":
                await self._serve(scope, receive, send, admitted)
            elif isinstance(admitted, Refusal):
                await receive()  # websocket.connect; closing before it is accepted answers with 403
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": admitted.message})
            else:
                await self.app(scope, receive, send)
        finally:
            if not isinstance(admitted, Refusal):
                admitted.end()

    async def _serve(
        self, scope: MutableMapping[str, Any], receive: Any, send: Any, admitted: Refusal | Admission
    ) -> None:
        refusal, admission = (admitted, None) if isinstance(admitted, Refusal) else (None, admitted)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        printable = bytes(c for c in given[:MAX_REQUEST_ID_LENGTH] if 0x21 <= c <= 0x7E)
        request_id = printable or uuid.uuid4().hex.encode()
        headers = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
        context = RequestContext(request_id.decode(), admission)
        try:
            context.objectives = read_objectives(headers)
        except ValueError as wrong:
            refusal = refusal or Refusal(HTTPStatus.BAD_REQUEST, str(wrong))
        traced = self._traced and refusal is None
        begun = tracing.begin(scope["method"], scope["path"], headers) if traced else None
        if begun is not None:
            headers, context.on_request_ended = begun.headers, begun.on_request_ended
        scope = {**scope, "headers": [*headers, (b"x-request-id", request_id)]}
        token = current.set(context)
        context.reply = reply = Reply(context, send)
        body = _Body(scope["headers"], self._max_body_bytes, receive, reply)
        try:
            if refusal is not None:
                await reply.refuse(refusal)
            elif body.announced > self._max_body_bytes:
                await body.refuse_size()
            else:
                await self.app(scope, body, reply)
        except ClientDisconnect:  # raised where the app reads the body: it was refused, or the client has left
            pass
        except asyncio.CancelledError:  # uvicorn cancels requests that still run after its graceful shutdown
            if not await reply.refuse(_ENDING):
                raise
        except Exception as error:  # nothing has been sent if the app began an event stream and had no event
            cause = error.__cause__ or error
            if not await reply.refuse(Refusal(_FAILED, f"the answer failed: {type(cause).__name__}: {cause}")):
                raise
            log.error("request %s failed", context.request_id, exc_info=error)
        finally:
            current.reset(token)
            context.reply = context.stream = None  # they refer to each other: break the cycle
            if begun is not None:
                begun.end()


def plain_id(request_id: str) -> str:
    """As engines, Redis and logs may have it: each token comes with it, and the body of /v1/responses names it by any
    text."""
    return "".join(c for c in request_id[:MAX_ENGINE_ID_LENGTH] if "!" <= c <= "~")


class _Body:
    """The receive side of one request. For a body that is refused the app reads that the client has disconnected."""

    def __init__(self, headers: Sequence[tuple[bytes, bytes]], limit: int, receive: Any, reply: Reply) -> None:
        self._limit, self._receive, self._reply = limit, receive, reply
        given = dict(reversed(headers))  # of headers with the same name the first counts
        length, kind = given.get(b"content-length", b""), given.get(b"content-type", b"")
        self.announced = int(length) if length.isdigit() else 0
        self._received = 0
        # Of a body with files only parts are text.
        self._parts: list[bytes] | None = None if kind.lower().startswith(b"multipart/") else []

    async def __call__(self) -> MutableMapping[str, Any]:
        message: MutableMapping[str, Any] = await self._receive()
        if message["type"] == "http.request":
            part = message.get("body", b"")
            self._received += len(part)
            if self._received > self._limit:
                await self.refuse_size()
                return {"type": "http.disconnect"}
            if (parts := self._parts) is not None:
                parts.append(part)
                if not message.get("more_body", False):
                    self._parts = None
                    if (why := why_no_unicode(b"".join(parts))) is not None:
                        await self._reply.refuse(Refusal(HTTPStatus.BAD_REQUEST, why))
                        return {"type": "http.disconnect"}
        return message

    async def refuse_size(self) -> None:
        message = f"the body is larger than {self._limit} bytes (limits.max_body_bytes)"
        await self._reply.refuse(Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message))


def why_no_unicode(body: bytes) -> str | None:
    """Why the text of a JSON body is no Unicode; None if it is."""
    if b"\\" in body and _ESCAPED.search(body):
        paired = _PAIRED.match(body)
        at = paired.end() if paired else 0
        if _ESCAPED.match(body, at):
            half = body[at : at + 6].decode(errors="replace")
            return f"the body has a lone surrogate, {half} at byte {at}: it is half of a character; send both, or none"
    if (nul := body.find(0)) >= 0:  # Python's JSON parser would read UTF-16
        return f"the body is no UTF-8 text: byte {nul} is 0"
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            return f"the body is no UTF-8 text: byte {error.start} is 0x{body[error.start]:02x} ({error.reason})"
    return None


_AS_IT_COMES = (b"x-accel-buffering", b"no")  # nginx holds a stream back until its end, unless it is told this


class Reply:
    """The send side of one response."""

    def __init__(self, context: RequestContext, send: Any) -> None:
        self._context, self._send = context, send
        self._held: MutableMapping[str, Any] | None = None
        self._refused = self._started = False
        self.latest = b""  # the app's last event, kept if `context.stream` sends events too

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if self._refused:
            return  # the app goes on to answer, but the refusal has been sent
        if message["type"] == "http.response.start":
            kinds = [value.lower() for name, value in message["headers"] if name.lower() == b"content-type"]
            if any(kind.startswith(b"text/event-stream") for kind in kinds):
                self._held = {**message, "headers": [*message["headers"], _AS_IT_COMES]}
            elif message["status"] == _FAILED and self._context.refusal is not None:
                await self.refuse(self._context.refusal)  # some routes of vLLM answer all that is raised with 500
            else:
                await self._start(message)
            return
        if (start := self._held) is not None:
            self._held = None
            if self._context.refusal is not None:
                await self.refuse(self._context.refusal)
                return
            await self._start(start)
        if (stream := self._context.stream) is not None:
            if event := stream.take():
                await self._send({"type": "http.response.body", "body": event, "more_body": True})
            self.latest = message.get("body", b"")
        await self._send(message)

    def send_now(self, event: bytes) -> bool:
        """Send an event that does not come from the app. Returns False, and sends nothing, while the client does not
        read."""
        sending = self._send({"type": "http.response.body", "body": event, "more_body": True})
        try:
            sending.send(None)
        except StopIteration:
            return True
        sending.close()  # nothing was sent: uvicorn's RequestResponseCycle.send waits before it writes
        return False

    async def _start(self, message: MutableMapping[str, Any]) -> None:
        self._started = True
        headers = [pair for pair in message.get("headers", []) if pair[0].lower() != b"x-request-id"]
        headers.append((b"x-request-id", self._context.request_id.encode()))
        refusal = self._context.refusal
        if self._refused and refusal is not None:
            headers += refusal.headers
        if refusal is not None and refusal.retry_after_s is not None and message["status"] == refusal.status:
            headers.append((b"retry-after", str(max(1, math.ceil(refusal.retry_after_s))).encode()))
        await self._send({**message, "headers": headers})

    async def refuse(self, refusal: Refusal) -> bool:
        """Answer in place of the app. Returns False, and sends nothing, if an answer has begun."""
        if self._started:
            return False
        self._refused, self._context.refusal = True, refusal
        phrase = HTTPStatus(refusal.status).phrase
        error = {"message": refusal.message, "type": phrase, "param": None, "code": refusal.status}
        body = msgspec.json.encode({"error": error})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._start({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        return True
