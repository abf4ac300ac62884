"""A thousand workers with one frontend and with four: they join, stand idle, serve, die, and a frontend starts again.

All processes are on this machine. Measured are a frontend's and Redis's CPU time. The workers, which would be on other
machines, take most of the CPU. Writes benchmarks/results/scale.json and prints a table. If something takes longer than
DEADLINE_S, these have the figures from before.

python -m benchmarks.scale [--workers 1000] [--frontends 1 4] [--rate 200]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.scale.table import table
from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.store.client import RedisAway, connect
from orchestrator.wire.addresses import free_ports

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GROUPS = 10  # processes of workers; one of them is killed
STEADY_S, LOAD_S = 15.0, 20.0
DEADLINE_S = 120.0
POLL_S = 0.02
CONFIG: dict[str, Any] = {
    "model": "simulated",
    "engine": "sim",
    "namespace": "scale",
    "ratio": {"mode": "off"},
    # Steps as long as those of a large model: 20 ms.
    "sim": {"step_base_ms": 20},
    "workers": {"engine_args": {"num_gpu_blocks_override": 2048, "max_model_len": 8192}},
    "redis": {"timeout_s": 10},  # one machine does the work of a thousand
}


class Frontend:
    """A frontend's process, and the last line that it wrote."""

    def __init__(self, file: Path, url: str) -> None:
        command = [sys.executable, "-m", "benchmarks.scale.frontend", str(file), url]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.now: dict[str, Any] = {}
        self.decisions_s: list[tuple[float, float]] = []
        self.failures: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            self.decisions_s += told.pop("decisions_s")
            self.failures += told.pop("failures")
            self.now = told

    def ask(self, rate: float) -> None:
        """Have it send `rate` requests per second from now on."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rate}\n")
        self.process.stdin.flush()

    def sees(self, count: int) -> bool:
        return bool(self.now) and self.now["ready"] == self.now["known"] == count

    def since(self, before: dict[str, Any]) -> dict[str, float]:
        """The counts since `before`, per second."""
        now = self.now
        elapsed_s = now["age_s"] - before["age_s"]
        counted = ("reports", "prefix_events", "messages", "sent", "answered", "failed", "cpu_s")
        return {name: (now[name] - before[name]) / elapsed_s for name in counted}


class TooSlow(Exception):
    """Something took longer than DEADLINE_S. The text is one line."""


def wait(true: Callable[[], bool], what: str) -> float:
    """Wait until `true()`. Returns the seconds that it took. Raises TooSlow."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > DEADLINE_S:
            raise TooSlow(f"not within {DEADLINE_S:g} s: {what}")
        time.sleep(POLL_S)
    return time.monotonic() - began


