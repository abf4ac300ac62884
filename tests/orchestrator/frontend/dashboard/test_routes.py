"""The streams and pages of a frontend's fleet, as an ASGI server asks for them."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import quote

import httpx
import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI

from orchestrator.fleet.view import Fleet
from orchestrator.frontend.dashboard.history import MAX_WATCHERS, History
from orchestrator.frontend.dashboard.routes import operator_routes, stream_routes
from orchestrator.telemetry.recent import Recent
from orchestrator.telemetry.request_line import RequestLine


def made() -> tuple[FastAPI, History, Recent]:
    recent, app = Recent(), FastAPI()
    history = History("m", "f", 1, Fleet("f"), recent, lambda: None, lambda: None)
    app.include_router(stream_routes(history, recent, lambda: False))
    return app, history, recent


async def test_disconnected_watcher_takes_no_place() -> None:
    app, history, _ = made()
    scope: dict[str, Any] = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET", "headers": []}
    scope |= {"path": "/fleet/stream", "raw_path": b"/fleet/stream", "query_string": b"", "root_path": ""}

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    for _ in range(MAX_WATCHERS):
        await app({**scope}, receive, send)
    assert not history.full


@pytest.mark.parametrize("name", ["a/b", "a?b#c", "100%25 \N{SNOWMAN}", "/"])
async def test_request_is_found_by_client_id(name: str) -> None:
    app, _, recent = made()
    recent.ended(RequestLine(name, "finished", "local", "short_prompt", 9, 2, 1, "decode-0", None, 12.5), 1.0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://f") as asked:
        answer = await asked.get(f"/requests/{quote(name, safe='')}")
        assert [line["id"] for line in answer.json()["requests"]] == [name]
        assert (await asked.get("/requests/other")).status_code == 404


@pytest.mark.parametrize(
    ("page", "headers", "status"),
    [
        ("http://127.0.0.1:8000", {}, 200),
        ("http://[::1]:8000", {}, 200),
        ("http://localhost:8000", {}, 200),
        ("http://fleet.example:8000", {}, 403),  # a name that leads here, maybe only since the page was loaded
        ("http://fleet.example:8000", {"authorization": "Basic eDp5"}, 200),
        ("http://127.0.0.1:8000", {"origin": "http://elsewhere.example"}, 403),
        ("http://127.0.0.1:8000", {"origin": "null"}, 403),
    ],
)
async def test_cross_site_orders_are_refused(page: str, headers: dict[str, str], status: int) -> None:
    app, steering = FastAPI(), AsyncMock()
    steering.drain.return_value = True
    app.include_router(operator_routes(steering))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=page) as asked:
        answer = await asked.post("/operator/drain", content='{"worker": "a"}', headers={"origin": page, **headers})
    assert (answer.status_code, steering.drain.called) == (status, status == 200), answer.text
