"""Groups of ranks that step together: `routing.ranks` against its other values, in turns, on live fleets.

Each way has a fleet of its own: one decode group, with `--prefill` prefill ranks before it. Prompts and answers
are of mixed lengths, and a new request is sent when one has ended. The engines are simulated, with the times below, or
with `--experts` vLLM's on this machine's CPU, with a tiny model of random experts. Then `vllm` is a way too: vLLM's own
server with as many ranks behind its own load balancer. Its steps are measured as our groups' (`tests/board_in_vllm`).

    python -m benchmarks.bench_ranks [--ways adp round_robin vllm] [--ranks 4] [--prefill 0] [--users 64] [--rounds 3]
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
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
from support_client import FleetClient
from support_experts import MOE_ON_CPU, experts
from support_fleet import running_fleet, token_prompt
from support_plain_vllm import plain_vllm

from orchestrator.types import StepCounters
from workers.load import board

HERE = Path(__file__).parent

SIMULATED = (
    "sim.step_base_ms=50",
    "sim.prefill_us_per_token=500",
    "sim.decode_us_per_seq=500",
    "workers.engine_args.max_num_seqs=64",
)
ENGINE = {  # what real engines are started with, ours and vLLM's
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 27,
}
MEAN_IN, MEAN_OUT, SIGMA = 400, 80, 1.0  # tokens; of the logarithm of prompt lengths


def requests(count: int, seed: int, longest: int, in_turns: bool) -> list[tuple[list[int], int]]:
    """Prompts, and the length of each answer. `in_turns`: a short prompt and a long one follow each other, as those of
    agents that ask, read a file, and ask again."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        length = min(longest, max(8, int(rng.lognormvariate(0, SIGMA) * MEAN_IN / 1.65)))
        if in_turns:
            length = int(MEAN_IN * (1.8 if number % 2 else 0.2) * rng.uniform(0.7, 1.3))
        made.append((token_prompt(length, seed=1000 * seed + number), rng.randrange(MEAN_OUT // 2, 3 * MEAN_OUT // 2)))
    return made


async def load(fleet: FleetClient, made: list[tuple[list[int], int]], users: int) -> float:
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


class Ours:
    """A fleet, and what its groups say of their steps."""

    def __init__(self, fleet: FleetClient) -> None:
        self.fleet = fleet

    def steps(self) -> dict[str, dict[str, Any]]:
        """By role."""
        workers = ((role, worker) for role in ("prefill", "decode") for worker in self.fleet.workers(role))
        return {role: worker["group"] for role, worker in workers if worker["group"]}


class Vllms:
    """vLLM's own server. Its board keeps the latest steps only, so it is read all the time."""

    def __init__(self, fleet: FleetClient, seen: board.Board) -> None:
        self.fleet, self._board, self._ended = fleet, seen, threading.Event()
        self._steps: StepCounters | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while not self._ended.wait(0.2):
            self._steps = self._board.counters()

    def steps(self) -> dict[str, dict[str, Any]]:
        return {"decode": msgspec.structs.asdict(self._steps)} if self._steps else {}

    def end(self) -> None:
        self._ended.set()


@contextlib.contextmanager
def vllms(model: str, ranks: int, folder: Path) -> Iterator[Vllms]:
    board.announce("vllm", 0, ranks, levels=False)
    seen = board.Board.to_measure()
    assert seen is not None
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    arguments += ["--enforce-eager", "--no-enable-prefix-caching", "--enable-expert-parallel"]
    arguments += [f"--data-parallel-size={ranks}"]
    paths = os.pathsep.join(map(str, (HERE.parent, MOE_ON_CPU, MOE_ON_CPU.parent / "board_in_vllm")))
    more = {"PYTHONPATH": paths, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    more["PD_RANK_BOARD"] = os.environ.pop("PD_RANK_BOARD")  # fleets have their own
    with plain_vllm(model, folder / "vllm", *arguments, **more) as server:
        served = Vllms(server, seen)
        yield served
        served.end()


def counters(served: Ours | Vllms) -> dict[str, Any]:
    ttft = "vllm:time_to_first_token_seconds"
    return {
        **served.steps(),
        "ttft_s": served.fleet.metric(f"{ttft}_sum"),
        "ttfts": served.fleet.metric(f"{ttft}_count"),
    }


def measure(served: Ours | Vllms, made: list[tuple[list[int], int]], users: int) -> dict[str, float]:
    before = counters(served)
    seconds = asyncio.run(load(served.fleet, made, users))
    time.sleep(1)  # the last reports
    after = counters(served)
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
        *(f"workers.engine_args.{name}={value}" for name, value in ENGINE.items()),
        "workers.decode.engine_args.enable_expert_parallel=true",
        f"workers.env.PYTHONPATH={HERE.parent}:{MOE_ON_CPU}",
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
    parser.add_argument("--in-turns", action="store_true", help="long and short prompts by turns")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = ""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.experts:
            model = experts(folder)
        fleets: dict[str, Ours | Vllms] = {}
        for way in args.ways:
            if way == "vllm":
                fleets[way] = stack.enter_context(vllms(model.removeprefix("model="), args.ranks, folder))
                continue
            config, sets = settings(args, way, model)
            fleets[way] = Ours(stack.enter_context(running_fleet(config, *sets)))
        found: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
        for turn in range(args.rounds):
            made = requests(args.requests, turn + 1, 1900 if args.experts else 8000, args.in_turns)
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
