"""What this frontend tells the fleet's other frontends of itself, and hears of them, so that any of them shows all.

All publish on one channel of Redis: each second what they counted, and questions for the requests that they remember.
Nothing is stored. A frontend that is silent is named, and nobody waits for it longer than `_ANSWER_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Union

import msgspec

from orchestrator.process.tasks import Turns
from orchestrator.process.telemetry.requests import Recent, RequestLine
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.keys import Keys

log = logging.getLogger("pd.frontend")

SLOWEST = 12
_ANSWER_S = 1.0
_SILENT_S = 4.0  # each tells of itself every second
_GONE_S = 30.0  # no answer is expected any more
_REPEAT = 10  # what has not changed is told again after so many seconds: another may have begun since
_UNSENT = 5


class Second(msgspec.Struct, tag="second", frozen=True):
    """What one frontend counted in one second. Latencies as of `Latencies.take`; `transferred`, `judged`, `met` as of
    `Recent`; `slowest` is None where it is as before."""

    frontend: str
    ttft: list[int]
    itl: list[int]
    wait: list[int]
    requests: int
    output_tokens: int
    decisions: dict[str, int]
    transferred: dict[str, int]
    judged: dict[str, int] = {}
    met: dict[str, int] = {}
    slowest: list[RequestLine] | None = None


class Question(msgspec.Struct, tag="question", frozen=True):
    """For requests that the others remember: by the client's id, or so many of the slowest, or of the latest."""

    frontend: str
    number: int
    request_id: str = ""
    slowest: int = 0
    latest: int = 0


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """`requests` are decoded by the one that asked."""

    frontend: str
    to: str
    number: int
    requests: msgspec.Raw


class Bye(msgspec.Struct, tag="bye", frozen=True):
    frontend: str


Told = Union[Second, Question, Answer, Bye]
_decoder: msgspec.json.Decoder[Told] = msgspec.json.Decoder(Told)
_requests: msgspec.json.Decoder[list[RequestLine]] = msgspec.json.Decoder(list[RequestLine])


def found(recent: Recent, question: Question, now: float) -> list[RequestLine]:
    """What this frontend remembers of it. `now`: the router's clock."""
    if question.request_id:
        line = recent.find(question.request_id)
        return [line] if line is not None else []
    return recent.slowest(question.slowest, now) if question.slowest else recent.latest(question.latest)


