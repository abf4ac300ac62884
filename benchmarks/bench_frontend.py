"""What a request costs the front end: CPU time of the frontend process, over simulated engines.

CPU time rather than latency, so that what else runs on the machine matters little. Starts its own fleet (1P1D,
simulated, fast), sends rounds of requests, alternating the cases, and prints the median over rounds.

    python benchmarks/bench_frontend.py [--rounds 5] [--requests 200] [--tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
NAMESPACE = f"bench-frontend-{os.getpid()}"
START_TIMEOUT_S = 120
SHORT, LONG = 32, 1024  # prompt tokens: prefilled where they decode, and remotely
NUMBERS = itertools.count()
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def start_fleet() -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "orchestrator.cli.main", "up", str(ROOT / "configs" / "sim-2p2d.yaml")]
    settings = {
        "namespace": NAMESPACE,
        "frontend.port": 0,
        "workers.prefill.replicas": 1,
        "workers.decode.replicas": 1,
        "sim.speed": 20,
        "routing.remote_prefill_min_tokens": 256,
    }
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    fleet = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert fleet.stdout is not None
    deadline = time.monotonic() + START_TIMEOUT_S
    for line in fleet.stdout:
        if match := re.search(r"Ready.*?(http://\S+)", line):
            # Somebody has to go on reading, or the launcher blocks on a full pipe.
            threading.Thread(target=fleet.stdout.read, daemon=True).start()
            return fleet, match.group(1)
        if time.monotonic() > deadline:
            break
    raise SystemExit("the simulated fleet did not start; run `orchestrator up configs/sim-2p2d.yaml` to see why")


def frontend_pid() -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if b"orchestrator.frontend.server" in command and any(NAMESPACE.encode() in part for part in command):
                return int(folder.name)
        except OSError:
            continue
    raise SystemExit("the frontend process was not found")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def send(session: aiohttp.ClientSession, prompt_tokens: int, tokens: int, stream: bool) -> int:
    """How many events the answer had, where it was streamed."""
    number = next(NUMBERS)  # a prompt asked before would be prefilled where it is cached
    body = {
        "model": "demo",
        "prompt": [1000 + (number * 7919 + i) % 30000 for i in range(prompt_tokens)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    async with session.post("/v1/completions", json=body) as response:
        answer = await response.read()
        if response.status != 200:
            raise SystemExit(f"status {response.status}")
        return answer.count(b"data: ")


async def round_of(url: str, pid: int, case: dict[str, Any], requests: int, tokens: int) -> tuple[float, float]:
    """CPU milliseconds of the frontend per request, and events per request."""
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        gate = asyncio.Semaphore(16)

        async def one() -> int:
            async with gate:
                return await send(session, case["prompt_tokens"], tokens, case["stream"])

        before = cpu_s(pid)
        events = sum(await asyncio.gather(*(one() for _ in range(requests))))
        return (cpu_s(pid) - before) / requests * 1e3, events / requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [
        {"name": f"{way}, {'streamed' if stream else 'whole'}", "prompt_tokens": length, "stream": stream}
        for way, length in (("local", SHORT), ("remote", LONG))
        for stream in (False, True)
    ]
    fleet, url = start_fleet()
    try:
        pid = frontend_pid()
        asyncio.run(round_of(url, pid, cases[0], 50, options.tokens))  # warm
        measured: dict[str, list[float]] = {case["name"]: [] for case in cases}
        events: dict[str, list[float]] = {case["name"]: [] for case in cases}
        for _ in range(options.rounds):
            for case in cases:
                cost, count = asyncio.run(round_of(url, pid, case, options.requests, options.tokens))
                measured[case["name"]].append(cost)
                events[case["name"]].append(count)
    finally:
        fleet.terminate()
        fleet.wait(60)
    print(f"{'case':24} {'ms CPU per request':>20} {'us per token':>14} {'events':>8}   ({options.tokens} tokens out)")
    for name, costs in measured.items():
        median = statistics.median(costs)
        print(f"{name:24} {median:20.2f} {median / options.tokens * 1e3:14.1f} {statistics.median(events[name]):8.1f}")
    if options.json:
        options.json.write_text(json.dumps({"tokens": options.tokens, "ms_per_request": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
