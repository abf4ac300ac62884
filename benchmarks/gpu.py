"""All measurements for a machine with one GPU, in one command: `python -m benchmarks.gpu`.

Two engines share the GPU. `equality`: whether their answers equal one engine's, and checksums of the KV agree. `auto`:
the time that a transfer adds, in our modes. `threads`: CPU time by thread, per request and per GB of KV. `kv`: as
`auto`, with vLLM's own push and pull. `switches`: asynchronous scheduling and CUDA graphs, on and off. `gaps`: times
between the tokens of running answers while long prompts arrive, against one engine with all of the GPU. Prints each
variant and saves JSON, a table and a picture as it ends. `--device cpu` runs the same with small sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support_vllm import frames, tiny_model

from benchmarks.bench_kv import measure, models, random_prompt, raw_s
from benchmarks.gpu_tables import save
from benchmarks.kv_engines import OURS, VARIANTS, Running, running, start, start_pair
from benchmarks.kv_tables import Row
from benchmarks.kv_threads import cpu_by_thread
from workers.engine import Phase

HERE = Path(__file__).parent

PARTS = ("equality", "auto", "threads", "kv", "switches", "gaps")
_SHARE = 0.4  # of the GPU's memory, for each of two engines
_CPU_BYTES = 6 << 30
_STREAMS, _STREAM_TOKENS, _STREAM_PROMPT = 4, 200, 64
_WARM_TOKENS = 10  # gaps between the first tokens are left out
_USERS, _EACH = 16, 4  # of the part `threads`

Result = dict[str, Any]
Note = Callable[[Result], None]  # takes what a part has found so far
_raw_s = functools.cache(raw_s)  # the parts have the same sizes


def problems(device: str) -> list[str]:
    """What this machine lacks: one line each, with the fix."""
    import psutil
    import torch
    from vllm.platforms import current_platform

    found = []
    if current_platform.device_type != device:
        found.append(
            f"the installed vLLM computes on {current_platform.device_type or 'nothing here'}, not on {device}; "
            f"install vLLM 0.32.0 for {device}, or give --device {current_platform.device_type or 'cpu'}"
        )
    if device == "cpu":
        if (free := psutil.virtual_memory().available) < _CPU_BYTES:
            found.append(f"{free >> 30} GiB of memory are free, {_CPU_BYTES >> 30} GiB are needed; end other programs")
        return found
    if torch.version.cuda is None:
        found.append(f"torch {torch.__version__} has no CUDA; install torch for CUDA, or give --device cpu")
    elif not torch.cuda.is_available():
        found.append("no GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES, or give --device cpu")
    else:
        free, total = torch.cuda.mem_get_info()
        if free < (2 * _SHARE + 0.05) * total:
            found.append(
                f"{free >> 30} of {total >> 30} GiB of GPU memory are free, and two engines take {2 * _SHARE:.0%}; "
                "end what nvidia-smi lists"
            )
    try:
        import nixl  # noqa: F401
    except ImportError as error:
        found.append(f"NIXL cannot be loaded ({error}); install nixl 1.5.1")
    return found


# ---- equality ------------------------------------------------------------------------------------------------------


async def equality(path: str, args: dict[str, Any], options: argparse.Namespace, note: Note) -> Result:
    """Compare greedy answers of the pair with one engine's: all prompts at once, then two with cached prefixes."""
    longest = max(options.tokens)
    prompts = [random_prompt(random.randint(3, longest)) for _ in range(options.prompts - 2)]
    prompts += [prompts[0], prompts[1][: longest // 2]]  # prefix hits on both engines
    args = args | {"enable_prefix_caching": True}

    async def ask(decode: Running, send: Callable[[str, list[bytes]], Awaitable[None]]) -> list[list[int]]:
        answers = []
        for together in (prompts[:-2], prompts[-2:]):
            keys = [uuid.uuid4().hex for _ in together]
            await asyncio.gather(*(send(key, frames(prompt, 16)) for key, prompt in zip(keys, together, strict=True)))
            for key in keys:
                await decode.end(key)
            answers += [decode.tokens[key] for key in keys]
        return answers

    async with running(start("alone", path, _whole(args, options))) as alone:
        right = await ask(alone, lambda key, body: alone.submit(key, Phase.DECODE, body))
        again = []
        for prompt in prompts:  # one by one, and most of each prompt cached: other kernels round differently
            key = uuid.uuid4().hex
            await alone.submit(key, Phase.DECODE, frames(prompt, 16))
            await alone.end(key)
            again.append(alone.tokens[key])
    async with running(start_pair(OURS, path, args, options.cuda, verify=True)) as pair:
        found = await ask(pair.decode, pair.submit)
        totals = pair.decode.engine.kv_totals
        checked = {"verified": int(totals["pd_verified"]), "corrupt": int(totals["pd_corrupt"])}
        recomputed = int(totals["pd_receives_failed"])
    equal_tokens = [
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=True)))
        for mine, theirs in zip(found, right, strict=True)
    ]
    return {
        "prompts": len(prompts),
        "equal": sum(mine == theirs for mine, theirs in zip(found, right, strict=True)),
        "equal_tokens": equal_tokens,
        "equal_to_itself": sum(one == two for one, two in zip(right, again, strict=True)),
        "tokens": len(right[0]),
        "dtype": args["dtype"],
        "recomputed": recomputed,
        **checked,
    }


