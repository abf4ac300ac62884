"""The cost of a request for the frontend: CPU time of its process, over simulated engines.

It measures CPU time rather than latency, since other load on the machine affects that less. It starts its own fleet
(1P1D, simulated, fast), sends rounds of requests, alternating the cases, and prints the median over rounds. With
`--against` a second fleet runs the code of another checkout and takes turns with the first. It may be the same checkout
if `--set` or `--config` changes the first fleet. Prompts are token ids, or with `--text` words that the frontend
tokenizes. Requests ask for the model `demo`.

    python -m benchmarks.bench_frontend [--rounds 5] [--requests 200] [--tokens 64] [--against ../other-checkout]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.peers.processes import Processes, running
from benchmarks.peers.systems import SIMULATED, Model, ours
from benchmarks.peers.texts import Texts
from orchestrator.config.model import resolve_model

ROOT = Path(__file__).parents[1]
CONFIG = Path("sim-2p2d.yaml")  # of a checkout's configs
SHORT, LONG = 32, 1024  # prompt tokens of a local and of a remote prefill
NUMBERS = itertools.count()


@dataclass
class Fleet:
    """A running fleet, and the cost of its frontend's requests: CPU milliseconds and events, by case and round."""

    url: str
    frontend_pid: int
    cost_ms: dict[str, list[float]] = field(default_factory=dict)
    events: dict[str, list[float]] = field(default_factory=dict)


def start_fleet(processes: Processes, checkout: Path, config: Path, speed: float, chosen: list[str]) -> Fleet:
    namespace = f"bench-frontend-{os.getpid()}-{next(NUMBERS)}"
    # What decides on the ratio is a part of what a frontend costs.
    more = SIMULATED | {"namespace": namespace, "sim.speed": speed, "ratio.mode": "auto"}
    for setting in chosen:
        key, _, value = setting.partition("=")
        more[key] = value
    serving = ours(processes, Model("demo"), more, checkout, config)
    # The command of a process that forks frontends names their module too.
    frontends = (each.pid for each in processes.members(*serving.front) if namespace in " ".join(each.cmdline()))
    if (pid := next(frontends, None)) is None:
        raise SystemExit("no process of a frontend was found, whose CPU time this measures")
    return Fleet(serving.url, pid)


def cpu_s(pid: int) -> float:
    """CPU seconds of all living threads of a process, as the scheduler counts them (schedstat, in nanoseconds)."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def token_ids(count: int) -> list[int]:
    number = next(NUMBERS)  # a repeated prompt would be prefilled where it is cached
    return [1000 + (number * 7919 + i) % 30000 for i in range(count)]


async def send(session: aiohttp.ClientSession, prompt: list[int] | str, tokens: int, stream: bool) -> int:
    """Send a request. Returns the number of events in a streamed answer."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    async with session.post("/v1/completions", json=body) as response:
        answer = await response.read()
        if response.status != 200:
            raise SystemExit(f"status {response.status}")
        return answer.count(b"data: ")


async def round_of(
    fleet: Fleet, case: dict[str, Any], requests: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Send one round of requests. Returns the frontend's CPU milliseconds per request, and events per request."""
    async with aiohttp.ClientSession(fleet.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        gate = asyncio.Semaphore(options.users)

        async def one() -> int:
            async with gate:
                return await send(session, case["prompt"](case["prompt_tokens"]), options.tokens, case["stream"])

        before = cpu_s(fleet.frontend_pid)
        events = sum(await asyncio.gather(*(one() for _ in range(requests))))
        return (cpu_s(fleet.frontend_pid) - before) / requests * 1e3, events / requests


def measure(fleets: list[Fleet], cases: list[dict[str, Any]], options: argparse.Namespace) -> None:
    for fleet in fleets:
        for case in cases:
            asyncio.run(round_of(fleet, case, 50, options))  # warm
    for number in range(options.rounds):
        for case in cases:
            for fleet in fleets if number % 2 else fleets[::-1]:
                cost, count = asyncio.run(round_of(fleet, case, options.requests, options))
                fleet.cost_ms.setdefault(case["name"], []).append(cost)
                fleet.events.setdefault(case["name"], []).append(count)


def report(fleets: list[Fleet], tokens: int) -> None:
    against = f"{'against':>9} {'ratio (least to most)':>24}" if len(fleets) > 1 else ""
    print(
        f"{'case':18} {'ms CPU per request':>20} {'us per token':>14} {'events':>8} {against}   ({tokens} tokens out)"
    )
    for name, costs in fleets[0].cost_ms.items():
        median, events = statistics.median(costs), statistics.median(fleets[0].events[name])
        line = f"{name:18} {median:20.2f} {median / tokens * 1e3:14.1f} {events:8.1f}"
        if len(fleets) > 1:
            others = fleets[1].cost_ms[name]
            ratios = [cost / other for cost, other in zip(costs, others, strict=True)]
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
            line += f" {statistics.median(others):9.2f} {spread:>24}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument(
        "--users", type=int, default=16, help="requests at once: tokens that wait for each other are joined"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--speed", type=float, default=20, help="sim.speed; at 1 a step lasts 2.3 ms")
    parser.add_argument("--against", type=Path, help="another checkout, whose fleet takes turns with this one's")
    parser.add_argument("--text", action="store_true", help="prompts are words, not token ids")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the fleet of this checkout")
    parser.add_argument("--config", type=Path, help="of the fleet of this checkout")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    words = Texts(resolve_model("demo"), seed=int.from_bytes(os.urandom(4)))
    cases = [
        {"name": f"{way}, {'streamed' if stream else 'whole'}", "prompt_tokens": length, "stream": stream}
        | {"prompt": words.make if options.text else token_ids}
        for way, length in (("local", SHORT), ("remote", LONG))
        for stream in (False, True)
    ]
    chosen = [(ROOT, options.config.absolute() if options.config else CONFIG, options.set)]
    if options.against:
        chosen.append((options.against.resolve(), CONFIG, []))
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-frontend-")))
        fleets = []
        for number, (checkout, config, sets) in enumerate(chosen):
            processes = stack.enter_context(running(logs / str(number)))
            fleets.append(start_fleet(processes, checkout, config, options.speed, sets))
        measure(fleets, cases, options)
    report(fleets, options.tokens)
    if options.json:
        saved = {"tokens": options.tokens, "ms_per_request": fleets[0].cost_ms}
        if len(fleets) > 1:
            saved["ms_per_request_against"] = fleets[1].cost_ms
        options.json.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
