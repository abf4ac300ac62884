"""The clients of a fleet under faults: they stream without end, and compare each answer with the undisturbed one.

They know nothing of faults, except that the connections of a killed process may break.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

ANSWER_TIMEOUT_S = 180.0
PAUSE_S = 0.1  # after an error, and while a stream may not ask


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

    model: str
    prompts: list[list[int]]
    truth: list[list[int]]

    @property
    def max_tokens(self) -> int:
        return len(self.truth[0])


class Broken(Exception):
    """An answer ended with an error. `port`: the client's, 0 if no response had begun. `connection`: whether the
    connection broke, or the frontend was ending."""

    def __init__(self, why: str, port: int = 0, connection: bool = False) -> None:
        super().__init__(why)
        self.port, self.connection = port, connection


async def stream(client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
    """The tokens of a greedy answer, and its longest silence in seconds, which may be the wait for the first token.
    Raises Broken."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    tokens: list[int] = []
    heard, longest, port = time.monotonic(), 0.0, 0
    body |= {"stream": True, "return_token_ids": True}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            port = _client_port(response)
            if response.status_code != httpx.codes.OK:
                ending = response.status_code == httpx.codes.SERVICE_UNAVAILABLE  # a frontend that ends says so
                why = f"{response.status_code}: {(await response.aread()).decode()[:200]}"
                raise Broken(why, port, connection=ending)
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise Broken(str(event["error"])[:200])
                now = time.monotonic()
                heard, longest = now, max(longest, now - heard)
                for choice in event.get("choices", ()):
                    tokens += choice.get("token_ids") or []
    except httpx.TransportError as error:
        raise Broken(f"{type(error).__name__}: {error}", port, connection=True) from error
    return tokens, longest


def _client_port(response: httpx.Response) -> int:
    address = response.extensions["network_stream"].get_extra_info("client_addr")
    return int(address[1]) if address else 0


class Load:
    """`async with`: so many streams, each of which asks one question after another. At the end, running answers may
    finish."""

    def __init__(self, url: str, questions: Questions, streams: int, seen: Seen, once: bool = False) -> None:
        """`once`: each stream asks one question only."""
        self._url, self._questions, self._streams, self._seen, self._once = url, questions, streams, seen, once
        self._stopping = asyncio.Event()
        self._asking = streams  # so many of the streams ask
        self._own_ports: set[int] | None = None  # None: no process that clients are connected to was killed
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Load:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(base_url=self._url, timeout=ANSWER_TIMEOUT_S, limits=limits)
        self._tasks = [asyncio.create_task(self._ask_on(offset)) for offset in range(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()
        await self._client.aclose()

    def stop(self) -> None:
        """Ask no further questions."""
        self._stopping.set()

    async def end(self) -> None:
        """Ask no further questions, and wait for the last answer. Raises a stream's exception other than Broken."""
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
        try:
            tokens, longest_s = await stream(self._client, questions.model, questions.prompts[at], questions.max_tokens)
        except Broken as error:
            own = self._own_ports is not None and error.connection and error.port in self._own_ports | {0}
            if own:
                seen.own_errors += 1
            else:
                seen.errors[str(error)] += 1
            return False
        seen.wrong += tokens != questions.truth[at]
        seen.gaps_s.append(longest_s)
        return True


def as_json(seen: Seen) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(seen).items()}
