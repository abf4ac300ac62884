"""What a KV transfer adds to the time to first token: ours by chunk, layer and whole, and vLLM's own connectors.

Each variant and round has one prefill and one decode engine with the same settings, and one request at a time. No other
engine runs beside them, since even an idle one costs them a few milliseconds. `exposed` is decode's first token minus
the end of prefill compute, less one decode step: what passes before decode's first step begins, and by how much that
takes longer than the next ones. Beside other programs it waits for its core, on which they ran while it was idle; how
long is told too. Prints a table, saves JSON and a PNG.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import functools
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support_vllm import tiny_model

from benchmarks.kv_engines import VARIANTS, Pair, Variant, start_pair
from benchmarks.kv_tables import Row, RunTimes, Turns, save
from orchestrator.config.model import resolve_model

HERE = Path(__file__).parent

Note = Callable[[list[Row]], None]
Raw = Callable[[tuple[int, ...], bool], dict[int, float]]


def random_prompt(tokens: int) -> list[int]:
    return [random.randrange(3, 500) for _ in range(tokens)]


def grouped(variants: list[Variant], at_once: int) -> list[list[Variant]]:
    """Groups of variants that take turns: at most `at_once`, since memory is limited. Variants that spin are alone."""
    quiet = [variant for variant in variants if not variant.spins]
    groups = [quiet[at : at + at_once] for at in range(0, len(quiet), at_once)]
    return [*groups, *([variant] for variant in variants if variant.spins)]


async def measure(
    model: str,
    path: str,
    args: dict[str, Any],
    options: argparse.Namespace,
    note: Note = lambda rows: None,
    plain: Raw | None = None,
) -> list[Row]:
    """Measure all variants, print each as it ends, and give `note` all rows so far. Two engines of one kind differ by
    where their memory lies, and the machine's speed drifts, so every round starts all engines again, in another order.
    Variants that spin have one round: they are slower by more than that. `plain`: instead of `raw_s`."""
    turns: dict[tuple[str, int], Turns] = {}
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    raw: dict[int, list[float]] = {}
    rows: list[Row] = []
    for number in range(options.rounds):
        groups = [g for g in grouped(options.variants, options.at_once) if number == 0 or not g[0].spins]
        first = number % len(groups) if groups else 0
        for at, group in enumerate(groups[first:] + groups[:first]):
            pairs: list[Pair] = []
            try:
                for variant in group:
                    pairs.append(await start_pair(variant, path, args, options.cuda))
                per_token = pairs[0].prefill.info.kv_bytes_per_token
                for case, runs in (await _round(pairs, options)).items():
                    turns.setdefault(case, {})[f"{began}, {number + 1}"] = runs
            finally:
                for pair in pairs:
                    await pair.stop()
            if at == 0:
                sizes = {tokens: tokens * per_token for tokens in options.tokens}
                written_s = await asyncio.to_thread(plain or raw_s, tuple(sizes.values()), options.cuda)
                for tokens, size in sizes.items():
                    raw.setdefault(tokens, []).append(written_s[size])
            rows = [
                Row.of(model, variant, tokens, tokens * per_token, statistics.median(raw[tokens]), some)
                for (variant, tokens), some in turns.items()
            ]
            note(rows)
            names = [variant.name for variant in group]
            print(f"{model}: round {number + 1} of {options.rounds} done ({', '.join(names)})", flush=True)
            print("\n".join(_line(row) for row in rows if row.variant in names), flush=True)
    return rows


async def _round(pairs: list[Pair], options: argparse.Namespace) -> dict[tuple[str, int], list[RunTimes]]:
    """Run every length on every pair. Returns the runs by variant and length."""
    warm = min(2048, max(options.tokens))
    for pair in pairs:
        # Do the handshakes, and touch every KV page once, as in an engine that has served for a minute.
        for _ in range(-(-max(options.tokens) // warm) + 1):
            await pair.run(random_prompt(warm))
    found: dict[tuple[str, int], list[RunTimes]] = {}
    for tokens in options.tokens:
        times = options.short_runs if tokens <= 2048 else options.runs if tokens <= 4096 else options.long_runs
        for number in range(times):
            # In another order each time, so that drift of the machine affects all pairs equally.
            first = number % len(pairs)
            for pair in pairs[first:] + pairs[:first]:
                found.setdefault((pair.variant.name, tokens), []).append(await pair.run(random_prompt(tokens)))
    return found


def raw_s(sizes: tuple[int, ...], cuda: bool, piece: int = 64 << 10) -> dict[int, float]:
    """Seconds of a raw WRITE by its size in bytes. A process of its own pins itself, and keeps NIXL's threads."""
    import subprocess

    cores = sorted(os.sched_getaffinity(0))
    call = f"raw_write_s({sizes}, device={'cuda:0' if cuda else 'cpu'!r}, piece={piece}, cores={(cores[0], cores[-1])})"
    code = f"import sys; sys.path.insert(0, {str(HERE.parent)!r})\nfrom benchmarks.kv_raw import raw_write_s\n"
    code += f"if __name__ == '__main__':\n    print('seconds', {call})\n"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(code)
        script.flush()
        done = subprocess.run([sys.executable, script.name], capture_output=True, text=True, timeout=120, check=True)
    return dict(ast.literal_eval(done.stdout.rpartition("seconds")[2].strip()))


