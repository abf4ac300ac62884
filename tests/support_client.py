"""What a test asks of a fleet through its endpoint: its shape, requests, load, and that nothing leaked."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from support_sim import expected

SETTLE_TIMEOUT_S = 60
# Of simulated engines: answers take a second, so that whoever asks over and over is being answered at any moment, and
# leaves the cores to what is tested.
LONG_STEPS = "sim.step_base_ms=40"
# Between two looks: three times as long as a look, which may cost much, as one at the metrics. Within these bounds.
LOOKS_APART, LEAST_S, MOST_S = 3, 0.1, 0.5


class FleetFailed(AssertionError):
    """The fleet did not start, or did not come to what was waited for; carries its log."""


@dataclass
class Answer:
    """One request's outcome as its client saw it."""

    status: int
    prompt: Any = field(default=None, repr=False)  # as it was asked: token ids or text
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    request_id: str = ""
    retry_after_s: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # when it was asked for, and of each event with tokens
    port: int = 0  # of its client, once a response began
    broken: bool = False  # its connection broke

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None

    @property
    def longest_gap_s(self) -> float:
        """Between two events with tokens; it may be the wait for the first."""
        return max((after - before for before, after in itertools.pairwise(self.times)), default=0.0)


class FleetClient:
    """A fleet that somebody runs. `model` is what it serves."""

    def __init__(self, url: str, namespace: str, api_key: str = "") -> None:
        self.url, self.namespace = url, namespace
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(base_url=url, timeout=120, headers=headers)
        self.model = self.http.get("/v1/models").json()["data"][0]["id"]

    def log_tail(self) -> str:
        """The end of the log, for who has it."""
        return ""

    # ---- looking -----------------------------------------------------------------------------------------------

    def fleet(self) -> dict[str, Any]:
        return self.http.get("/fleet").json()

    def workers(self, role: str | None = None, state: str = "ready") -> list[dict[str, Any]]:
        return [w for w in self.fleet()["workers"] if w["state"] == state and role in (None, w["role"])]

    def pids(self) -> dict[str, int]:
        """Of the workers that are ready."""
        return {worker["id"]: worker["pid"] for worker in self.workers()}

    def shape(self) -> tuple[int, int]:
        """(prefill, decode) workers that are ready."""
        return len(self.workers("prefill")), len(self.workers("decode"))

    def metric(self, name: str, **labels: str) -> float:
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = SETTLE_TIMEOUT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while (began := time.monotonic()) < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if value := condition():
                    return value
            time.sleep(min(max(LOOKS_APART * (time.monotonic() - began), LEAST_S), MOST_S))
        try:
            seen: object = self.fleet()
        except httpx.HTTPError as error:
            seen = repr(error)
        raise FleetFailed(f"not within {timeout_s:g} s: {what}; fleet: {seen}; \n{self.log_tail()}")

    async def soon(self, condition: Callable[[], Any], what: str, timeout_s: float = SETTLE_TIMEOUT_S) -> Any:
        """As `until`, while what else this loop runs goes on."""
        return await asyncio.to_thread(self.until, condition, what, timeout_s)

    def assert_no_leaks(self) -> None:
        """Every block of every worker free, nothing running or waiting, queue and claims empty."""

        def clean() -> bool:
            seen = self.fleet()
            idle = all(
                w["blocks_free"] == w["blocks_total"] and not w["running"] and not w["waiting"] for w in seen["workers"]
            )
            return idle and seen["queue"] == {"requests": 0, "tokens": 0, "claimed": 0}

        self.until(clean, "all blocks free, queue and claims empty")

    # ---- asking ------------------------------------------------------------------------------------------------

    async def ask(
        self, client: httpx.AsyncClient, prompt: list[int] | str, max_tokens: int = 16, **more: Any
    ) -> Answer:
        """A completion, streamed unless `more` has another `stream`; token ids are collected, errors inside too."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": True,
            **more,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        answer = Answer(0, prompt, times=[time.monotonic()])
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                answer.status = response.status_code
                address = response.extensions["network_stream"].get_extra_info("client_addr")
                answer.port = address[1] if address else 0
                answer.request_id = response.headers.get("x-request-id", "")
                answer.retry_after_s = int(response.headers.get("retry-after", 0))
                if response.status_code != 200:
                    answer.error = (await response.aread()).decode()
                    return answer
                async for line in response.aiter_lines():
                    if not (said := line.removeprefix("data: ")).startswith("{"):
                        continue
                    event = json.loads(said)
                    if "error" in event:
                        answer.error = json.dumps(event["error"])
                        return answer  # nothing that comes of the connection may hide it
                    if event.get("choices"):
                        answer.times.append(time.monotonic())
                    for choice in event.get("choices", ()):
                        answer.text += choice["text"]
                        answer.tokens += choice.get("token_ids") or []
                        answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
                    if event.get("usage"):
                        answer.usage = event["usage"]
        except (httpx.HTTPError, OSError) as error:
            broken = isinstance(error, httpx.TransportError | OSError)
            answer.error, answer.broken = f"{type(error).__name__}: {error}", broken
        return answer

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=180, limits=limits) as client:
            yield client

    async def ask_all(self, prompts: list[Any], concurrency: int, max_tokens: int = 16, **more: Any) -> list[Answer]:
        gate = asyncio.Semaphore(concurrency)

        async with self.client() as client:

            async def one(prompt: Any) -> Answer:
                async with gate:
                    return await self.ask(client, prompt, max_tokens, **more)

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    @contextlib.asynccontextmanager
    async def under_load(self, prompts: list[Any], concurrency: int, max_tokens: int) -> AsyncIterator[list[Answer]]:
        """Streams requests, each over and over, while the body runs; yields the list of answers, filled as they end."""
        answers: list[Answer] = []
        stopping = asyncio.Event()

        async with self.client() as client:

            async def loop(offset: int) -> None:
                turn = offset
                while not stopping.is_set():
                    answers.append(await self.ask(client, prompts[turn % len(prompts)], max_tokens))
                    turn += concurrency

            tasks = [asyncio.create_task(loop(i)) for i in range(concurrency)]
            try:
                yield answers
            finally:
                stopping.set()
                await asyncio.wait_for(asyncio.gather(*tasks), 180)


@contextlib.asynccontextmanager
async def nobody_fails(
    fleets: Sequence[FleetClient], prompts: list[Any], concurrency: int, max_tokens: int
) -> AsyncIterator[None]:
    """Load on each endpoint while the body runs; every answer is whole, and what a simulated engine says."""
    async with contextlib.AsyncExitStack() as stack:
        loads = [await stack.enter_async_context(f.under_load(prompts, concurrency, max_tokens)) for f in fleets]
        yield
    answers = [answer for load in loads for answer in load]
    assert all(loads) and [(a.status, a.error) for a in answers if not a.ok] == []
    wrong = [answer for answer in answers if answer.tokens != expected(answer.prompt, max_tokens)]
    assert wrong == [], "an answer is another, or not whole"
