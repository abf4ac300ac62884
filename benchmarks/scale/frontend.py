"""A frontend without its HTTP server: transport, fleet view and router. It sends requests at the rate that it reads.

It reads lines with a rate (requests per second), and writes its counts as a line of JSON, ten times a second.

python -m benchmarks.scale.frontend FILE URL
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvloop
from support_router import RouterClient

from orchestrator.config.settings import Config, load_config
from orchestrator.process.parent import die_with_parent
from orchestrator.store.client import connect
from orchestrator.types import Role

T = TypeVar("T")
TELL_S = 0.1
MEASURE_S = 1.0  # less often, since listing all descriptors is work too
PROMPT_TOKENS, LONG_TOKENS, OUTPUT_TOKENS = 64, 512, 16
ANSWER_DEADLINE_S = 60.0


class Counted:
    """A frontend whose messages, decisions and requests are counted."""

    def __init__(self, client: RouterClient) -> None:
        self.client, connection = client, client.connection
        self.counts = dict.fromkeys(("reports", "prefix_events", "messages", "sent", "answered", "failed"), 0)
        self.decisions_s: list[tuple[float, float]] = []  # elapsed, and CPU time of this thread
        self.failures: list[str] = []
        self.rate = 0.0
        self.started_at = time.monotonic()
        connection.fleet.take_load = self._counting("reports", connection.fleet.take_load)  # type: ignore[method-assign]
        connection.prefixes.take_events = self._counting(  # type: ignore[method-assign]
            "prefix_events", connection.prefixes.take_events
        )
        connection.router.handle = self._counting("messages", connection.router.handle)  # type: ignore[method-assign]
        decider = connection.router._decider
        decider.decide = self._timed(decider.decide)  # type: ignore[method-assign]

    def _counting(self, name: str, call: Callable[..., T]) -> Callable[..., T]:
        def counting(*args: Any) -> T:
            self.counts[name] += 1
            return call(*args)

        return counting

    def _timed(self, call: Callable[..., T]) -> Callable[..., T]:
        def timed(*args: Any) -> T:
            began, used = time.perf_counter(), time.thread_time()
            result = call(*args)
            self.decisions_s.append((time.perf_counter() - began, time.thread_time() - used))
            return result

        return timed

    async def send(self) -> None:
        """Send requests at even gaps, one in ten with a long prompt. All prompts differ."""
        numbers, running, due = itertools.count(os.getpid() * 1_000_000), set[asyncio.Task[None]](), time.monotonic()
        while True:
            if not self.rate:
                due = time.monotonic()
                await asyncio.sleep(TELL_S)
                continue
            due += 1 / self.rate
            await asyncio.sleep(due - time.monotonic())
            task = asyncio.create_task(self._ask(next(numbers)))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _ask(self, number: int) -> None:
        length = LONG_TOKENS if number % 10 == 0 else PROMPT_TOKENS
        prompt = random.Random(number).choices(range(1000, 30_000), k=length)
        self.counts["sent"] += 1
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                await self.client.ask(prompt, OUTPUT_TOKENS)
            self.counts["answered"] += 1
        except Exception as error:  # on any error the client has no answer
            self.counts["failed"] += 1
            self.failures.append(f"{type(error).__name__}: {error}")

    def line(self) -> dict[str, Any]:
        fleet = self.client.connection.fleet
        decisions, self.decisions_s = self.decisions_s, []
        failures, self.failures = self.failures, []
        return {
            "ready": fleet.ready(Role.PREFILL) + fleet.ready(Role.DECODE),
            "known": len(fleet.workers),
            "age_s": time.monotonic() - self.started_at,
            "cpu_s": time.process_time(),
            "decisions_s": decisions,
            "failures": failures,
            **self.counts,
        }


async def run(config: Config, url: str) -> None:
    client = RouterClient(await connect(url, config.redis.timeout_s), config)
    counted, process = Counted(client), psutil.Process()
    await client.start()
    sending = asyncio.create_task(counted.send())
    commands = asyncio.create_task(_read_rates(counted))
    measured, measured_at = dict[str, int](), -MEASURE_S
    while not sending.done() and not commands.done():
        if time.monotonic() - measured_at > MEASURE_S:
            measured = {"descriptors": process.num_fds(), "memory_bytes": process.memory_info().rss}
            measured_at = time.monotonic()
        print(json.dumps(counted.line() | measured), flush=True)
        await asyncio.sleep(TELL_S)
    sending.cancel()
    await client.close()


async def _read_rates(counted: Counted) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        counted.rate = float(line)


if __name__ == "__main__":
    die_with_parent()
    logging.basicConfig(level=logging.ERROR)
    uvloop.run(run(load_config(Path(sys.argv[1])), sys.argv[2]))
