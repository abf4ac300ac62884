"""Faults under streaming load: what clients see of each, and how long it takes to heal.

A whole fleet (2P2D, real processes, sockets and Redis; simulated engines, whose tokens depend on prompt and position
only) serves streams without end while one fault after the other is made. Every answer is compared token by token with
an undisturbed one. Saves a table and its figures in benchmarks/results/.

    make chaos                                    # 20 runs of each fault
    python benchmarks/chaos.py --runs 2 --faults decode_killed redis_stopped
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support_fleet import RunningFleet, running_fleet, token_prompt  # noqa: E402

POISON = 7  # in no prompt of `token_prompt`
STREAMS, MAX_TOKENS = 8, 120
PROMPTS = [token_prompt(20 + 173 * i % 1800, seed=i) for i in range(24)]
SETTINGS = (
    "routing.remote_prefill_min_tokens=100",
    "routing.prefix_index=false",  # so that prompts asked again are prefilled remotely again
    f"sim.crash_token={POISON}",
    "launcher.restart_backoff_max_s=1",  # many faults in a row: the next one need not wait for the last to be mended
)
HEAL_TIMEOUT_S = 60.0


@dataclass
class Seen:
    """What the clients of one fault saw."""

    fault: str
    answers: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: int = 0
    gaps_s: list[float] = field(default_factory=list)  # the longest silence within each answer
    heal_s: list[float] = field(default_factory=list)  # until the fleet had its shape again
    leaks: int = 0


async def stream(client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
    """The tokens and the longest silence, seconds. Raises RuntimeError, httpx.HTTPError."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    tokens: list[int] = []
    heard, longest = time.monotonic(), 0.0
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True, "return_token_ids": True}) as got:
        if got.status_code != 200:
            raise RuntimeError(f"{got.status_code}: {(await got.aread()).decode()[:200]}")
        async for line in got.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"])[:200])
            now = time.monotonic()
            heard, longest = now, max(longest, now - heard)
            for choice in event.get("choices", ()):
                tokens += choice.get("token_ids") or []
    return tokens, longest


class Chaos:
    def __init__(self, fleet: RunningFleet, truth: list[list[int]], seed: int) -> None:
        self.fleet, self._truth, self._random = fleet, truth, random.Random(seed)
        self.victims: set[int] = set()  # pids that were killed

    def _healed(self) -> bool:
        """As many workers of each role as at first, none of them a victim, and the queue can be seen."""
        seen = self.fleet.fleet()
        gone = self.victims.isdisjoint(worker["pid"] for worker in seen["workers"])
        return gone and seen["queue"] is not None and self.fleet.shape() == (2, 2)

    async def run(self, name: str, fault: Callable[[Chaos], Awaitable[None]], seen: Seen) -> None:
        """One fault under load; what was seen of it is added to `seen`."""
        stopping = asyncio.Event()
        async with self.fleet.client() as client:
            loops = [asyncio.create_task(self._ask_on(client, offset, stopping, seen)) for offset in range(STREAMS)]
            await asyncio.sleep(self._random.uniform(0.3, 0.8))
            began = time.monotonic()
            await fault(self)
            await asyncio.to_thread(self.fleet.until, self._healed, name, HEAL_TIMEOUT_S)
            seen.heal_s.append(time.monotonic() - began)
            stopping.set()
            await asyncio.gather(*loops)
        try:
            await asyncio.to_thread(self.fleet.assert_no_leaks)
        except AssertionError as error:
            seen.leaks += 1
            print(error)

    async def _ask_on(self, client: httpx.AsyncClient, offset: int, stopping: asyncio.Event, seen: Seen) -> None:
        turn = offset
        while not stopping.is_set():
            at = turn % len(PROMPTS)
            turn += STREAMS
            seen.answers += 1
            try:
                tokens, longest_s = await stream(client, self.fleet.model, PROMPTS[at], MAX_TOKENS)
            except (RuntimeError, httpx.HTTPError) as error:
                seen.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)
                continue
            seen.wrong += tokens != self._truth[at]
            seen.gaps_s.append(longest_s)

    def pid(self, role: str) -> int:
        return self._random.choice(self.pids(role))

    async def kill(self, *pids: int) -> None:
        for pid in pids:
            self.victims.add(pid)
            os.kill(pid, signal.SIGKILL)

    async def stop(self, pid: int, seconds: float) -> None:
        """Frozen for that long; it may have been replaced meanwhile, and be gone."""
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def pids(self, role: str) -> list[int]:
        return [int(worker["pid"]) for worker in self.fleet.workers(role)]

    async def poison(self) -> None:
        """Its own answer has to be an error, and is not counted."""
        async with self.fleet.client() as client:
            with suppress(RuntimeError, httpx.HTTPError):
                await stream(client, self.fleet.model, [POISON, *PROMPTS[0]], 8)
                raise AssertionError("the poison request was answered")