# ---- transfers -----------------------------------------------------------------------------------------------------


async def kv(path: str, args: dict[str, Any], options: argparse.Namespace, note: Note) -> Result:
    return _rows(await measure(options.model, path, args, options, lambda rows: note(_rows(rows)), _raw_s))


async def auto(path: str, args: dict[str, Any], options: argparse.Namespace, note: Note) -> Result:
    """Measure our modes: those of `--variants`, or all where it names none."""
    ours = [variant for variant in VARIANTS if variant.transfer in ("auto", "chunk", "layer")]
    chosen = [variant for variant in ours if variant in options.variants] or ours
    return await kv(path, args, argparse.Namespace(**vars(options) | {"variants": chosen}), note)


async def switches(path: str, args: dict[str, Any], options: argparse.Namespace, note: Note) -> Result:
    """Measure with asynchronous scheduling and CUDA graphs on and off, which change how work is queued."""
    rows: list[Row] = []
    ours = argparse.Namespace(**vars(options) | {"variants": [OURS], "rounds": 1})
    for asynchronous in (True, False):
        for eager in (False, True) if options.cuda else (True,):
            name = f"async scheduling {_on(asynchronous)}, CUDA graphs {_on(not eager)}"
            switched = args | {"async_scheduling": asynchronous, "enforce_eager": eager}
            rows += await measure(name, path, switched, ours, plain=_raw_s)
            note(_rows(rows))
    return _rows(rows)


def _rows(rows: list[Row]) -> Result:
    return {"rows": [asdict(row) for row in rows]}


async def threads(path: str, args: dict[str, Any], options: argparse.Namespace, note: Note) -> Result:
    async with running(start_pair(OURS, path, args | {"max_num_seqs": _USERS}, options.cuda)) as pair:
        tokens = min(2048, max(options.tokens))
        return {"tokens": tokens, "rows": await cpu_by_thread(pair, tokens, _USERS, _EACH, random_prompt)}


def _on(value: bool) -> str:
    return "on" if value else "off"


# ---- gaps ----------------------------------------------------------------------------------------------------------


async def gaps(path: str, args: dict[str, Any], options: argparse.Namespace, note: Note) -> Result:
    """Measure gaps between tokens in one engine and in the pair. Long prompts arrive at the same interval in both, half
    as fast as one engine prefills them."""
    args = args | {"max_num_seqs": 16}
    body = lambda: frames(random_prompt(max(options.tokens)), 4)  # noqa: E731
    async with running(start("alone", path, _whole(args, options))) as alone:
        interval_s = 0.0
        for _ in range(2):  # in the first one the engine is cold
            began, key = time.monotonic(), uuid.uuid4().hex
            await alone.submit(key, Phase.DECODE, body())
            await alone.end(key)
            interval_s = 2 * (time.monotonic() - began)
        one = await _gaps_of(alone, lambda key: alone.submit(key, Phase.DECODE, body()), interval_s)
    async with running(start_pair(OURS, path, args, options.cuda)) as pair:
        await pair.run(random_prompt(max(options.tokens)))
        two = await _gaps_of(pair.decode, lambda key: pair.submit(key, body()), interval_s)
    return {"interval_s": interval_s, "streams": _STREAMS, "one engine": one, "prefill and decode": two}


