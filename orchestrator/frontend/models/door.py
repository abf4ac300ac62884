"""The door of a frontend that serves several models: each request goes to the app of its model, once.

A path under `/models/NAME` names the model and loses that part; another request is of the model in its body. Pages
without one show all models, or say where each model's are.
"""

from __future__ import annotations

import contextlib
import email
import html
import re
from collections.abc import Iterable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.frontend.plain.route import read_body, replay_body

PREFIX = "/models/"
_CHOSEN = "pd.model"  # key of a scope
_OF_ALL = frozenset({"/fleet", "/predictions", "/requests"})  # shown by model
# They say the same whichever model's app answers, or are about the process.
_OF_ANY = frozenset({"/health", "/ping", "/version", "/metrics", "/docs", "/redoc", "/openapi.json"})
_POLICY_VIOLATION = 1008  # RFC 6455
_BOUNDARY = re.compile(rb'boundary="?([^";,\s]{1,70})', re.IGNORECASE)  # RFC 2046, 5.1.1
_MAX_PARTS, _MAX_PART_HEAD = 1000, 2000  # of a form, in which `model` is looked for, and bytes of the head of each


class _Asked(msgspec.Struct):
    model: str | None = None


_asked = msgspec.json.Decoder(_Asked)


def model_asked_for(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> str | None:
    """The model that a request's body names; None where it names none, or is no JSON object and no form."""
    try:
        return _asked.decode(body).model
    except RecursionError:  # no app would read it
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError):  # such as a form, which is rare: its headers are read only then
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        return _field_model(kind, body) if kind.lower().startswith(b"multipart/") else None


def _field_model(kind: bytes, body: bytes) -> str | None:
    """The field `model` of a form. The time is linear in the body, whatever that has: others wait meanwhile."""
    boundary = _BOUNDARY.search(kind)
    for part in body.split(b"--" + boundary[1], _MAX_PARTS) if boundary else ():
        head, ended, content = part.partition(b"\r\n\r\n")
        if ended and b"model" in head[:_MAX_PART_HEAD] and _name_of(head[:_MAX_PART_HEAD]) == "model":
            return content.partition(b"\r\n")[0].decode(errors="replace")
    return None


def _name_of(head: bytes) -> object:
    """The name of a field of a form, by the headers of its part."""
    return email.message_from_bytes(head.lstrip()).get_param("name", header="content-disposition")


class ModelPaths:
    """Goes before everything that looks at a path: takes `/models/NAME` off it, where there is such a model."""

    def __init__(self, app: Any, names: frozenset[str], root_path: str = "") -> None:
        """`root_path`: the prefix of paths, unless a proxy removes it."""
        self.app, self._names, self._root_path = app, names, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if PREFIX in scope.get("path", ""):
            scope = self._without_name(scope)
        await self.app(scope, receive, send)

    def _without_name(self, scope: Scope) -> Scope:
        """The scope with the model that its path names; the same scope where that names none."""
        root = self._root_path if scope["path"].startswith(self._root_path + PREFIX) else ""
        name, slash, rest = scope["path"].removeprefix(root + PREFIX).partition("/")
        if not (scope["path"].startswith(root + PREFIX) and slash and name in self._names):
            return scope
        path = f"{root}/{rest}"
        return {**scope, "path": path, "raw_path": path.encode(), _CHOSEN: name}


class ModelDoor:
    """The app of apps. The first model's answers what is no model's, such as requests for a model that is not here."""

    def __init__(self, apps: Mapping[str, FastAPI], root_path: str = "") -> None:
        self._apps, self._root_path = apps, root_path
        self._first = next(iter(apps.values()))
        self._of_model = {
            path.name: app for app in apps.values() for path in app.state.openai_serving_models.base_model_paths
        }

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
            await self._asked_for(body, scope)(scope, replay_body(body, receive), send)

    def _asked_for(self, body: bytes, scope: Scope) -> ASGIApp:
        """The app of the model that the body names, else the first with such an adapter, else the first, which knows no
        such."""
        name = model_asked_for(scope["headers"], body)
        if name is None:
            return self._first if self._path(scope) in _OF_ANY else self._refuse
        if (app := self._of_model.get(name)) is not None:
            return app
        has_adapter = (each for each in self._apps.values() if name in each.state.openai_serving_models.lora_requests)
        return next(has_adapter, self._unknown)

    async def _unknown(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The first app's answer. That it knows no such model comes with its own names, which become those of all."""
        named = _aliases(path.name for path in self._first.state.openai_serving_models.base_model_paths)
        start: Message | None = None

        async def name_all(message: Message) -> None:
            nonlocal start
            if message.get("status") == HTTPStatus.NOT_FOUND:
                start = message
                return
            if start is not None:
                message["body"] = message["body"].replace(named, _aliases(self._of_model))
                MutableHeaders(raw=start["headers"])["content-length"] = str(len(message["body"]))
                await send(start)
                start = None
            await send(message)

        await self._first(scope, receive, name_all)

    def _path(self, scope: Scope) -> str:
        path: str = scope["path"]
        return path.removeprefix(self._root_path)

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._path(scope).rstrip("/")
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
        ways = f"name one as `model`, or ask {PREFIX}{next(iter(self._apps))}{self._path(scope)}"
        return f"this server has several models, {', '.join(self._of_model)}: {ways}"

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


def _aliases(names: Iterable[str]) -> bytes:
    """As vLLM lists what a model is called, in a JSON body."""
    return msgspec.json.encode(f"Valid aliases: {', '.join(names)}.")[1:-1]


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