def shares(count: int) -> list[range]:
    """The numbers of the workers in each process. The last process has a tenth of them, or a few more."""
    processes = min(GROUPS, count)
    ends = [count * number // processes for number in range(processes + 1)]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


@contextmanager
def workers(file: Path, url: str, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of workers, which start the workers when they read a line. Raises TooSlow."""
    commands = [
        [
            sys.executable,
            "-m",
            "benchmarks.scale.workers",
            str(file),
            url,
            str(ids.start),
            str(len(ids)),
            str(count // 5),
        ]
        for ids in shares(count)
    ]
    pipe = subprocess.PIPE
    groups = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for command in commands]
    try:
        for group in groups:
            assert group.stdout is not None
            out = group.stdout
            wait(lambda out=out: bool(select.select([out], [], [], 0)[0]), "workers are made")
            if out.readline() != "made\n":
                raise TooSlow(f"workers ended with {group.wait()} before they started; what they said is above")
        yield groups
    finally:
        for group in groups:
            group.kill()
            group.wait()


def measure(
    result: dict[str, Any], count: int, frontends: int, rate: float, folder: Path, url: str, server: Server
) -> None:
    """Measure one fleet. Adds each figure to `result` as soon as it is known. Raises TooSlow."""
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    views = [Frontend(file, url) for _ in range(frontends)]
    try:
        with workers(file, url, count) as groups:
            wait(lambda: all(view.sees(0) for view in views), "frontends have started")
            empty, redis, used_s = [view.now for view in views], server.counters(), cpu_s(groups)
            for group in groups:
                assert group.stdin is not None
                group.stdin.write("go\n")
                group.stdin.flush()
            result["join_s"] = wait(lambda: all(view.sees(count) for view in views), "all have joined")
            result["join_redis"] = {name: value - redis[name] for name, value in server.counters().items()}
            result["join_cpu_s"] = {
                "workers": cpu_s(groups) - used_s,
                "frontend": max(view.now["cpu_s"] - old["cpu_s"] for view, old in zip(views, empty, strict=True)),
            }
            time.sleep(5)
            result |= held(views, empty, count)
            result["idle"] = observed(views, groups, server, STEADY_S)
            for view in views:
                view.ask(rate / frontends)
            time.sleep(2)
            result["load"] = observed(views, groups, server, LOAD_S)
            decisions_s = [times for view in views for times in view.decisions_s]
            result["decision_us"] = percentiles_us([elapsed_s for elapsed_s, _ in decisions_s])
            result["decision_cpu_us"] = percentiles_us([used_s for _, used_s in decisions_s])
            groups[-1].kill()
            lost = len(shares(count)[-1])
            result["lost"] = lost
            result["loss_noticed_s"] = wait(lambda: all(view.sees(count - lost) for view in views), "the loss is seen")
            time.sleep(5)
            views[-1].ask(0)
            views[-1].process.kill()
            views[-1].process.wait()
            failures = [failure for view in views for failure in view.failures]
            others, before = views[:-1], [view.now for view in views[:-1]]
            redis, used_s = server.counters(), cpu_s(groups)
            views[-1] = Frontend(file, url)
            result["restart_with_imports_s"] = wait(lambda: views[-1].sees(count - lost), "the new frontend sees all")
            result["restart_s"] = views[-1].now["age_s"]
            result["restart_cpu_s"] = {
                "workers": cpu_s(groups) - used_s,
                "frontend": views[-1].now["cpu_s"],
                "others": sum(view.now["cpu_s"] - old["cpu_s"] for view, old in zip(others, before, strict=True)),
                "redis": server.counters()["cpu_s"] - redis["cpu_s"],
            }
            for view in views:
                view.ask(0)
            wait(lambda: all(v.now["sent"] == v.now["answered"] + v.now["failed"] for v in views), "all are answered")
            failures += [failure for view in views for failure in view.failures]
            result["failed"], result["failures"] = len(failures), failures[:5]
    finally:
        for view in views:
            view.process.kill()
            view.process.wait()


def percentiles_us(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50": ordered[len(ordered) // 2] * 1e6, "p99": ordered[len(ordered) * 99 // 100] * 1e6}


def held(views: list[Frontend], empty: list[dict[str, Any]], count: int) -> dict[str, float]:
    """Descriptors and memory that each worker costs a frontend: the most of all frontends."""
    pairs = [(view.now, before) for view, before in zip(views, empty, strict=True)]
    return {
        "descriptors_per_worker": max(now["descriptors"] - before["descriptors"] for now, before in pairs) / count,
        "kb_per_worker": max(now["memory_bytes"] - before["memory_bytes"] for now, before in pairs) / count / 1024,
    }


def cpu_s(processes: list[subprocess.Popen[str]]) -> float:
    times = [psutil.Process(process.pid).cpu_times() for process in processes]
    return sum(time.user + time.system for time in times)


def observed(
    views: list[Frontend], groups: list[subprocess.Popen[str]], server: Server, seconds: float
) -> dict[str, Any]:
    before, redis, used_s = [view.now for view in views], server.counters(), cpu_s(groups)
    time.sleep(seconds)
    after = server.counters()
    rates = [view.since(old) for view, old in zip(views, before, strict=True)]
    return {
        "per_frontend": {name: max(rate[name] for rate in rates) for name in rates[0]},
        "redis": {name: (after[name] - redis[name]) / seconds for name in after},
        "workers_cpu_s": (cpu_s(groups) - used_s) / seconds,
        "load_average": os.getloadavg()[0],
    }


class Server:
    """The counters of a Redis server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def counters(self) -> dict[str, float]:
        async def ask() -> dict[str, float]:
            async with await connect(self._url, 10) as redis:
                found = {**await redis.info("stats"), **await redis.info("cpu")}
            return {
                "commands": found["total_commands_processed"],
                "out_bytes": found["total_net_output_bytes"],
                "cpu_s": float(found["used_cpu_user"]) + float(found["used_cpu_sys"]),
            }

        return asyncio.run(ask())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--frontends", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rate", type=float, default=200, help="requests per second, of all frontends together")
    parser.add_argument("--json", type=Path, default=RESULTS / "scale.json")
    options = parser.parse_args()
    results = list[dict[str, Any]]()
    for frontends in options.frontends:
        with tempfile.TemporaryDirectory(prefix="pd-scale-") as folder:
            redis = EmbeddedRedis()
            url = asyncio.run(redis.start(Path(folder), next(free_ports("127.0.0.1"))))
            try:
                results.append({"frontends": frontends, "workers": options.workers})
                measure(results[-1], options.workers, frontends, options.rate, Path(folder), url, Server(url))
            except (TooSlow, RedisAway) as error:
                results[-1]["ended"] = str(error)
                print(f"{options.workers} workers, {frontends} frontends: {error}", file=sys.stderr)
            finally:
                asyncio.run(redis.stop())
        print(table(results), flush=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if any("ended" in result for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
