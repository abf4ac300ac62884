"""CPU time of two engines by thread: at rest, while decode waits for KV, and while many requests are served.

The part `threads` of `benchmarks.gpu`. What spins shows as a thread that is busy while nothing is computed.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

import psutil
from support_vllm import frames

from benchmarks.kv_engines import Pair
from orchestrator.types import KVSource
from workers.engine import Phase

_LOOK_S = 4.0
_SHOWN = 3  # threads, those with most CPU time
Prompt = Callable[[int], list[int]]


async def cpu_by_thread(pair: Pair, tokens: int, users: int, each: int, prompt: Prompt) -> list[dict[str, Any]]:
    """A row for each engine and state. The engines have to be the only ones that this process has started."""
    engines = _engines()
    rows: list[dict[str, Any]] = []

    async def look(state: str, until: Any, requests: int = 0) -> None:
        before, began = [_threads(pid) for pid in engines.values()], time.monotonic()
        await until
        spent_s = time.monotonic() - began
        gb = requests * tokens * pair.prefill.info.kv_bytes_per_token / 1e9
        for name, pid, was in zip(engines, engines.values(), before, strict=True):
            used = sorted((now - was.get(thread, 0.0) for thread, now in _threads(pid).items()), reverse=True)
            row = {"state": state, "engine": name, "cores": sum(used) / spent_s}
            row["threads"] = [one / spent_s for one in used[:_SHOWN]]
            if requests:
                row |= {"ms_per_request": 1e3 * sum(used) / requests, "ms_per_gb": 1e3 * sum(used) / gb}
            rows.append(row)

    await pair.run(prompt(tokens))
    await asyncio.sleep(1)
    await look("at rest", asyncio.sleep(_LOOK_S))
    for waiting in (1, users):
        keys = [uuid.uuid4().hex for _ in range(waiting)]
        bodies = [frames(prompt(tokens), 6) for _ in keys]
        for key, body in zip(keys, bodies, strict=True):
            await pair.decode.submit(key, Phase.DECODE, body, KVSource(pair.prefill.info.kv, key))
        await asyncio.sleep(1)
        await look(f"{waiting} wait for KV", asyncio.sleep(_LOOK_S))
        for key, body in zip(keys, bodies, strict=True):
            await pair.prefill.submit(key, Phase.PREFILL, body)
        for key in keys:
            await pair.decode.end(key)

    async def user() -> None:
        for _ in range(each):
            await pair.run(prompt(tokens))

    await look(f"{users} users", asyncio.gather(*(user() for _ in range(users))), users * each)
    return rows


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The cells of a table, by `HEAD`."""
    cost = ("ms_per_request", "ms_per_gb")
    return [
        [row["state"], row["engine"], f"{row['cores']:.3f}", ", ".join(f"{one:.3f}" for one in row["threads"])]
        + [f"{row[key]:.1f}" if key in row else "" for key in cost]
        for row in rows
    ]


HEAD = ["state", "engine", "cores", "busiest threads, cores", "CPU ms per request", "CPU ms per GB of KV"]


def _engines() -> dict[str, int]:
    """Process ids, by role: the engine for prefill starts first."""
    found = [child for child in psutil.Process().children(recursive=True) if child.name().startswith("VLLM::Engine")]
    found.sort(key=psutil.Process.create_time)
    return dict(zip(("prefill", "decode"), (child.pid for child in found), strict=True))


def _threads(pid: int) -> dict[str, float]:
    """CPU seconds of each thread so far."""
    spent = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
            spent[thread] = int(file.read().split()[0]) / 1e9
    return spent