def _line(row: Row) -> str:
    return (
        f"{row.model:<10} {row.variant:<22} {row.tokens:>6} tokens {row.bytes / 1e6:>8.1f} MB   "
        f"prefill {row.prefill_s * 1e3:>8.1f} ms (best {row.prefill_best_s * 1e3:>8.1f})   "
        f"exposed {row.exposed_s * 1e3:>7.1f} ms (best {row.exposed_best_s * 1e3:>7.1f}), "
        f"before decode's first step {(row.begun_s or 0.0) * 1e3:>7.1f} ms, "
        f"which waits {(row.waited_s or 0.0) * 1e3:>6.1f} ms for its core   "
        f"decode step {row.decode_step_s * 1e3:>6.1f} ms   raw WRITE {row.raw_write_s * 1e3:>7.1f} ms"
    )


def models(options: argparse.Namespace, scratch: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    longest = max(options.tokens)
    common = {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": options.chunk,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
    }
    if options.cuda:
        common |= {"gpu_memory_utilization": 0.4}
    chosen = {}
    if "kv-heavy" in options.models:
        # 128 KiB of KV per token, and otherwise as little compute as possible.
        path = tiny_model(scratch / "heavy", layers=8, heads=16, kv_heads=16, head_dim=128, positions=16384)
        room = {} if options.cuda else {"kv_cache_memory_bytes": (longest + 2048) << 17}
        dtype = "bfloat16" if options.cuda else "float32"  # attention kernels of GPUs do not support float32
        heavy = common | room | {"max_model_len": longest + 256, "dtype": dtype}
        chosen["kv-heavy"] = (str(path), heavy)
    if "smollm2" in options.models:
        room = {} if options.cuda else {"kv_cache_memory_bytes": (longest + 2048) * 23_040}
        chosen["smollm2"] = (resolve_model("demo"), common | room | {"max_model_len": longest + 64})
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8000])
    parser.add_argument("--short-runs", type=int, default=5, help="runs of prompts up to 2,048 tokens")
    parser.add_argument("--runs", type=int, default=3, help="runs of prompts up to 4,096 tokens")
    parser.add_argument("--long-runs", type=int, default=1, help="runs of prompts beyond 4,096 tokens")
    parser.add_argument("--rounds", type=int, default=1, help="times that all engines are started anew")
    parser.add_argument("--at-once", type=int, default=1, help="variants that stand side by side")
    parser.add_argument("--chunk", type=int, default=256, help="tokens per engine step")
    parser.add_argument("--models", nargs="+", default=["smollm2", "kv-heavy"], choices=["smollm2", "kv-heavy"])
    parser.add_argument("--variants", nargs="+", default=None, choices=[variant.name for variant in VARIANTS])
    parser.add_argument("--cuda", action="store_true", help="on GPUs: prefill on the first, decode on the next")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    options.variants = [v for v in VARIANTS if options.variants is None or v.name in options.variants]
    random.seed(3)
    rows: list[Row] = []
    device = f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    if options.cuda:
        import torch

        device = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as scratch:
        for name, (path, args) in models(options, Path(scratch)).items():
            # After each variant, so that a long run that is broken off has results.
            note = functools.partial(_save, rows, device, options.out)
            rows = rows + asyncio.run(measure(name, path, args, options, note))


def _save(before: list[Row], device: str, out: Path, found: list[Row]) -> None:
    save(before + found, device, out)


if __name__ == "__main__":
    main()