class Siblings:
    """Start `run()` as a task."""

    def __init__(self, frontend: str, redis: Redis, namespace: str, recent: Recent) -> None:
        self.frontend = frontend
        self._redis, self._channel, self.recent = redis, Keys(namespace).frontends_told, recent
        self._seconds: list[Second] = []
        self._slowest: dict[str, list[RequestLine]] = {}
        self._heard_at: dict[str, float] = {}  # monotonic
        self._unsent: asyncio.Queue[Told] = asyncio.Queue(_UNSENT)
        self._numbers = itertools.count()
        self._asked: dict[int, dict[str, asyncio.Future[list[RequestLine]]]] = {}  # answers by question and frontend
        self._unlike: set[str] = set()  # frontends that the log has named, since their counts are left out
        self._said: list[RequestLine] = []
        self._ticks = 0

    async def run(self) -> None:
        """Runs until cancelled, then tells that this frontend has gone."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send())
                tasks.create_task(self._listen())
        finally:
            with contextlib.suppress(RedisAway, TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await self._publish(Bye(self.frontend))

    def tell(self, second: Second, slowest: list[RequestLine]) -> None:
        """Tell the others, as soon as Redis takes it."""
        self._ticks += 1
        if slowest != self._said or self._ticks % _REPEAT == 0:
            self._said, second = slowest, msgspec.structs.replace(second, slowest=slowest)
        if not self._unsent.full():
            self._unsent.put_nowait(second)

    def take(self, own: Second) -> list[Second]:
        """What the others have told since the last call: those that count in the same steps as this one."""
        taken, self._seconds = self._seconds, []
        for frontend in [name for name, at in self._heard_at.items() if time.monotonic() - at > _GONE_S]:
            self._forget(frontend)
        unlike = {second.frontend for second in taken if _steps(second) != _steps(own)}
        if new := sorted(unlike - self._unlike):
            log.warning("not counted here: %s, of another release", ", ".join(new))
        self._unlike |= unlike
        return [second for second in taken if second.frontend not in unlike]

    @property
    def count(self) -> int:
        """Frontends of the fleet, this one included."""
        return 1 + len(self._heard_at)

    @property
    def silent(self) -> list[str]:
        """Those of which nothing has been heard for a while."""
        now = time.monotonic()
        return sorted(name for name, at in self._heard_at.items() if now - at > _SILENT_S)

    def slowest(self, own: Iterable[RequestLine]) -> list[RequestLine]:
        """The slowest of all frontends, as last told."""
        return heapq.nlargest(SLOWEST, [*own, *itertools.chain(*self._slowest.values())], attrgetter("took_ms"))

    async def ask(
        self, *, request_id: str = "", slowest: int = 0, latest: int = 0
    ) -> tuple[list[RequestLine], list[str]]:
        """What the others remember, and who of them did not answer in time."""
        if not self._heard_at:
            return [], []
        question = Question(self.frontend, next(self._numbers), request_id, slowest, latest)
        new, silent = asyncio.get_running_loop().create_future, self.silent
        answers: dict[str, asyncio.Future[list[RequestLine]]] = {name: new() for name in self._heard_at}
        self._asked[question.number] = answers
        try:
            with contextlib.suppress(RedisAway, TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await self._publish(question)
                    await asyncio.gather(*(answer for name, answer in answers.items() if name not in silent))
        finally:  # also of a client that leaves
            del self._asked[question.number]
        told = {name: answer.result() for name, answer in answers.items() if answer.done() and not answer.cancelled()}
        return list(itertools.chain(*told.values())), sorted(answers.keys() - told.keys())

    async def _publish(self, told: Told) -> None:
        """Raises RedisAway."""
        await self._redis.execute_command("PUBLISH", self._channel, msgspec.json.encode(told))

    async def _send(self) -> None:
        turns = Turns(log, "what other frontends are told")
        while True:
            told = await self._unsent.get()
            with turns.turn(), contextlib.suppress(RedisAway):
                await self._publish(told)

    async def _listen(self) -> None:
        turns = Turns(log, "what other frontends tell")
        async with contextlib.aclosing(self._redis.listen(self._channel)) as payloads:
            async for payload in payloads:
                with turns.turn():
                    await self._hear(payload)

    async def _hear(self, payload: bytes | None) -> None:
        try:
            told = _decoder.decode(payload) if payload is not None else None
            if told is not None and told.frontend != self.frontend:
                await self._take(told)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("another frontend told what cannot be read: %s", error)

    async def _take(self, told: Told) -> None:
        self._heard_at[told.frontend] = time.monotonic()
        match told:
            case Second():
                self._seconds.append(told)
                if told.slowest is not None:
                    self._slowest[told.frontend] = told.slowest
            case Question():
                lines = msgspec.Raw(msgspec.json.encode(found(self.recent, told, time.monotonic())))
                with contextlib.suppress(RedisAway):
                    await self._publish(Answer(self.frontend, told.frontend, told.number, lines))
            case Answer():
                answers = self._asked.get(told.number, {}) if told.to == self.frontend else {}
                if (answer := answers.get(told.frontend)) is not None and not answer.done():
                    answer.set_result(_requests.decode(told.requests))
            case Bye():
                self._forget(told.frontend)

    def _forget(self, frontend: str) -> None:
        del self._heard_at[frontend]
        self._unlike.discard(frontend)
        self._slowest.pop(frontend, None)


def summed(seconds: list[Second]) -> Second:
    """Of all frontends, as of one. There is one at least."""
    counts = (msgspec.structs.astuple(second)[1:-1] for second in seconds)
    return Second("", *map(_sum, zip(*counts, strict=True)))


def _steps(second: Second) -> list[int]:
    return [len(latencies) for latencies in (second.ttft, second.itl, second.wait)]


def _sum(counts: Sequence[Any]) -> Any:
    match counts[0]:
        case list():
            return [sum(column) for column in zip(*counts, strict=True)]
        case dict():
            return dict(sum(map(Counter, counts), Counter[str]()))
    return sum(counts)
