"""TTFT of conversations on real engines, 2P2D: prefixes fetched and a host tier (`on`), fetched alone, neither (`off`).

A device holds a quarter of all conversations, a host tier all of them. All ask turn after turn, in another order each
time, and decode workers take turns, so that a turn's history is seldom on the device where its prompt is computed.

    python -m benchmarks.bench_turns --model small|demo [--ways on fetch off] [--users 2]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from support_client import Answer
from support_fleet import RunningFleet, running_fleet, small_model, token_prompt

TOKEN_BYTES = {"small": 4096, "demo": 46_080}  # of KV, in float32
FIRST_TOKENS = {"small": 1600, "demo": 320}
MORE_TOKENS = {"small": 120, "demo": 48}
ANSWER_TOKENS = 16


def settings(options: argparse.Namespace, model: str, way: str) -> list[str]:
    longest = FIRST_TOKENS[options.model] + options.turns * (ANSWER_TOKENS + MORE_TOKENS[options.model])
    device_bytes = options.conversations * longest * TOKEN_BYTES[options.model] // 4
    return [
        f"model={model}",
        "workers.prefill.replicas=2",
        "workers.decode.replicas=2",
        "workers.engine_args.dtype=float32",
        "workers.engine_args.block_size=32",
        f"workers.engine_args.kv_cache_memory_bytes={device_bytes}",
        f"workers.engine_args.max_model_len={longest + 64}",
        "routing.remote_prefill_min_tokens=64",
        "routing.decode_choice=round_robin",
        f"kv.fetch={'off' if way == 'off' else 'auto'}",
        f"kv.host_tier_bytes={5 * device_bytes if way == 'on' else 0}",
    ]


async def converse(fleet: RunningFleet, options: argparse.Namespace) -> dict[str, int]:
    """The turn of each request, by its id."""
    order, turn_of, gate = random.Random(7), dict[str, int](), asyncio.Semaphore(options.users)
    histories = [token_prompt(FIRST_TOKENS[options.model], seed=number) for number in range(options.conversations)]
    async with fleet.client() as client:

        async def ask(number: int) -> Answer:
            async with gate:
                return await fleet.ask(client, histories[number], ANSWER_TOKENS)

        for turn in range(1, options.turns + 1):
            numbers = order.sample(range(len(histories)), len(histories))
            for number, answer in zip(numbers, await asyncio.gather(*map(ask, numbers)), strict=True):
                if not answer.ok:
                    raise SystemExit(f"turn {turn}: {answer.status} {answer.error}")
                turn_of[answer.request_id] = turn
                more = token_prompt(MORE_TOKENS[options.model], seed=1000 * turn + number)
                histories[number] += answer.tokens + more
    return turn_of


async def measure(options: argparse.Namespace, model: str, way: str) -> float:
    """The median TTFT from the second turn on, in ms."""
    with running_fleet("demo-1p1d-cpu.yaml", *settings(options, model, way)) as fleet:
        turn_of = await converse(fleet, options)
        lines: list[dict[str, Any]] = await fleet.soon(lambda: ended(fleet, turn_of), "the log has all requests")
        counts = {
            outcome: fleet.metric("pd_kv_fetches_total", outcome=outcome) for outcome in ("fetched", "missed", "late")
        }
        host = fleet.metric("pd_kv_host_hit_tokens_total")
    ttft_ms = {turn: [line["ttft_ms"] for line in lines if turn_of[line["id"]] == turn] for turn in turn_of.values()}
    later = [line for line in lines if turn_of[line["id"]] > 1]
    p50 = statistics.median(line["ttft_ms"] for line in later)
    cached = sum(line.get("cached_tokens", 0) for line in later) / sum(line["prompt_tokens"] for line in later)
    by_turn = ", ".join(f"{statistics.median(values):.0f}" for _, values in sorted(ttft_ms.items()))
    print(f"{way}: TTFT P50 from turn 2 on {p50:.1f} ms; by turn {by_turn} ms", flush=True)
    print(f"  {cached:.0%} of these prompts cached or fetched; fetches {counts}; {host:.0f} tokens from host memory")
    return p50


def ended(fleet: RunningFleet, turn_of: dict[str, int]) -> list[dict[str, Any]] | None:
    lines = [line for line in fleet.request_lines() if line["id"] in turn_of]
    return lines if len(lines) == len(turn_of) else None


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", choices=list(TOKEN_BYTES))
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--users", type=int, default=2, help="requests at a time")
    parser.add_argument("--ways", nargs="+", default=["on", "fetch", "off"], choices=["on", "fetch", "off"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = "demo" if options.model == "demo" else small_model(Path(scratch) / "small")
        p50s = [await measure(options, model, way) for way in options.ways]
    for way, p50 in zip(options.ways[:-1], p50s, strict=False):
        print(f"{way} / {options.ways[-1]}: {p50 / p50s[-1]:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
