"""`make bench-policy`: our default policies against fixed splits and the field's, ADP balance, a decision, the queue.

Writes benchmarks/results/policy.json, policy.md and plots. Every part is saved when it ends, and every load of goodput,
so that a run can be cut short, or continued with --parts. Traces are read from --traces if they are there; synthetic
loads need no file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import uvloop

from benchmarks.bench_queue import report as queue_report
from benchmarks.bench_queue import run as queue_benchmark
from benchmarks.policy_adp import AdpSettings, simulate_adp
from benchmarks.policy_goodput import CASES, load_of, measure_all, measure_changing, simulate
from orchestrator.config.settings import ConfigError, parse_config
from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import PrefixView
from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.decode_choice import RequestInfo
from orchestrator.policy.prefix_keys import prefix_keys
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.router.decider import Decider
from orchestrator.router.learning import Learning
from orchestrator.router.request import ActiveRequest, ParsedRequest
from orchestrator.simulator.plot import line_chart
from orchestrator.types import (
    EngineIdentity,
    KVCounters,
    KVEndpoint,
    QueueDepth,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from orchestrator.wire.messages import PROTOCOL_VERSION

RESULTS = Path(__file__).parent / "results"
REFERENCES = ["round_robin", "least_requests", "power_of_two", "least_tokens", "prefix_hash", "llm_d", "dynamo_cost"]
BURSTY = next(case for case in CASES if case.name == "bursty")
CHOICE_CASES = ["azure", "bursty", "heavy_tailed", "mooncake"]
QUICK = 0.2  # share of the requests


# ---- parts -----------------------------------------------------------------------------------------------------


def bench_goodput(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Our default policies, the fixed splits, the aggregated fleet and the field's policies, on every load."""
    for half in options.fleets:
        fleet = f"{half}P{half}D"
        names = [case.name for case in CASES if case.name in options.loads and f"{fleet}/{case.name}" not in results]
        share = QUICK if options.quick else 1.0
        for name, found in measure_all(options.traces, half, share, options.processes, names):
            if found is None:
                say(f"goodput {name}: its trace is not in {options.traces}; give its folder with --traces")
                continue
            results[f"{fleet}/{name}"] = found
            save("goodput", results)
            rates = ", ".join(f"{way} {at['goodput']['0.95']:.4g}/s" for way, at in found["ways"].items())
            say(f"goodput {fleet} {name} at 95%: {rates} ({found['wall_s']} s)")


def bench_changing() -> None:
    save("changing", measure_changing())
    say("changing: done")


