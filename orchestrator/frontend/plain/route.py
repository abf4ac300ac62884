"""The way of a plain POST to vLLM's handler, without what FastAPI and Starlette put around it.

FastAPI resolves dependencies and opens three exit stacks for each request, vLLM runs the handler in a task beside one
that listens for the client's end, and Starlette runs an event stream in a task group that does so again. Here the body
is validated by vLLM's own model, the handler runs in the request's task, and one task listens. Whatever this does not
take as it is, another method, another content type, a body that is refused, goes to vLLM's route as it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pydantic_core
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send
from vllm.entrypoints.serve.utils.api_utils import validate_json_request, with_cancellation

PATHS = ("/v1/chat/completions", "/v1/completions")
_JSON = (b"application/json", b"application/json; charset=utf-8")
_WRAPPED = with_cancellation.__code__.co_consts  # has the code of the function that it returns


class PlainRoute(BaseRoute):
    """Stands before one of vLLM's routes, and takes from it what is plain."""

    def __init__(self, vllms: APIRoute, handler: Callable[..., Awaitable[Response]]) -> None:
        """`handler`: the route's endpoint without its decorators, which listen for the client's end and count load."""
        self.path = vllms.path  # by which requests are counted
        self._vllms, self._handler = vllms, handler

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self._vllms.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_plain(scope):
            await self._vllms.handle(scope, receive, send)
            return
        if (body := await _read(receive)) is None:
            return
        asked = self.validated(body)
        if asked is None:
            await self._vllms.handle(scope, _again(body, receive), send)
            return
        with _until_it_leaves(receive):
            answer = await self._handler(asked, Request(scope, receive, send))
            if isinstance(answer, StreamingResponse):
                await answer.stream_response(send)
            else:
                await answer(scope, receive, send)

    def validated(self, body: bytes) -> Any:
        """The request as vLLM's handler gets it. None where vLLM's route has to say what is wrong with it."""
        assert self._vllms.body_field is not None
        try:
            asked, errors = self._vllms.body_field.validate(pydantic_core.from_json(body), {}, loc=("body",))
        except Exception:  # what vLLM's validators raise, and what is no JSON to this parser, which is stricter
            return None
        return None if errors else asked


def install(app: FastAPI, args: Namespace) -> None:
    """Put a plain route before vLLM's, where those are as this file knows them."""
    if args.enable_server_load_tracking:  # which counts at both ends of what is left out here
        return
    routes = app.router.routes
    for route in [route for route in routes if isinstance(route, APIRoute) and route.path in PATHS]:
        checks = [dependency.call for dependency in route.dependant.dependencies]
        if checks == [validate_json_request] and route.endpoint.__code__ in _WRAPPED:
            routes.insert(routes.index(route), PlainRoute(route, inspect.unwrap(route.endpoint)))


def _is_plain(scope: Scope) -> bool:
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return scope["method"] == "POST" and content_type in _JSON


async def _read(receive: Receive) -> bytes | None:
    """None: the client has gone."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` as it was before the body was read."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Message:
        return unread.pop() if unread else await receive()

    return read


@contextlib.contextmanager
def _until_it_leaves(receive: Receive) -> Iterator[None]:
    """Cancels what runs within when the client leaves. The cancellation ends here."""
    serving = asyncio.current_task()
    assert serving is not None
    listening = asyncio.create_task(_listen(receive, serving))
    try:
        yield
    except asyncio.CancelledError:
        if not listening.done() or listening.cancelled():  # by somebody else
            raise
        serving.uncancel()
    finally:
        listening.cancel()


async def _listen(receive: Receive, serving: asyncio.Task[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    serving.cancel()
