"""Timed requests to a real server over the OpenAI completions API: one, several at once, or a whole load.

Asks for a fixed number of tokens (`ignore_eos`, a vLLM parameter), so that lengths are those of the load.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable

import httpx
import msgspec

from orchestrator.simulator.trace import Arrival, Load


class MeasureError(ValueError):
    """One line: the server, what it answered, and the mend."""


class Timing(msgspec.Struct, frozen=True):
    """One answered request; seconds. `tpot_s` is 0 for a single token, `gaps_s` are between chunks of the stream."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    gaps_s: list[float]


class Target:
    """A server. `vocabulary` bounds the token ids of made prompts. Use as an async context manager."""

    def __init__(self, url: str, vocabulary: int = 10_000, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._vocabulary = vocabulary
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(timeout=timeout_s, trust_env=False, limits=limits)
        self.model = ""

    async def __aenter__(self) -> Target:
        try:
            answer = await self._client.get(f"{self.url}/v1/models", timeout=10.0)
            self.model = answer.json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            await self._client.aclose()
            raise MeasureError(f"{self.url}: no OpenAI server answers there ({error}); start a fleet first") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def fleet(self) -> dict:
        """The server's /fleet, or nothing where there is none."""
        try:
            answer = await self._client.get(f"{self.url}/fleet", timeout=10.0)
            return answer.json() if answer.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return {}

    def prompt(self, tokens: int, keys: tuple[int, ...] = (), unit_tokens: int = 0, seed: int = 0) -> list[int]:
        """Token ids; equal keys give equal units, the rest is the seed's."""
        ids: list[int] = []
        for key in keys:
            rng = random.Random(key)
            ids += [rng.randrange(100, self._vocabulary) for _ in range(unit_tokens)]
        rng = random.Random(f"own {seed}")
        return ids + [rng.randrange(100, self._vocabulary) for _ in range(tokens - len(ids))]

    async def complete(self, prompt: list[int], output_tokens: int) -> Timing:
        """Raises MeasureError for anything but a complete answer."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        stamps: list[float] = []
        counted = 0
        try:
            async with self._client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise MeasureError(f"{self.url}: answered {answer.status_code}: {text[:200]}")
                async for line in answer.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line[6:])
                    if event.get("choices"):
                        stamps.append(time.perf_counter())
                    if usage := event.get("usage"):
                        counted = usage["completion_tokens"]
        except httpx.HTTPError as error:
            raise MeasureError(f"{self.url}: {type(error).__name__} {error}") from None
        if not stamps:
            raise MeasureError(f"{self.url}: the answer had no tokens")
        tokens = counted or len(stamps)
        tpot_s = (stamps[-1] - stamps[0]) / (tokens - 1) if tokens > 1 else 0.0
        gaps = [after - before for before, after in zip(stamps, stamps[1:], strict=False)]
        return Timing(len(prompt), tokens, stamps[0] - began, tpot_s, gaps)


async def replay(target: Target, load: Load, done: Callable[[int], None] | None = None) -> list[Timing | None]:
    """Send a load at its own times, whatever is still under way (open loop). None for a request that failed."""
    began = time.perf_counter()
    finished = 0

    async def send(number: int, arrival: Arrival) -> Timing | None:
        nonlocal finished
        prompt = target.prompt(arrival.prompt_tokens, arrival.keys, load.unit_tokens, number)
        await asyncio.sleep(max(0.0, arrival.at - (time.perf_counter() - began)))
        try:
            return await target.complete(prompt, arrival.output_tokens)
        except MeasureError:
            return None
        finally:
            finished += 1
            if done is not None:
                done(finished)

    return await asyncio.gather(*(send(number, arrival) for number, arrival in enumerate(load.arrivals)))