def bench_choice(results: dict[str, Any], traces: Path, quick: bool) -> None:
    """The decode choices, all with our queue and placement, at one rate that all sustain."""
    for case in CASES:
        if case.name not in CHOICE_CASES:
            continue
        load = load_of(case, traces, case.requests // (10 if quick else 2))
        if load is None:
            continue
        for policy in [*REFERENCES, "kv_blocks", "kv_prefix"]:
            at = simulate(case, load, 8, 8, policy, 0.8 * case.rate)
            results[f"{case.name}/{policy}"] = msgspec.to_builtins(at)
            save("choice", results)
        say(f"choice {case.name}: done")


def bench_adp(results: dict[str, Any]) -> None:
    rows: dict[str, dict[str, Any]] = {
        "round robin": {"strategy": "round_robin"},
        "gate, timeout_iters=50": {"strategy": "gate"},
        "gate, timeout_iters=50, batching_wait_iters=10": {"strategy": "gate", "batching_wait_iters": 10},
        "level chunks (ours)": {"strategy": "level"},
    }
    for name, settings in rows.items():
        results[name] = msgspec.to_builtins(simulate_adp(AdpSettings(**settings)))
        say(f"adp {name}: {results[name]['tokens_per_s']:.0f} tokens/s, balance {results[name]['balance']:.1%}")
    save("adp", results)


def bench_decision(results: dict[str, Any]) -> None:
    """What the router decides for one request with prefix hits, among a thousand decode workers and half as many
    prefill workers, or none: where it goes, who decodes it once it is claimed, and what of it is fetched from whom."""
    workers, rng = 1000, random.Random(0)
    modes: dict[str, tuple[dict[str, int], int, int]] = {
        "threshold": ({"remote_prefill_min_tokens": 256}, workers // 2, 1),
        "cost": ({}, workers // 2, 1),
        "cost, two generations": ({}, workers // 2, 2),
        "cost, no prefill worker": ({}, 0, 1),
    }

    def load_of_worker(name: str, sequence: int) -> WorkerLoad:
        free, running, waiting = rng.randrange(2000, 24_800), rng.randrange(100), rng.randrange(9000)
        kv = KVCounters(link_bytes_per_s=1e9 + hash(name) % 1e9)
        return WorkerLoad(name, sequence, 24_800, free, running, rng.randrange(3), waiting, 5.0, kv=kv)

    for mode, (routing, prefill, generations) in modes.items():
        names = [f"d{number}" for number in range(workers)] + [f"p{number}" for number in range(prefill)]
        choose = decode_choice("kv_prefix")
        fleet = Fleet("f", choose.static_score)
        for number, name in enumerate(names):
            fleet.upsert(_worker(name, number % generations), 0.0)
            fleet.workers[name].note_connected(True)
            fleet.take_load(load_of_worker(name, 1), 0.0)
        prefixes = PrefixView(lambda worker_id, message: True)
        prompts = [[hash((number, block)) for block in range(750)] for number in range(500)]  # 12,000 tokens
        for keys in prompts:
            for holder in rng.sample(names, 8):
                prefixes.index.stored(holder, keys[: rng.randrange(1, 750)])
        config = parse_config({"model": "m", "routing": routing})
        queue = cast(QueueView, SimpleNamespace(depth=QueueDepth(10, 50_000, 5)))
        decider = Decider(
            "f", config, fleet, queue, prefixes.index, choose, Learning(fleet, choose, config.slo, Metrics())
        )
        decisions: dict[str, Callable[[ActiveRequest, str], Any]] = {
            "": lambda request, asker, decider=decider: decider.decide(request),
            "bind_": lambda request, asker, decider=decider: decider.bind(request, "0"),
            "holder_": lambda request, asker, decider=decider: decider.holder(request, asker, 0),
        }
        found = results[mode] = {"workers": workers}
        numbers = count(2)
        for what, decision in decisions.items():
            decided, updated = [], []
            for number in islice(numbers, 20_000):
                info = RequestInfo(f"r{number}", 12_001, 4096, 0.0)
                keys = [key + 0 for key in rng.choice(prompts)]  # just made, and not the index's own integers
                request = ActiveRequest(ParsedRequest(info, [], "", True, keys), 0.0)
                asker, load = rng.choice(names), load_of_worker(rng.choice(names), number)
                started = time.perf_counter()
                decision(request, asker)
                decided.append(time.perf_counter() - started)
                started = time.perf_counter()
                fleet.take_load(load, 0.0)
                prefixes.take_load(load, 0.0)
                fleet.apply_changes()  # by whoever reads reports, so that no request waits for that
                updated.append(time.perf_counter() - started)
            found[f"{what}median_us"], found[f"{what}p99_us"] = percentiles(decided)
            found["load_update_median_us"], _ = percentiles(updated)
        said = ", ".join(f"{name} {value:.1f}" for name, value in found.items() if name.endswith("_us"))
        say(f"decision {mode}: {said}")
    tokens = [rng.randrange(50_000) for _ in range(12_000)]
    started = time.perf_counter()
    for _ in range(50):
        prefix_keys(tokens, 16)
    results["hash_12000_tokens_us"] = (time.perf_counter() - started) / 50 * 1e6
    save("decision", results)


def _worker(name: str, generation: int) -> WorkerInfo:
    """A decode worker, or a prefill worker if the name begins with `p`."""
    identity = EngineIdentity("m", "bfloat16", "auto", 16, 32_768, "sim", "1", PROTOCOL_VERSION)
    role, kv = Role.DECODE if name[0] == "d" else Role.PREFILL, KVEndpoint(name, "h", 1)
    info = WorkerInfo(name, role, WorkerState.READY, "h", 1, "a", "b", identity, kv, 24_800, 256, 8192, 1)
    return msgspec.structs.replace(info, generation=generation, lends=True)


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """The median and P99, in microseconds."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2] * 1e6, ordered[int(0.99 * len(ordered))] * 1e6


def bench_speed(results: dict[str, Any], traces: Path) -> None:
    """The simulator's own speed: requests per minute on one core, also for a fleet of a thousand workers."""
    cases = [(case, 8, case.requests) for case in CASES] + [(BURSTY, 500, 60_000)]
    for case, fleet, requests in cases:
        load = load_of(case, traces, requests)
        if load is None:
            continue
        started = time.perf_counter()
        simulate(case, load, fleet, fleet, "ours", 0.8 * case.rate * fleet / 8)
        per_minute = len(load.arrivals) / (time.perf_counter() - started) * 60
        results[f"{fleet}P{fleet}D/{case.name}"] = {"requests": len(load.arrivals), "requests_per_minute": per_minute}
        say(f"speed {fleet}P{fleet}D {case.name}: {per_minute:,.0f} requests per minute")
        save("speed", results)


def bench_queue(quick: bool) -> None:
    """The prefill queue with a million waiting jobs."""
    result = uvloop.run(queue_benchmark(seconds=2.0 if quick else 10.0))
    say(queue_report(result))
    save("queue", result)


# ---- results ---------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


def load_results() -> dict[str, Any]:
    path = RESULTS / "policy.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save(part: str, results: dict[str, Any]) -> None:
    everything = load_results()
    everything[part] = results
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "policy.json").write_text(json.dumps(everything, indent=1) + "\n")


def write_plots(everything: dict[str, Any]) -> None:
    for key, entry in everything.get("goodput", {}).items():
        fleet, _, load = key.partition("/")
        series = {way: found["curve"] for way, found in entry["ways"].items() if "curve" in found}
        title = f"{load}: requests that meet TTFT and TPOT objectives"
        path = RESULTS / f"goodput-{load}-{fleet}.png"
        line_chart(path, title, "requests per second", "share of all requests", series, mark_y=0.9)


def main() -> None:
    parts = ["decision", "adp", "speed", "choice", "goodput", "changing", "queue"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path(__file__).parent / "traces", help="folder of public traces")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--fleets", nargs="+", type=int, default=[8, 4], help="8 is 16 workers, which begin as 8P8D")
    names = [case.name for case in CASES]
    parser.add_argument("--loads", nargs="+", choices=names, default=names, help="of goodput")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="of goodput, at the lowest priority")
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests: a smoke test, not a result")
    parser.add_argument("--fresh", action="store_true", help="forget saved results of these parts first")
    options = parser.parse_args()
    saved = {} if options.fresh else load_results()
    for part in options.parts:
        results = saved.get(part, {}) if part == "goodput" else {}
        if part == "decision":
            bench_decision(results)
        elif part == "adp":
            bench_adp(results)
        elif part == "speed":
            bench_speed(results, options.traces)
        elif part == "choice":
            bench_choice(results, options.traces, options.quick)
        elif part == "goodput":
            bench_goodput(results, options)
        elif part == "changing":
            bench_changing()
        else:
            bench_queue(options.quick)
    everything = load_results()
    from benchmarks.policy_tables import markdown

    (RESULTS / "policy.md").write_text(markdown(everything))
    try:
        write_plots(everything)
    except ConfigError as error:
        say(str(error))
    say(f"wrote {RESULTS / 'policy.md'}")


if __name__ == "__main__":
    main()
