"""Groups of ranks that step together: `routing.ranks` against its other values, in turns, on live fleets.

Each way has a fleet of its own: one decode group, with `--prefill` prefill ranks before it. Prompts and answers
are of mixed lengths, and a new request is sent when one has ended. The engines are simulated, with the times below, or
with `--experts` vLLM's on this machine's CPU, with a tiny model of random experts.

    python benchmarks/bench_ranks.py [--ways adp round_robin] [--ranks 4] [--prefill 0] [--users 64] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

from support_fleet import DEMO_VOCABULARY, RunningFleet, running_fleet, token_prompt, with_demo_tokenizer  # noqa: E402
from support_models import special_model  # noqa: E402

SIMULATED = (
    "sim.step_base_ms=50",
    "sim.prefill_us_per_token=500",
    "sim.decode_us_per_seq=500",
    "workers.engine_args.max_num_seqs=64",
)
MEAN_IN, MEAN_OUT, SIGMA = 400, 80, 1.0  # tokens; of the logarithm of prompt lengths


def requests(count: int, seed: int, longest: int) -> list[tuple[list[int], int]]:
    """Prompts, and the length of each answer."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        length = min(longest, max(8, int(rng.lognormvariate(0, SIGMA) * MEAN_IN / 1.65)))
        made.append((token_prompt(length, seed=1000 * seed + number), rng.randrange(MEAN_OUT // 2, 3 * MEAN_OUT // 2)))
    return made


async def load(fleet: RunningFleet, made: list[tuple[list[int], int]], users: int) -> float:
    """Seconds until all are answered, by so many at once."""
    waiting = iter(made)
    async with httpx.AsyncClient(base_url=fleet.url, timeout=300) as client:

        async def user() -> None:
            for prompt, tokens in waiting:
                answer = await fleet.ask(client, prompt, max_tokens=tokens)
                assert answer.ok, answer.error

        began = time.monotonic()
        await asyncio.gather(*(user() for _ in range(users)))
        return time.monotonic() - began


def counters(fleet: RunningFleet) -> dict[str, Any]:
    ttft = "vllm:time_to_first_token_seconds"
    found = {
        role: worker["group"] for role in ("prefill", "decode") for worker in fleet.workers(role) if worker["group"]
    }
    return {**found, "ttft_s": fleet.metric(f"{ttft}_sum"), "ttfts": fleet.metric(f"{ttft}_count")}


def measure(fleet: RunningFleet, made: list[tuple[list[int], int]], users: int) -> dict[str, float]:
    before = counters(fleet)
    seconds = asyncio.run(load(fleet, made, users))
    time.sleep(1)  # the last reports
    after = counters(fleet)
    tokens = sum(len(prompt) + answer for prompt, answer in made)
    result = {
        "tokens_per_s": tokens / seconds,
        "ttft_s": (after["ttft_s"] - before["ttft_s"]) / (after["ttfts"] - before["ttfts"]),
    }
    for role in ("prefill", "decode"):
        if now := after.get(role):
            then = before.get(role) or dict.fromkeys(now, 0)
            result[f"{role}_balance"] = (now["mean_tokens"] - then["mean_tokens"]) / (
                now["most_tokens"] - then["most_tokens"]
            )
            result[f"{role}_lost"] = (now["lost_s"] - then["lost_s"]) / seconds
            result[f"{role}_steps"] = now["steps"] - then["steps"]
    return result


def settings(args: argparse.Namespace, way: str, model: str) -> tuple[str, list[str]]:
    sets = [
        f"routing.ranks={way}",
        "workers.decode.replicas=1",
        "ratio.mode=off",
        "workers.engine_args.enable_prefix_caching=false",
    ]
    sets += [f"workers.prefill.replicas={int(args.prefill > 0)}"]
    for role, size in (("prefill", args.prefill), ("decode", args.ranks)):
        sets += [f"workers.{role}.engine_args.data_parallel_size={size}"] if size > 1 else []
    sets += ["routing.remote_prefill_min_tokens=1"] if args.prefill else []
    if not args.experts:
        return "sim-2p2d.yaml", [*sets, *SIMULATED]
    return "demo-1p1d-cpu.yaml", [
        *sets,
        model,
        "workers.engine_args.dtype=float32",
        "workers.engine_args.block_size=32",
        "workers.engine_args.max_model_len=2048",
        "workers.engine_args.kv_cache_memory_bytes=134217728",
        "workers.decode.engine_args.enable_expert_parallel=true",
        f"workers.env.PYTHONPATH={HERE.parent / 'tests' / 'moe_on_cpu'}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=["adp", "round_robin"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = ""
    with contextlib.ExitStack() as stack:
        if args.experts:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = f"model={with_demo_tokenizer(special_model(folder / 'experts', 'experts', DEMO_VOCABULARY))}"
        fleets = {}
        for way in args.ways:
            config, sets = settings(args, way, model)
            fleets[way] = stack.enter_context(running_fleet(config, *sets))
        found: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
        for turn in range(args.rounds):
            made = requests(args.requests, turn + 1, 1900 if args.experts else 8000)
            for way in args.ways if turn % 2 == 0 else reversed(args.ways):
                found[way].append(measure(fleets[way], made, args.users))
                print(turn, way, {name: round(value, 3) for name, value in found[way][-1].items()}, flush=True)
    medians = {
        way: {name: statistics.median(row[name] for row in rows) for name in rows[0]} for way, rows in found.items()
    }
    print(json.dumps(medians, indent=1))
    if args.json:
        args.json.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