FAULTS: dict[str, Callable[[Chaos], Awaitable[None]]] = {
    "prefill_killed": lambda chaos: chaos.kill(chaos.pid("prefill")),
    "prefill_stopped": lambda chaos: chaos.stop(chaos.pid("prefill"), 6.0),
    "all_prefill_killed": lambda chaos: chaos.kill(*chaos.pids("prefill")),
    "decode_killed": lambda chaos: chaos.kill(chaos.pid("decode")),
    "decode_stopped": lambda chaos: chaos.stop(chaos.pid("decode"), 8.0),
    "redis_killed": lambda chaos: chaos.kill(chaos.fleet.redis_pid()),
    "redis_stopped": lambda chaos: chaos.stop(chaos.fleet.redis_pid(), 5.0),
    "poison": lambda chaos: chaos.poison(),
}


async def chaos(names: list[str], runs: int, seed: int) -> list[Seen]:
    """Faults in turns, `runs` of each, on one fleet."""
    found = {name: Seen(name) for name in names}
    with running_fleet("sim-2p2d.yaml", *SETTINGS) as fleet:
        calm = await fleet.ask_all(PROMPTS, concurrency=4, max_tokens=MAX_TOKENS)
        assert all(answer.ok for answer in calm), [answer.error for answer in calm if not answer.ok]
        world = Chaos(fleet, [answer.tokens for answer in calm], seed)
        for run in range(runs):
            for name in names:
                await world.run(name, FAULTS[name], found[name])
                seen = found[name]
                print(f"{run + 1}/{runs} {name}: {len(seen.errors)} errors, {seen.wrong} wrong, {seen.leaks} leaks")
    return list(found.values())


def table(found: list[Seen]) -> str:
    head = ["fault", "runs", "answers", "errors", "wrong", "longest gap P50", "P99", "max (s)", "heal P50 (s)", "leaks"]
    rows = [head, ["---"] * len(head)]
    for seen in found:
        gaps = sorted(seen.gaps_s) or [0.0]
        cells: list[Any] = [seen.fault, len(seen.heal_s), seen.answers, len(seen.errors), seen.wrong]
        cells += [f"{gaps[int(at * (len(gaps) - 1))]:.2f}" for at in (0.5, 0.99, 1.0)]
        rows.append([str(cell) for cell in [*cells, f"{statistics.median(seen.heal_s or [0.0]):.1f}", seen.leaks]])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    found = asyncio.run(chaos(options.faults, options.runs, options.seed))
    print(table(found))
    options.out.mkdir(parents=True, exist_ok=True)
    note = (
        "Made by `make chaos`: simulated engines, 2P2D, eight streams. Gaps are the longest silence of each answer.\n\n"
    )
    (options.out / "chaos.md").write_text("# Faults under load\n\n" + note + table(found) + "\n")
    (options.out / "chaos.json").write_text(json.dumps([asdict(seen) for seen in found], indent=1) + "\n")
    return int(any(seen.errors or seen.wrong or seen.leaks for seen in found))


if __name__ == "__main__":
    sys.exit(main())
