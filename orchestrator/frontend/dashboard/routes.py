"""`/dashboard` and its data: `/fleet/stream` (server-sent events), `/requests`, and orders under `/operator/`.

Pages come from this folder, the plots' library from its own package; nothing is loaded from another server. Does not
import vLLM.
"""

from __future__ import annotations

import asyncio
import heapq
import importlib.util
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from orchestrator.config.settings import Refused
from orchestrator.frontend.dashboard.history import History, event, samples
from orchestrator.frontend.dashboard.siblings import Question, Siblings, found
from orchestrator.process.telemetry.requests import KEPT
from orchestrator.store.client import RedisAway
from orchestrator.store.steering import Steering
from orchestrator.types import Role

HERE = Path(__file__).parent
PLOTLY = "plotly.min.js"
# Pages load from this server only; plotly sets styles on its elements.
_POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
_FILES = {"dashboard.css": "text/css", "dashboard.js": "text/javascript", "plots.js": "text/javascript"}
_MAX_ORDER_BYTES = 4096


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /operator/scale`: how many workers there should be. A role that is left out is not changed."""

    prefill: int | None = None
    decode: int | None = None


class ChangeRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /operator/role`."""

    worker: str
    role: Role
    force: bool = False


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /operator/drain`."""

    worker: str
    force: bool = False


def page_routes() -> APIRouter:
    """`/dashboard` and its files."""
    routes = APIRouter()
    plotly = _plotly()

    @routes.get("/dashboard")
    async def dashboard() -> Response:
        return FileResponse(HERE / "index.html", headers={"content-security-policy": _POLICY})

    @routes.get("/dashboard/{name}")
    async def file(name: str) -> Response:
        if name == PLOTLY:
            return FileResponse(plotly, headers={"cache-control": "max-age=86400"})
        if name in _FILES:
            return FileResponse(HERE / name, media_type=_FILES[name], headers={"cache-control": "no-cache"})
        return JSONResponse({"error": f"/dashboard/{name}: not found"}, status_code=404)

    return routes


def stream_routes(history: History, siblings: Siblings, ended: Callable[[], bool]) -> APIRouter:
    """`/fleet/stream` and `/requests`. `ended()`: whether the server is about to stop, and streams must end."""
    routes = APIRouter()

    @routes.get("/fleet/stream")
    async def stream() -> Response:
        """Events: `history` (the last hour, a list per field) once, then `sample` (the fleet) every second."""
        return _Watched(history, ended)

    @routes.get("/requests")
    async def requests(slowest: int = 0, latest: int = 0) -> dict[str, Any]:
        """Ended requests of all frontends with their stages: the slowest of the last hour, or the latest."""
        count = max(0, min(slowest or latest or 20, KEPT))
        lines, silent = await siblings.ask(slowest=count if slowest else 0, latest=0 if slowest else count)
        mine = siblings.recent.slowest(count, time.monotonic()) if slowest else siblings.recent.latest(count)
        lines = heapq.nlargest(count, [*mine, *lines], attrgetter("took_ms" if slowest else "ended_at"))
        told = [line.with_stages() for line in lines]
        return {"frontend": siblings.frontend, "requests": told, "silent_frontends": silent}

    @routes.get("/requests/{request_id:path}")  # an id may have slashes
    async def request(request_id: str) -> Response:
        lines, silent = found(siblings.recent, Question("", 0, request_id), 0.0), list[str]()
        if not lines:
            lines, silent = await siblings.ask(request_id=request_id)
        if lines:
            return JSONResponse({"requests": [line.with_stages() for line in lines]})
        without = f"; {', '.join(silent)} did not answer" if silent else ""
        why = f"request {request_id!r} is not among the latest{without}"
        return JSONResponse({"error": why, "silent_frontends": silent}, status_code=404)

    return routes


def operator_routes(steering: Steering) -> APIRouter:
    """`POST /operator/scale`, `role` and `drain`, which do the same as `orchestrator scale`, `role` and `drain`.

    `frontend/access.py` refuses orders of another site's page."""
    routes = APIRouter()

    async def scale(order: Scale) -> dict[str, Any]:
        wanted = await steering.scale(order.prefill, order.decode)
        return {"prefill": wanted.prefill, "decode": wanted.decode}

    async def role(order: ChangeRole) -> dict[str, Any]:
        return {"changed": await steering.change_role(order.worker, order.role, order.force)}

    async def drain(order: Drain) -> dict[str, Any]:
        return {"changed": await steering.drain(order.worker, order.force)}

    def answering(kind: type[Any], carry_out: Callable[[Any], Awaitable[dict[str, Any]]]) -> Callable[..., Any]:
        async def answer(request: Request) -> Response:
            try:
                return JSONResponse(await carry_out(msgspec.json.decode(await _body(request), type=kind)))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                return _refuse(400, str(error))
            except Refused as error:
                return _refuse(409, str(error))
            except RedisAway as error:
                return _refuse(503, str(error))

        return answer

    for path, kind, carry_out in (("scale", Scale, scale), ("role", ChangeRole, role), ("drain", Drain, drain)):
        routes.add_api_route(f"/operator/{path}", answering(kind, carry_out), methods=["POST"], name=path)
    return routes


class _Watched(Response):
    """The stream of one watcher, who counts from the time that it is sent until it ends; 503 when too many watch."""

    def __init__(self, history: History, ended: Callable[[], bool]) -> None:
        super().__init__()
        self._history, self._ended = history, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._history.watching() as watcher:
            answer: Response = JSONResponse(
                {"error": "too many watch already; close another dashboard"}, status_code=503
            )
            if watcher is not None:
                headers = {"cache-control": "no-store"}
                answer = StreamingResponse(self._events(watcher), media_type="text/event-stream", headers=headers)
            await answer(scope, receive, send)

    async def _events(self, watcher: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
        yield event("history", self._history.columns())
        yield event("sample", self._history.sample([]))
        async for sample in samples(watcher, self._ended):
            yield sample


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_ORDER_BYTES:
            raise msgspec.DecodeError(f"an order has at most {_MAX_ORDER_BYTES} bytes")
    return body


def _refuse(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=status)


def _plotly() -> Path:
    """The script in the package `plotly`. The package is not imported, since that would take a second."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("plotly is not installed; install it, or set frontend.dashboard: false")
    return Path(spec.origin).parent / "package_data" / PLOTLY
