"""The door of a frontend that serves several models: each request goes to the app of its model, once.

A path under `/models/NAME` names the model and loses that part; another request is of the model in its body. Pages
without one show all models, or say where each model's are.
"""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import Mapping, MutableMapping
from http import HTTPStatus
from itertools import chain
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from orchestrator.frontend.plain.route import read_body, replay_body

PREFIX = "/models/"
_CHOSEN = "pd.model"  # key of a scope
_OF_ALL = frozenset({"/fleet", "/predictions", "/requests"})  # shown by model
# They say the same whichever model's app answers, or are about the process.
_OF_ANY = frozenset({"/health", "/ping", "/version", "/metrics", "/docs", "/redoc", "/openapi.json"})
_POLICY_VIOLATION = 1008  # RFC 6455
_FORM_FIELD = re.compile(rb'name="?model"?[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n', re.IGNORECASE)


class _Asked(msgspec.Struct):
    model: Any = None


_asked = msgspec.json.Decoder(_Asked)


def model_asked_for(content_type: bytes, body: bytes) -> str | None:
    """The model that a request's body names; None where it names none, or is no JSON object and no form."""
    if content_type.lower().startswith(b"multipart/"):
        found = _FORM_FIELD.search(body)
        return found[1].decode(errors="replace") if found else None
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        model = _asked.decode(body).model
        return model if isinstance(model, str) else None
    return None


class ModelPaths:
    """Goes before everything that looks at a path: takes `/models/NAME` off it, where there is such a model."""

    def __init__(self, app: Any, names: frozenset[str], root_path: str = "") -> None:
        """`root_path`: the prefix of paths, unless a proxy removes it."""
        self.app, self._names, self._root_path = app, names, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            root = self._root_path if scope["path"].startswith(self._root_path + PREFIX) else ""
            name, slash, rest = scope["path"].removeprefix(root + PREFIX).partition("/")
            if scope["path"].startswith(root + PREFIX) and slash and name in self._names:
                path = f"{root}/{rest}"
                scope = {**scope, "path": path, "raw_path": path.encode(), _CHOSEN: name}
        await self.app(scope, receive, send)


class ModelDoor:
    """The app of apps. The first model's answers what is no model's, such as requests for a model that is not here."""

    def __init__(self, apps: Mapping[str, FastAPI], root_path: str = "") -> None:
        self._apps, self._root_path = apps, root_path
        self._first = next(iter(apps.values()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif (chosen := scope.get(_CHOSEN)) is not None:
            await self._apps[chosen](scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": self._unnamed(scope)})
        elif scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._show(scope, receive, send)
        elif (body := await read_body(receive)) is not None:
            await self._pass_on(body, scope, receive, send)

    async def _pass_on(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
        name = model_asked_for(kind, body)
        if name is None and scope["path"].removeprefix(self._root_path) not in _OF_ANY:
            await self._refuse(scope, receive, send)
            return
        app = self._first if name is None else self._app_of(name)
        await app(scope, replay_body(body, receive), send)

    def _app_of(self, name: str) -> FastAPI:
        """That of the model of this name, else the first with such an adapter, else the first, which knows no such."""
        lists = [(app, app.state.openai_serving_models) for app in self._apps.values()]
        of_model = (app for app, models in lists if models.is_base_model(name))
        of_adapter = (app for app, models in lists if name in models.lora_requests)
        return next(chain(of_model, of_adapter), self._first)

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(self._root_path).rstrip("/")
        if scope["method"] == "OPTIONS" or path in _OF_ANY:
            await self._first(scope, receive, send)
            return
        answer: Response
        if path == "/v1/models":
            answer = JSONResponse(await self._models())
        elif path == "/ready":
            answer = await self._ready(scope)
        elif path in _OF_ALL:
            said = {name: (await _ask(app, scope))[1] for name, app in self._apps.items()}
            answer = Response(msgspec.json.encode({"models": said}), media_type="application/json")
        elif path == "/dashboard":
            links = "".join(f'<li><a href="models/{name}/dashboard">{html.escape(name)}</a>' for name in self._apps)
            answer = HTMLResponse(f"<!doctype html><title>pd-orchestrator</title><h1>Models</h1><ul>{links}</ul>")
        else:
            await self._refuse(scope, receive, send)
            return
        await answer(scope, receive, send)

    async def _models(self) -> dict[str, Any]:
        """As vLLM lists the model and adapters of one, for all."""
        lists = [await app.state.openai_serving_models.show_available_models() for app in self._apps.values()]
        told: dict[str, Any] = lists[0].model_dump()
        told["data"] = [card.model_dump() for models in lists for card in models.data]
        return told

    async def _ready(self, scope: Scope) -> Response:
        """200 once one model can be served: where another cannot, this frontend still serves that one."""
        ready = {name: (await _ask(app, scope))[0] == HTTPStatus.OK for name, app in self._apps.items()}
        if any(ready.values()):
            return JSONResponse({"status": "ready", "models": ready})
        return JSONResponse({"status": "not ready", "models": ready}, status_code=503, headers={"retry-after": "1"})

    def _unnamed(self, scope: Scope) -> str:
        names = list(self._apps)
        path = scope["path"].removeprefix(self._root_path)
        ways = f"name one as `model`, or ask {PREFIX}{names[0]}{path}"
        return f"this server has several models, {', '.join(names)}: {ways}"

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Which model it is for cannot be told."""
        error = {"message": self._unnamed(scope), "type": "Bad Request", "param": "model", "code": 400}
        await JSONResponse({"error": error}, status_code=HTTPStatus.BAD_REQUEST)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Begin and end every app with the server."""
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            try:
                for app in self._apps.values():
                    await stack.enter_async_context(app.router.lifespan_context(app))
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


async def _ask(app: FastAPI, scope: Scope) -> tuple[int, msgspec.Raw]:
    """Status and body of an app's answer to this request, which has no body."""
    status, body = 0, b""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")

    await app(dict(scope), receive, send)
    return status, msgspec.Raw(body)
