"""The clients of a fleet under faults: they stream without end, and compare each answer with the undisturbed one.

They know nothing of faults, except that the connections of a killed process may break.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx
from support_client import Answer, FleetClient

PAUSE_S = 0.1  # after an error, and while a stream may not ask
ENDING = "this frontend is ending"


@dataclass
class Seen:
    """What the clients saw of all runs of one fault."""

    fault: str
    runs: int = 0
    answers: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    own_errors: int = 0  # connections that broke because their process was killed
    wrong: int = 0
    gaps_s: list[float] = field(default_factory=list)  # the longest silence within each answer
    queued_s: list[float] = field(default_factory=list)  # of each run, the longest wait in the prefill queue
    heal_s: list[float] = field(default_factory=list)  # until the fleet had its shape again
    gone_s: list[float] = field(default_factory=list)  # until the work of a process that died was gone everywhere
    leaks: int = 0
    false_losses: int = 0  # workers that counted as dead, but were slow


@dataclass(frozen=True)
class Questions:
    """Prompts of token ids and the greedy answer to each, as an undisturbed fleet gave it."""

    prompts: list[list[int]]
    truth: list[list[int]]

    @property
    def max_tokens(self) -> int:
        return len(self.truth[0])


def lost(answer: Answer) -> bool:
    """Whether its connection broke, or its frontend was ending and said so."""
    return answer.broken or (answer.status == httpx.codes.SERVICE_UNAVAILABLE and ENDING in str(answer.error))


def _why(answer: Answer) -> str:
    said = str(answer.error)[:200]
    return said if answer.status in (0, httpx.codes.OK) else f"{answer.status}: {said}"


def judge(seen: Seen, answer: Answer, truth: list[int]) -> None:
    """Count an answer that is not the undisturbed one, or why there is none."""
    if answer.ok:
        seen.wrong += answer.tokens != truth
    else:
        seen.errors[_why(answer)] += 1


class Load:
    """`async with`: so many streams, each of which asks one question after another. At the end, running answers may
    finish."""

    def __init__(self, fleet: FleetClient, questions: Questions, streams: int, seen: Seen, once: bool = False) -> None:
        """`once`: each stream asks one question only."""
        self._fleet, self._questions, self._streams, self._seen, self._once = fleet, questions, streams, seen, once
        self._closing, self._stopping = AsyncExitStack(), asyncio.Event()
        self._asking = streams  # so many of the streams ask
        self._own_ports: set[int] | None = None  # None: no process that clients are connected to was killed
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Load:
        self._client = await self._closing.enter_async_context(self._fleet.client())
        self._tasks = [asyncio.create_task(self._ask_on(offset)) for offset in range(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()
        await self._closing.aclose()

    def stop(self) -> None:
        """Ask no further questions."""
        self._stopping.set()

    async def end(self) -> None:
        """Ask no further questions, and wait for the last answer."""
        self.stop()
        await asyncio.gather(*self._tasks)

    def burst(self, questions: int) -> None:
        """Ask so many questions more, once each, beginning with the longest prompts."""
        longest = sorted(range(len(self._questions.prompts)), key=lambda at: -len(self._questions.prompts[at]))
        for turn in range(questions):
            self._tasks.append(asyncio.create_task(self._ask(longest[turn % len(longest)])))

    def ease(self) -> None:
        """Let one stream fewer ask questions, until `resume`."""
        self._asking = max(0, self._asking - 1)

    def resume(self) -> None:
        """Let all streams ask again."""
        self._asking = self._streams

    def forgive(self, ports: set[int]) -> None:
        """Do not count errors of connections from these ports: their process is killed now. Connections without a
        response may lead to it too."""
        self._own_ports = (self._own_ports or set()) | ports

    async def _ask_on(self, offset: int) -> None:
        turn = offset
        while not self._stopping.is_set():
            if offset >= self._asking:
                await asyncio.sleep(PAUSE_S)
                continue
            if not await self._ask(turn % len(self._questions.prompts)):
                await asyncio.sleep(PAUSE_S)
            turn += self._streams
            if self._once:
                return

    async def _ask(self, at: int) -> bool:
        questions, seen = self._questions, self._seen
        seen.answers += 1
        answer = await self._fleet.ask(self._client, questions.prompts[at], questions.max_tokens)
        if self._own_ports is not None and lost(answer) and answer.port in self._own_ports | {0}:
            seen.own_errors += 1
            return False
        judge(seen, answer, questions.truth[at])
        if answer.ok:
            seen.gaps_s.append(answer.longest_gap_s)
        return answer.ok


def as_json(seen: Seen) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(seen).items()}
