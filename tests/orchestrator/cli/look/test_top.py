"""`orchestrator top` against a real frontend's stream, with keys pressed as a person would."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from support_info import fleet_of, worker_info
from support_siblings import alone, queue_of

from orchestrator.cli.handle import Named
from orchestrator.cli.look.screen import Confirm, Top
from orchestrator.cli.look.status import sample, top
from orchestrator.config.settings import Refused
from orchestrator.frontend.dashboard import history as history_module
from orchestrator.frontend.dashboard.history import History
from orchestrator.frontend.dashboard.routes import operator_routes, stream_routes
from orchestrator.process.tasks import cancelled
from orchestrator.process.telemetry.requests import Recent
from orchestrator.types import DesiredRatio, QueueDepth, Role, WorkerLoad

WITHIN_S = 60.0


class Steered:
    """Stands where the fleet's Redis is asked: notes orders, and refuses the last decode worker."""

    def __init__(self) -> None:
        self.orders: list[tuple[Any, ...]] = []

    async def change_role(self, worker: str, role: Role, force: bool) -> bool:
        self.orders.append((worker, role, force))
        return True

    async def drain(self, worker: str, force: bool) -> bool:
        raise Refused(f"{worker}: is the last decode worker that is ready")


@contextlib.asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


@contextlib.asynccontextmanager
async def frontend(steered: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(history_module, "INTERVAL_S", 0.05)
    fleet = fleet_of(worker_info("p0", Role.PREFILL), worker_info("d0"), worker_info("d1"))
    for name, free in (("p0", 90), ("d0", 50), ("d1", 10)):
        fleet.take_load(WorkerLoad(name, 1, 100, free, 2, 1, 30, 5.0), 0.0)
    recent = Recent()
    recent.judged["chat"], recent.met["chat"] = 4, 3
    siblings, fleet.desired = alone(recent), DesiredRatio(1, 2, "x")
    history = History("demo", siblings, fleet, queue_of(QueueDepth(3, 4000, 1)))
    app = FastAPI()
    ended = False
    app.router.routes += stream_routes(history, siblings, lambda: ended).routes
    app.router.routes += operator_routes(steered).routes
    async with serving(app) as url:
        running = asyncio.create_task(history.run())
        yield url
        ended = True
        await cancelled(running)


async def until(pilot: Any, condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WITHIN_S:g} s: {what}"
        await pilot.pause(0.05)


def rows(app: Top) -> list[str]:
    return [str(key.value) for key in app._table.rows]


@pytest.mark.slow
async def test_keys_sort_filter_and_steer(monkeypatch: pytest.MonkeyPatch):
    steered = Steered()
    async with frontend(steered, monkeypatch) as url:
        app = Top(url)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: rows(app) == ["d0", "d1", "p0"], "workers by role")
            assert "demo  3 workers  4000 tokens queued  by role  desired 1P2D by x " in str(app._head.content)
            await until(pilot, lambda: "chat 75.0%" in str(app._in_time.content), "shares within objectives")
            assert app._in_time.display
            await pilot.press("s")
            assert rows(app) == ["d1", "d0", "p0"], "by used KV blocks"
            await pilot.press("slash", *"prefill", "enter")
            assert rows(app) == ["p0"]
            await pilot.press("r")
            await until(pilot, lambda: isinstance(app.screen, Confirm), "it asks")
            await pilot.press("n")
            await pilot.press("r")
            await until(pilot, lambda: isinstance(app.screen, Confirm), "it asks again")
            assert steered.orders == []
            await pilot.press("y")
            await until(pilot, lambda: steered.orders == [("p0", Role.DECODE, False)], "it is ordered")
            await pilot.press("d")
            await until(pilot, lambda: isinstance(app.screen, Confirm), "it asks before it drains")
            await pilot.press("y")
            await until(
                pilot, lambda: any("last decode worker" in note.message for note in app._notifications), "refused"
            )


async def test_a_frontend_that_ends_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    async with frontend(Steered(), monkeypatch) as url:
        app = Top(url)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: len(rows(app)) == 3, "workers")
            app._url = "http://127.0.0.1:1"
            app.listen()
            await until(pilot, lambda: "trying again" in str(app._head.content), "it says so")
            app._url = url
            await until(pilot, lambda: "3 workers" in str(app._head.content), "it is back")


async def test_one_sample_has_workers_queue_and_figures(monkeypatch: pytest.MonkeyPatch):
    async with frontend(Steered(), monkeypatch) as url:
        seen = await sample(url, None)
    assert [worker["id"] for worker in seen["workers"]] == ["d0", "d1", "p0"]
    assert seen["queue"]["tokens"] == 4000
    assert seen["point"]["queue_requests"] == 3


@pytest.mark.parametrize("path", ["", "/nowhere"])
async def test_a_sample_of_nothing_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, path: str):
    async with frontend(Steered(), monkeypatch) as url:
        where = f"{url}{path}" if path else "http://127.0.0.1:1"
        with pytest.raises(Refused, match=f"{where}: no fleet's stream"):
            await sample(where, None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:999999", "http://[::1", "http://", "127.0.0.1:8000"])
def test_invalid_address_is_refused_in_one_line(url: str):
    with pytest.raises(Refused, match=r"--url: expected http://HOST:PORT"):
        top(Named(url=url), as_json=True)


async def test_a_stream_of_something_else_is_refused_in_one_line():
    app = FastAPI()

    @app.get("/fleet/stream")
    async def stream() -> PlainTextResponse:
        return PlainTextResponse("event: sample\ndata: {not json\n\n")

    async with serving(app) as url:
        with pytest.raises(Refused, match="no fleet's stream"):
            await sample(url, None)


def test_top_without_terminal_names_alternative():
    command = [sys.executable, "-m", "orchestrator.cli.main", "top", "--url", "http://127.0.0.1:1"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and "top needs a terminal" in done.stderr
