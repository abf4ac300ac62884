"""What the host tier and fetches of prefixes cost pushes, and how fast prefixes come, on real engines.

- `tier`: exposed transfer (`bench_kv`) with the host tier on and off, a pair of engines for each, in turns; and off
  while a process of the lowest priority copies memory: what any copy costs decode's first step on two cores.
- `load`: the same while a third engine fetches prefixes from the one that pushes, without a pause; while it takes as
  many steps for prefixes that it has; and while it does nothing. On two cores its steps take decode's.
- `speed`: the time of a raw NIXL WRITE of as many bytes, in descriptors of the same size, divided by that of a fetch:
  of its transfer, in the holder's thread, and of all, from the order until the asker has it.

    python -m benchmarks.bench_fetch --parts tier load speed [--model small|kv-heavy]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from support_fleet import small_model
from support_vllm import frames, tiny_model

from benchmarks.bench_kv import random_prompt, raw_s
from benchmarks.kv_engines import OURS, Pair, Running, running, start, start_pair
from orchestrator.types import KVSource
from workers.engine import Phase

BLOCK_TOKENS = 32
LAYERS = {"small": 4, "kv-heavy": 8}
TOKEN_BYTES = {"small": 4096, "kv-heavy": 128 << 10}
CACHE_TOKENS = 8192  # of an engine
SETTLE_S = 1.0
STEPS, BESIDE_COPIES = "beside its steps", "off, beside copies"
COPIES = """
import os, numpy as np
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
there = np.ones(64 << 20, np.int8)
here = np.zeros_like(there)
print(flush=True)
while True:
    here[:] = there
"""


def model_of(name: str, folder: Path) -> str:
    if name == "kv-heavy":  # as in bench_kv.py
        return str(tiny_model(folder / name, layers=LAYERS[name], heads=16, kv_heads=16, head_dim=128))
    return small_model(folder / name)


def engine_args(cache_bytes: int) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": cache_bytes,
        "max_model_len": 4096,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
    }


def said(what: str, values: list[float]) -> str:
    return f"{what} {statistics.median(values) * 1e3:.2f} ms ({min(values) * 1e3:.2f} to {max(values) * 1e3:.2f})"


def show(what: str, seen: dict[str, list[float]]) -> None:
    """Medians of some ways, and the last divided by each of the others."""
    *others, last = map(statistics.median, seen.values())
    ratios = ", ".join(f"{last / other:.2f}" for other in others)
    print(f"{what}: {', '.join(said(name, values) for name, values in seen.items())}: {ratios}", flush=True)


@asynccontextmanager
async def copying(wanted: bool) -> AsyncIterator[None]:
    if not wanted:
        yield
        return
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", COPIES, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        yield
    finally:
        process.kill()
        await process.wait()


def less(seen: dict[str, list[float]], steps: list[float]) -> dict[str, list[float]]:
    """Decode's first tokens less the median step."""
    return {name: [value - statistics.median(steps) for value in values] for name, values in seen.items()}


async def tier(model: str, cache_bytes: int, options: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        pairs: dict[str, Pair] = {}
        for name, size in (("off", 0), ("on", cache_bytes)):
            starting = start_pair(OURS, model, engine_args(cache_bytes), False, host_tier_bytes=size)
            pairs[name] = await stack.enter_async_context(running(starting))
        ways = {"off": pairs["off"], BESIDE_COPIES: pairs["off"], "on": pairs["on"]}
        for tokens in options.tokens:
            seen: dict[str, list[float]] = {name: [] for name in ways}
            steps = []
            for number in range(options.runs + 1):
                for name in ways if number % 2 else reversed(ways):
                    async with copying(name == BESIDE_COPIES):
                        times = await ways[name].run(random_prompt(tokens))
                    step_s = times.decode_step_s
                    seen[name] += [times.exposed_s + step_s] if number else []  # the first one connects them
                    steps += [step_s] if name == "off" else []  # beside copies decode's next steps take longer too
                    await asyncio.sleep(SETTLE_S)  # what this pair stores is stored before the other's turn
            show(f"tier, {tokens} tokens", less(seen, steps))


class Fetching:
    """Fetches one prefix again and again: the asker forgets it each time."""

    def __init__(self, holder: Running, asker: Running, tokens: int) -> None:
        self._holder, self._asker, self._tokens = holder, asker, tokens
        self._body = frames(random_prompt(tokens + 1), 1)
        self.goes_on = False

    async def hold(self) -> None:
        key = uuid.uuid4().hex
        await self._holder.submit(key, Phase.DECODE, self._body)
        await self._holder.end(key)

    async def once(self) -> tuple[float, float]:
        """Seconds of the transfer, and of all."""
        key, totals = f"{uuid.uuid4().hex}~", self._holder.engine.kv_totals
        transferred, count = totals["pd_stream_seconds"], totals["pd_stream_seconds_count"]
        began = time.monotonic()
        source = KVSource(self._holder.info.kv, key)
        await self._asker.submit(key, Phase.DECODE, self._body, source, prefix_tokens=self._tokens)
        await self._holder.engine.lend(key, self._body, self._tokens)
        output = await self._asker.end(key)
        all_s = time.monotonic() - began
        if output.prefill_stats.num_external_cached_tokens != self._tokens:
            raise SystemExit(f"{output.prefill_stats.num_external_cached_tokens} of {self._tokens} tokens were fetched")
        await self._asker.engine.call("reset_prefix_cache", [], {})
        async with asyncio.timeout(10):
            while totals["pd_stream_seconds_count"] == count:  # counted with the holder's next step
                await asyncio.sleep(0.002)
        return totals["pd_stream_seconds"] - transferred, all_s

    async def cached(self, every_s: float) -> None:
        """The asker's steps of a fetch, for a prefix that it has; returns after so long."""
        began, key = time.monotonic(), uuid.uuid4().hex
        await self._asker.submit(key, Phase.DECODE, self._body)
        await self._asker.end(key)
        await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))

    async def prepare(self, way: str) -> None:
        await self.hold()
        await self._asker.engine.call("reset_prefix_cache", [], {})
        if way == STEPS:
            await self.cached(0.0)

    async def again_and_again(self, way: str, every_s: float) -> int:
        """How many fetches."""
        count = 0
        while self.goes_on:
            if way == STEPS:
                await self.cached(every_s)
            else:
                await self.once()
                count += 1
        return count


