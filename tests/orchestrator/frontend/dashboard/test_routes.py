"""The streams and pages of a frontend's fleet, as an ASGI server asks for them."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock
from urllib.parse import quote

import httpx
import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from support_siblings import alone, queue_of
from support_wait import until

from orchestrator.config.settings import Refused
from orchestrator.fleet.view import Fleet
from orchestrator.frontend.dashboard.history import MAX_WATCHERS, History
from orchestrator.frontend.dashboard.routes import operator_routes, stream_routes
from orchestrator.process.telemetry.requests import Recent, RequestLine
from orchestrator.store.steering import Steering


def made() -> tuple[FastAPI, History, Recent]:
    recent, app = Recent(), FastAPI()
    siblings = alone(recent)
    history = History("m", siblings, Fleet("f"), queue_of(None))
    app.include_router(stream_routes(history, siblings, lambda: False))
    return app, history, recent


SCOPE: dict[str, Any] = {
    "type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET", "headers": [], "path": "/fleet/stream",
    "raw_path": b"/fleet/stream", "query_string": b"", "root_path": "",
}  # fmt: skip


async def test_disconnected_watcher_takes_no_place() -> None:
    app, history, _ = made()

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    for _ in range(MAX_WATCHERS):
        await app({**SCOPE}, receive, send)
    with history.watching() as watcher:
        assert watcher is not None


async def test_no_more_watch_than_may_however_many_ask_at_once() -> None:
    app, _, _ = made()
    statuses: list[int] = []
    leave = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    asking = [asyncio.create_task(app({**SCOPE}, receive, send)) for _ in range(MAX_WATCHERS + 5)]
    await until(lambda: len(statuses) == len(asking))
    leave.set()
    await asyncio.gather(*asking)
    assert (statuses.count(200), statuses.count(503)) == (MAX_WATCHERS, 5)


@pytest.mark.parametrize("name", ["a/b", "a?b#c", "100%25 \N{SNOWMAN}", "/"])
async def test_request_is_found_by_client_id(name: str) -> None:
    app, _, recent = made()
    recent.ended(RequestLine(name, "finished", "local", "short_prompt", 9, 2, 1, "decode-0", None, 12.5), 1.0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://f") as asked:
        answer = await asked.get(f"/requests/{quote(name, safe='')}")
        assert [line["id"] for line in answer.json()["requests"]] == [name]
        assert (await asked.get("/requests/other")).status_code == 404


@pytest.mark.parametrize(
    ("path", "order", "said"),
    [
        ("drain", b"{", "Input data was truncated"),
        ("drain", b'{"worker":"\xff"}', ""),
        ("drain", b'{"x":' + b"[" * 4000, ""),
        ("drain", b" " * 5000, "at most 4096 bytes"),
        ("scale", b'{"decod": 2}', "unknown field `decod`"),
        ("role", b'{"worker": "w", "role": "boss"}', "Invalid enum value 'boss'"),
    ],
)
async def test_an_order_that_cannot_be_read_is_refused(path: str, order: bytes, said: str) -> None:
    answer, steering = await ordered(path, order)
    assert (answer.status_code, said in answer.text) == (400, True), answer.text
    assert steering.mock_calls == []


async def test_an_order_that_the_fleet_refuses_is_told_with_the_reason() -> None:
    answer, _ = await ordered("drain", b'{"worker": "w"}', drain=AsyncMock(side_effect=Refused("w: is the last")))
    assert (answer.status_code, "w: is the last" in answer.text) == (409, True), answer.text


async def ordered(path: str, order: bytes, **steers: Any) -> tuple[httpx.Response, Mock]:
    app, steering = FastAPI(), Mock(spec=Steering, **steers)
    app.include_router(operator_routes(steering))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://f") as asked:
        return await asked.post(f"/operator/{path}", content=order), steering
