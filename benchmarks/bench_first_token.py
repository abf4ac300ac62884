"""The first token from prefill or from decode: the effect on TTFT and on the gap before the second token.

There are one real prefill and one real decode worker, and two routers that use both: one with `routing.first_token:
prefill`, the other with `decode`. The routers take turns, one request at a time, so that other load on the machine
affects both equally. Then it counts how often decode samples another token than prefill has sent.

    python -m benchmarks.bench_first_token [--runs 15] [--models demo kv-heavy] [--busy 0 4]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from support_vllm import tiny_model
from support_workers import Workers, running_workers
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreRequest

from orchestrator.config.model import resolve_model
from orchestrator.frontend.vllm_codec import VllmCodec
from orchestrator.frontend.wiring import FleetConnection
from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.types import Role
from orchestrator.wire.addresses import free_ports

HERE = Path(__file__).parent

MODES = ("decode", "prefill")
START_S = 180.0
REQUEST_S = 120.0


@dataclass(frozen=True)
class Row:
    """Medians, milliseconds. `gap`: between the first and the second token; `tpot`: mean over all after the first."""

    model: str
    tokens: int
    busy: int
    first_token: str
    ttft: float
    gap: float
    second: float  # from the request to its second token
    tpot: float
    runs: int


class Client:
    """One router, as in a frontend, and the times of the tokens that it returns."""

    def __init__(self, workers: Workers, mode: str) -> None:
        routing = msgspec.structs.replace(workers.config.routing, first_token=mode, remote_prefill_min_tokens=32)
        config = msgspec.structs.replace(workers.config, routing=routing)
        self.connection = FleetConnection(f"bench-{mode}", config, workers.redis, VllmCodec())
        self._outputs: dict[str, asyncio.Queue[tuple[float, Any]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self.connection.run()), asyncio.create_task(self._distribute())]
        await self.connection.synced()
        async with asyncio.timeout(START_S):
            while not (self.connection.fleet.ready(Role.PREFILL) and self.connection.fleet.ready(Role.DECODE)):
                await asyncio.sleep(0.05)

    async def _distribute(self) -> None:
        while True:
            batch = await self.connection.router.batches.get()
            now = time.monotonic()
            for output in batch.outputs:
                self._outputs[output.request_id].put_nowait((now, output))

    async def ask(self, prompt: list[int], max_tokens: int) -> list[float]:
        """Seconds from the request to each token of its answer."""
        key = uuid.uuid4().hex
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = EngineCoreRequest(key, prompt, None, sampling, None, time.time(), None, None, None)
        outputs = self._outputs[key] = asyncio.Queue()
        began, times = time.monotonic(), []
        await self.connection.router.submit(request)
        async with asyncio.timeout(REQUEST_S):
            while True:
                now, output = await outputs.get()
                times += [now - began] * len(output.new_token_ids)
                if output.finish_reason is not None:
                    del self._outputs[key]
                    if len(times) != max_tokens:
                        raise SystemExit(f"{len(times)} tokens instead of {max_tokens}: {output.finish_reason}")
                    return times

    @contextlib.asynccontextmanager
    async def decoding(self, count: int) -> AsyncIterator[None]:
        """In this context `count` other requests decode, with local prefill."""

        async def forever() -> None:
            while True:
                await self.ask(_random_prompt(16), 400)

        others = [asyncio.create_task(forever()) for _ in range(count)]
        try:
            yield
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            self.connection.router.abort(list(self.connection.router.requests))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.connection.close()


def _random_prompt(tokens: int) -> list[int]:
    return [random.randrange(3, 500) for _ in range(tokens)]


def _text_prompts(tokenizer: Any, count: int, tokens: int) -> list[list[int]]:
    """Windows of this project's own text. Unlike random tokens they lead to clear predictions, as real prompts do."""
    text = "\n".join(path.read_text() for path in sorted(HERE.parent.glob("**/*.md")) if ".venv" not in path.parts)
    ids = tokenizer.encode(text)
    step = max(1, (len(ids) - tokens) // count)
    return [ids[at : at + tokens] for at in range(0, step * count, step)]


@contextlib.asynccontextmanager
async def fleet(model: str, engine_args: dict[str, Any]) -> AsyncIterator[dict[str, Client]]:
    cores = sorted(os.sched_getaffinity(0))
    halves = {Role.PREFILL: cores[: len(cores) // 2] or cores, Role.DECODE: cores[len(cores) // 2 :]}
    server = EmbeddedRedis()
    with tempfile.TemporaryDirectory() as folder:
        await server.start(Path(folder), next(free_ports("127.0.0.1")))
        try:
            times = {"timeout_s": 10.0, "start_timeout_s": START_S}
            async with running_workers(server, workers={"engine_args": engine_args, **times}) as workers:
                workers.tree |= {"model": model, "engine": "vllm"}
                for role, mine in halves.items():
                    await workers.spawn(role, "--cores", ",".join(map(str, mine)), wait=False)
                for worker in workers.processes:
                    await workers.registered(worker.id, timeout_s=START_S)
                clients = {mode: Client(workers, mode) for mode in MODES}
                for client in clients.values():
                    await client.start()
                yield clients
                for client in clients.values():
                    await client.close()
        finally:
            await server.stop()


async def measure(
    name: str, clients: dict[str, Client], lengths: list[int], busy: int, options: argparse.Namespace
) -> list[Row]:
    rows = []
    async with clients["decode"].decoding(busy):
        for client in clients.values():
            await client.ask(_random_prompt(max(lengths)), 8)  # does the handshakes, and touches every page once
        for length in lengths:
            seen: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in MODES}
            for run in range(options.runs):
                for mode in MODES if run % 2 else reversed(MODES):
                    times = await clients[mode].ask(_random_prompt(length), options.answer)
                    tpot = (times[-1] - times[0]) / (len(times) - 1)
                    seen[mode].append((times[0], times[1] - times[0], times[1], tpot))
            for mode in MODES:
                figures: list[Any] = [statistics.median(column) * 1e3 for column in zip(*seen[mode], strict=True)]
                rows.append(Row(name, length, busy, mode, *figures, runs=options.runs))
                print(_line(rows[-1]), flush=True)
    return rows


def _line(row: Row) -> str:
    return (
        f"{row.model:<9} {row.tokens:>5} tokens, {row.busy} others   first_token: {row.first_token:<8}"
        f"TTFT {row.ttft:>8.1f}   gap {row.gap:>6.1f}   second token {row.second:>8.1f}   TPOT {row.tpot:>6.1f}  ms"
    )


async def mismatches(client: Client, prompts: list[list[int]]) -> tuple[int, int]:
    """Returns (first tokens that differ, first tokens sent from prefill)."""
    metrics = Metrics()
    before = metrics.first_token_mismatches._value.get(), metrics.first_tokens_early._value.get()
    gate = asyncio.Semaphore(4)

    async def one(prompt: list[int]) -> None:
        async with gate:
            await client.ask(prompt, 3)

    await asyncio.gather(*(one(prompt) for prompt in prompts))
    after = metrics.first_token_mismatches._value.get(), metrics.first_tokens_early._value.get()
    return int(after[0] - before[0]), int(after[1] - before[1])


async def run(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[Row] = []
    differing: dict[str, Any] = {}
    engine = {"enforce_eager": True, "skip_tokenizer_init": True, "max_num_seqs": 16, "max_model_len": 4096}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            if name == "demo":
                model = resolve_model("demo")
                args = engine | {"dtype": "bfloat16", "kv_cache_memory_bytes": 512 << 20}
            else:  # 128 KiB of KV per token, as in bench_kv.py
                model = str(tiny_model(Path(scratch) / "heavy", layers=8, heads=16, kv_heads=16, head_dim=128))
                args = engine | {"dtype": "float32", "kv_cache_memory_bytes": 2 << 30, "max_num_batched_tokens": 256}
            async with fleet(model, args) as clients:
                for busy in options.busy:
                    rows += await measure(name, clients, options.tokens, busy, options)
                if name == "demo":
                    texts = _text_prompts(get_tokenizer(model), options.prompts, 300)
                    for kind, prompts in (("text", texts), ("random", [_random_prompt(300) for _ in texts])):
                        wrong, sent = await mismatches(clients["prefill"], prompts)
                        differing[kind] = {"prompts": sent, "mismatches": wrong}
                        print(f"{name}, bfloat16, greedy, {kind} prompts: decode differs from prefill {wrong}/{sent}")
    return {"rows": [msgspec.to_builtins(row) for row in rows], "mismatches": differing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=15, help="requests per mode and length")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--answer", type=int, default=16, help="tokens per answer")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 4], help="others that decode meanwhile")
    parser.add_argument("--models", nargs="+", default=["demo", "kv-heavy"], choices=["demo", "kv-heavy"])
    parser.add_argument("--prompts", type=int, default=200, help="greedy prompts to count mismatches with")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "bench_first_token.json")
    options = parser.parse_args()
    random.seed(5)
    found = asyncio.run(run(options))
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"saved {options.out}")


if __name__ == "__main__":
    main()