async def load(model: str, cache_bytes: int, options: argparse.Namespace) -> None:
    cores = sorted(os.sched_getaffinity(0))
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(running(start_pair(OURS, model, engine_args(cache_bytes), False)))
        starting = start("asker", model, engine_args(cache_bytes), cores=cores[len(cores) // 2 :])
        fetching = Fetching(pair.prefill, await stack.enter_async_context(running(starting)), options.prefix)
        await fetching.hold()
        await fetching.once()
        every_s = statistics.median([(await fetching.once())[1] for _ in range(5)])
        for tokens in options.tokens:
            seen: dict[str, list[float]] = {"alone": [], STEPS: [], "beside fetches": []}
            fetches, steps = 0, []
            for number in range(options.runs + 1):
                for name in seen if number % 2 else reversed(seen):
                    await fetching.prepare(name)
                    fetching.goes_on = name != "alone"
                    others = asyncio.create_task(fetching.again_and_again(name, every_s))
                    times = await pair.run(random_prompt(tokens))
                    seen[name] += [times.exposed_s + times.decode_step_s] if number else []  # the first connects them
                    steps += (
                        [times.decode_step_s] if name == "alone" else []
                    )  # beside others decode's next steps take longer too
                    fetching.goes_on = False
                    fetches += await others
            beside = f"{fetches / (options.runs + 1):.1f} fetches beside each"
            show(f"load, {tokens} tokens, {beside}", less(seen, steps))


async def speed(model: str, cache_bytes: int, options: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(running(start_pair(OURS, model, engine_args(cache_bytes), False)))
        for tokens in options.prefixes:
            fetching = Fetching(pair.prefill, pair.decode, tokens)
            await fetching.hold()
            await fetching.once()
            transfer_s, all_s = zip(*[await fetching.once() for _ in range(options.runs)], strict=True)
            size = tokens * pair.prefill.info.kv_bytes_per_token
            piece = BLOCK_TOKENS * pair.prefill.info.kv_bytes_per_token // LAYERS[options.model]
            raw = (await asyncio.to_thread(raw_s, (size,), False, piece))[size]
            shares = [raw / statistics.median(times) for times in (transfer_s, all_s)]
            what = f"{size / 1e6:.1f} MB in pieces of {piece >> 10} KiB: raw {raw * 1e3:.2f} ms"
            shown = (
                f"{said('transfer', list(transfer_s))}: {shares[0]:.2f}, {said('all', list(all_s))}: {shares[1]:.2f}"
            )
            print(f"speed, {tokens} tokens, {what}, {shown}", flush=True)


def main() -> None:
    parts = {"tier": tier, "load": load, "speed": speed}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=list(parts))
    parser.add_argument("--model", default="small", choices=list(TOKEN_BYTES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="of prompts that are pushed")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that are fetched beside pushes")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[512, 2048, 3968], help="tokens, for `speed`")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    random.seed(7)
    with tempfile.TemporaryDirectory() as scratch:
        model = model_of(options.model, Path(scratch))
        cache_bytes = CACHE_TOKENS * TOKEN_BYTES[options.model]
        for part in options.parts:
            asyncio.run(parts[part](model, cache_bytes, options))


if __name__ == "__main__":
    main()
