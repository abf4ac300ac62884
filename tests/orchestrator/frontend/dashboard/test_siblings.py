"""What frontends tell each other, over a real Redis: sums, questions, and one that does not answer."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from support_redis import Server, fresh_namespace
from support_siblings import queue_of
from support_wait import until

from orchestrator.fleet.view import Fleet
from orchestrator.frontend.dashboard.history import History
from orchestrator.frontend.dashboard.routes import stream_routes
from orchestrator.frontend.dashboard.siblings import Bye, Question, Second, Siblings, summed
from orchestrator.process.tasks import cancelled
from orchestrator.process.telemetry.requests import Recent, RequestLine
from orchestrator.store.client import Redis, connect

pytestmark = pytest.mark.slow  # a server of its own


class Frontend:
    """Its figures, its pages, and the task in which it tells of itself."""

    def __init__(self, name: str, redis: Redis, namespace: str) -> None:
        self.recent, app = Recent(), FastAPI()
        self.siblings = Siblings(name, redis, namespace, self.recent)
        self.history = History("m", self.siblings, Fleet(name), queue_of(None))
        app.include_router(stream_routes(self.history, self.siblings, lambda: False))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://f")
        self.running = asyncio.create_task(self.siblings.run())

    def answers(self, request_id: str, total_ms: float, arrived_at: float) -> None:
        line = RequestLine(
            request_id, "finished", "local", "short", 9, 2, 1, "w", None, total_ms, arrived_at=arrived_at
        )
        self.recent.ended(line, time.monotonic())
        self.recent.output_tokens += 2
        self.recent.ttft.add(total_ms / 1e3)

    async def ids(self, path: str) -> list[str]:
        return [line["id"] for line in (await self.http.get(path)).json()["requests"]]


@pytest.fixture
async def two(mortal: Server) -> AsyncIterator[tuple[Frontend, Frontend]]:
    redis, namespace = await connect(mortal.url, 5), fresh_namespace()
    both = Frontend("f0", redis, namespace), Frontend("f1", redis, namespace)

    def each_heard() -> bool:
        for one in both:
            one.history.take(time.time())
        return all(one.siblings.count == 2 for one in both)

    await until(each_heard)
    yield both
    for one in both:
        one.running.cancel()
    await asyncio.gather(*(one.running for one in both), return_exceptions=True)
    await redis.aclose()


async def test_a_point_has_what_all_frontends_counted_once(two: tuple[Frontend, Frontend]):
    mine, other = two
    mine.answers("a", 100.0, 1.0)
    other.answers("b", 800.0, 2.0)
    tokens: list[int] = []

    def told() -> bool:
        for one in two:
            one.history.take(time.time())
        tokens.append(mine.history.points[-1].output_tokens)
        return sum(tokens) >= 4

    await until(told)
    mine.history.take(time.time())
    assert (sum(tokens), mine.history.points[-1].output_tokens) == (4, 0)
    assert mine.history.points[-1].ttft_p99 == pytest.approx(800, rel=0.1)
    sample = mine.history.sample([])
    assert [line["id"] for line in sample["slowest"]] == ["b", "a"]
    assert (sample["frontends"], sample["silent_frontends"]) == (2, [])


async def test_requests_of_all_frontends_are_found_whichever_answers(two: tuple[Frontend, Frontend]):
    mine, other = two
    mine.answers("a", 100.0, 1.0)
    other.answers("b", 800.0, 2.0)
    mine.answers("c", 10.0, 3.0)
    for one in two:
        assert await one.ids("/requests?slowest=2") == ["b", "a"]
        assert await one.ids("/requests?latest=2") == ["c", "b"]
        assert await one.ids("/requests/b") == ["b"]
    assert (await mine.http.get("/requests/nobody")).json()["silent_frontends"] == []


async def test_one_that_does_not_answer_is_named_and_not_waited_for(two: tuple[Frontend, Frontend], mortal: Server):
    mine, other = two
    other.answers("b", 800.0, 2.0)
    ghost = Second("ghost", [0] * 160, [0] * 160, [0] * 160, 0, 0, {}, {})
    channel = mine.siblings._channel
    await mine.siblings._redis.execute_command("PUBLISH", channel, msgspec.json.encode(ghost))
    await mine.siblings._redis.execute_command("PUBLISH", channel, b"{")
    await until(lambda: mine.siblings.count == 3)
    said = (await mine.http.get("/requests?latest=5")).json()
    assert ([line["id"] for line in said["requests"]], said["silent_frontends"]) == (["b"], ["ghost"])
    missing = (await mine.http.get("/requests/nobody")).json()
    assert "ghost did not answer" in missing["error"]
    await until(lambda: mine.siblings.silent == ["ghost"] or other.history.take(time.time()))
    mortal.stop()
    assert (await mine.http.get("/requests?latest=5")).json()["silent_frontends"] == ["f1", "ghost"]


async def test_one_that_leaves_is_forgotten_at_once(two: tuple[Frontend, Frontend]):
    mine, other = two
    other.running.cancel()
    await until(lambda: mine.siblings.count == 1)


async def test_what_cannot_be_read_ends_no_frontend():
    class Told:
        async def listen(self, channel: str) -> AsyncIterator[bytes]:
            for payload in (b"{", b'{"type":"bye","frontend":"\xff"}', b'{"type":"bye","x":' + b"[" * 100_000):
                yield payload
            yield msgspec.json.encode(Second("f1", [], [], [], 0, 0, {}, {}))

    siblings = Siblings("f0", Told(), "t", Recent())
    await siblings._listen()
    assert siblings.count == 2


async def test_what_cannot_be_told_ends_no_frontend(caplog: pytest.LogCaptureFixture):
    class Redis:
        published: list[Any] = []

        async def listen(self, channel: str) -> AsyncIterator[bytes]:
            for number in (1, 2):
                yield msgspec.json.encode(Question("f1", number, latest=1))

        async def execute_command(self, *command: Any) -> None:
            self.published.append(msgspec.json.decode(command[-1]))

    recent = Recent()
    siblings = Siblings("f0", Redis(), "t", recent)
    latest = iter(([object()], []))
    recent.latest = lambda count: next(latest)
    await siblings._listen()
    siblings._unsent.put_nowait(Bye(object()))
    siblings._unsent.put_nowait(Bye("f0"))
    sending = asyncio.create_task(siblings._send())
    await until(lambda: sending.done() or len(Redis.published) == 2)
    assert [told["type"] for told in Redis.published] == ["answer", "bye"] and caplog.text.count("TypeError: ") == 2
    await cancelled(sending)


def test_latencies_decisions_and_flows_add_up():
    one = Second("a", [1, 0], [0, 0], [2, 2], 1, 5, {"remote": 1}, {"p d": 7}, {"chat": 1}, {"chat": 1})
    more = {"remote": 1, "local": 2}, {"p d": 1, "p e": 2}, {"chat": 3}, {"chat": 2}
    two = Second("b", [1, 3], [1, 0], [0, 0], 2, 6, *more)
    both = {"remote": 2, "local": 2}, {"p d": 8, "p e": 2}, {"chat": 4}, {"chat": 3}
    assert summed([one, two]) == Second("", [2, 3], [1, 0], [2, 2], 3, 11, *both)
    assert summed([one]) == msgspec.structs.replace(one, frontend="")


async def test_a_frontend_of_another_release_is_left_out_and_named_once(
    two: tuple[Frontend, Frontend], caplog: pytest.LogCaptureFixture
):
    """As in a rollout: the histories of those that cannot add its counts to theirs would end, and they with them."""
    mine, other = two
    for _ in range(3):
        other.siblings.tell(msgspec.structs.replace(other.history._second(), ttft=[1]), [])
        await until(lambda: any(second.ttft == [1] for second in mine.siblings._seconds))
        mine.history.take(time.time())
    assert caplog.text.count("not counted here: f1") == 1
