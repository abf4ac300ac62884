"""A shorter path of a plain POST to vLLM's handler, without the layers of FastAPI and Starlette; and what vLLM's
validators raise at is refused, on either path.

FastAPI resolves dependencies and opens three exit stacks for each request. vLLM runs the handler in a task beside one
that listens for a disconnect, and Starlette runs an event stream in a task group that does so again. Here vLLM's own
model validates the body, the handler runs in the request's task, and one task listens. A request with another method or
another content type, or with a body that is refused, goes to vLLM's route unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
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
# What Python raises for a value of another kind than was expected.
_OF_ANOTHER_KIND = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
_WRAPPED = with_cancellation.__code__.co_consts  # has the code of the function that it returns

Validated = tuple[Any, list[dict[str, Any]]]


class PlainRoute(BaseRoute):
    """Comes before one of vLLM's routes, and handles its plain requests."""

    def __init__(self, vllms: APIRoute, handler: Callable[..., Awaitable[Response]]) -> None:
        """`handler`: the route's endpoint without its decorators, which listen for a disconnect and count load."""
        self.path = vllms.path  # metrics count requests by it
        self._vllms, self._handler = vllms, handler

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self._vllms.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_plain(scope):
            await self._vllms.handle(scope, receive, send)
            return
        if (body := await read_body(receive)) is None:
            return
        request_model = self.validated(body)
        if request_model is None:
            await self._vllms.handle(scope, replay_body(body, receive), send)
            return
        with _cancel_on_disconnect(receive) as (serving, listening):
            answer = await self._handler(request_model, Request(scope, receive, send))
            # vLLM's handler answers that the client has left, also where it is this server that ends.
            if serving.cancelling() and not listening.done():
                raise asyncio.CancelledError
            if isinstance(answer, StreamingResponse):
                await answer.stream_response(send)
            else:
                await answer(scope, receive, send)

    def validated(self, body: bytes) -> Any:
        """The request for vLLM's handler. None if it is invalid: vLLM's route then answers with the error."""
        assert self._vllms.body_field is not None
        try:
            values = pydantic_core.from_json(body)
            token_ids = _take_token_ids(values)
            request_model, errors = self._vllms.body_field.validate(values, {}, loc=("body",))
        except Exception:  # vLLM's validators raise any type, and this JSON parser is stricter than FastAPI's
            return None
        if errors:
            return None
        if token_ids is not None:
            request_model.prompt = token_ids
        return request_model


def install(app: FastAPI, args: Namespace) -> None:
    """Put a plain route before each of vLLM's, if those are as this file expects them."""
    if args.enable_server_load_tracking:  # the decorators that are left out here count load
        return
    routes = app.router.routes
    for route in [route for route in routes if isinstance(route, APIRoute) and route.path in PATHS]:
        checks = [dependency.call for dependency in route.dependant.dependencies]
        if checks == [validate_json_request] and route.endpoint.__code__ in _WRAPPED:
            routes.insert(routes.index(route), PlainRoute(route, inspect.unwrap(route.endpoint)))


def refuse_what_trips(app: FastAPI) -> None:
    """A body on which one of vLLM's validators trips is its client's fault, on all routes that the app has so far. Some
    look into raw values before these are checked: `{"structured_outputs": 1.5}` has no `get`, and vLLM's server answers
    that with 500. Errors that vLLM raises itself are left to vLLM."""
    for route in app.router.routes:
        if isinstance(route, APIRoute):
            fields = {
                id(field): field for field in (route.body_field, *route.dependant.body_params) if field is not None
            }
            for field in fields.values():
                vars(field)["validate"] = _refusing(field.validate)


def _refusing(validate: Callable[..., Validated]) -> Callable[..., Validated]:
    def refusing(value: Any, values: dict[str, Any] | None = None, *, loc: tuple[int | str, ...] = ()) -> Validated:
        try:
            return validate(value, values or {}, loc=loc)
        except _OF_ANOTHER_KIND as error:
            said = f"a value of another kind than was expected: {type(error).__name__}: {error}"
            return None, [{"type": "value_error", "loc": loc, "msg": said, "input": None}]

    return refusing


def _is_plain(scope: Scope) -> bool:
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return scope["method"] == "POST" and content_type in _JSON


def _take_token_ids(values: dict[str, Any]) -> list[int] | None:
    """If the prompt is token ids, leave the least and the greatest in their place: pydantic's check of each takes as
    long as all of the rest."""
    try:
        token_ids = msgspec.convert(values.get("prompt"), list[int])
    except msgspec.ValidationError:
        return None
    if not token_ids:
        return None
    values["prompt"] = [min(token_ids), max(token_ids)]
    return token_ids


async def read_body(receive: Receive) -> bytes | None:
    """The body; None if the client has disconnected."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that first returns the body again."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Message:
        return unread.pop() if unread else await receive()

    return read


@contextlib.contextmanager
def _cancel_on_disconnect(receive: Receive) -> Iterator[tuple[asyncio.Task[Any], asyncio.Task[None]]]:
    """Cancel the work in this context when the client disconnects. That cancellation does not leave the context. Yields
    the task of the work, and the one that ends when the client has disconnected."""
    serving = asyncio.current_task()
    assert serving is not None
    listening = asyncio.create_task(_listen(receive, serving))
    try:
        yield serving, listening
    except asyncio.CancelledError:
        if not listening.done() or listening.cancelled():  # cancelled by another task
            raise
        serving.uncancel()
    finally:
        listening.cancel()


async def _listen(receive: Receive, serving: asyncio.Task[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    serving.cancel()