async def _gaps_of(decode: Running, send: Callable[[str], Coroutine[Any, Any, None]], interval_s: float) -> Result:
    keys = [uuid.uuid4().hex for _ in range(_STREAMS)]
    for key in keys:
        await decode.submit(key, Phase.DECODE, frames(random_prompt(_STREAM_PROMPT), _STREAM_TOKENS))
    arrived: list[asyncio.Task[None]] = []

    async def arrivals() -> None:
        while True:
            arrived.append(asyncio.create_task(send(uuid.uuid4().hex)))
            await asyncio.sleep(interval_s)

    arriving = asyncio.create_task(arrivals())
    for key in keys:
        await decode.end(key)
    for task in (arriving, *arrived):
        task.cancel()
    await asyncio.gather(arriving, *arrived, return_exceptions=True)
    found_ms = sorted(
        1000 * (after - before)
        for key in keys
        for before, after in itertools.pairwise(decode.times[key][_WARM_TOKENS:])
    )
    return {
        "long_prompts": len(arrived),
        "gaps": len(found_ms),
        "p50_ms": statistics.median(found_ms),
        "p99_ms": found_ms[int(0.99 * (len(found_ms) - 1))],
        "max_ms": found_ms[-1],
    }


def _whole(args: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a single engine, with as much memory as the two together."""
    return args | {"gpu_memory_utilization": 2 * _SHARE} if options.cuda else args


# ---- the command ---------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, nargs="+", help="prompt lengths")
    parser.add_argument("--prompts", type=int, default=32, help="of the part `equality`")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=[variant.name for variant in VARIANTS],
        help="of the parts `kv` and, as far as they are ours, `auto`",
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    options.cuda = options.device == "cuda"
    options.tokens = options.tokens or ([512, 2048, 4096, 8000] if options.cuda else [256, 512])
    options.variants = [v for v in VARIANTS if options.variants is None or v.name in options.variants]
    options.model, options.models = "kv-heavy", ["kv-heavy"]
    options.rounds, options.at_once, options.chunk = 1, 1, 2048 if options.cuda else 128
    options.short_runs, options.runs, options.long_runs = (9, 5, 3) if options.cuda else (3, 1, 1)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks := problems(options.device):
        print("\n".join(f"benchmarks.gpu: {line}" for line in lacks), file=sys.stderr)
        return 2
    import torch

    device = torch.cuda.get_device_name() if options.cuda else f"{platform.machine()}, {os.cpu_count()} cores"
    results: Result = {"device": device, "torch": torch.__version__, "tokens": options.tokens}
    random.seed(3)
    name = "gpu" if options.cuda else "gpu-on-cpu"
    with tempfile.TemporaryDirectory() as scratch:
        if options.cuda:
            path, args = models(options, Path(scratch))[options.model]
        else:
            options.model = "tiny"
            path, args = str(tiny_model(Path(scratch) / "tiny")), _small(options)
        for part in options.parts:

            def note(found: Result, part: str = part) -> None:
                results[part] = found
                save(results, options.out, name)

            print(f"{part} ...", flush=True)
            run = {"equality": equality, "auto": auto, "threads": threads, "kv": kv, "switches": switches, "gaps": gaps}
            note(asyncio.run(run[part](path, args, options, note)))
    print((options.out / f"{name}.md").read_text())
    found = results.get("equality", {})
    wrong = found.get("corrupt", 0) or (found.get("dtype") == "float32" and found["equal"] < found["prompts"])
    return 1 if wrong else 0


def _small(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": options.chunk,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": max(options.tokens) + 256,
        "kv_cache_memory_bytes": 64 << 20,
    }


if __name__ == "__main__":
    sys.exit(main())
