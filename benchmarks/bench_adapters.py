"""Routing by LoRA adapters against routing that is blind to them, in the simulator: 100 adapters by Zipf, 8P8D.

Writes benchmarks/results/adapters.json and adapters.md: goodput at 90%, and adapters loaded per request at the blind
router's goodput.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from benchmarks.tables import table
from orchestrator.simulator.engine.profile import PROFILES, load_profile
from orchestrator.simulator.loads import adapters
from orchestrator.simulator.report import Report, goodput, report
from orchestrator.simulator.settings import Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import at_rate

RESULTS = Path(__file__).parent / "results"
WAYS = ("blind", "ours")


def measure(exponent: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    os.nice(10)
    profile = msgspec.structs.replace(
        load_profile(PROFILES / "h100-llama-8b.json"), adapter_slots=options.slots, adapter_load_s=options.load_s
    )
    load, loads = adapters(options.requests, seed, exponent), dict[tuple[str, float], float]()

    def run(way: str, rate: float) -> Report:
        settings = Settings(prefill=8, decode=8, profile=profile, stack=stack("ours:fixed"), seed=seed)
        sim = Simulation(settings, at_rate(load, rate))
        if way == "blind":  # the engines know better
            for job in sim.jobs:
                job.adapter = 0
        sim.run()
        loads[way, rate] = sum(worker.running.loads for worker in sim.workers.values()) / options.requests
        return report(sim)

    found = {way: goodput(lambda rate, way=way: run(way, rate), 8.0, 32.0).rate for way in WAYS}
    run("ours", found["blind"])
    at = {way: loads[way, found["blind"]] for way in WAYS}
    return {"exponent": exponent, "seed": seed, "goodput": found, "loads": at}


def markdown(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    about = f"8P8D, {options.slots} slots, {options.load_s:g} s a load, means of {len(options.seeds)} seeds."
    head = ["Zipf exponent", "goodput, blind", "ours", "ratio", "loads per request, blind", "ours", "ratio"]
    found = []
    for exponent in options.exponents:
        cells = [f"{exponent:g}"]
        for figure, form in (("goodput", "{:.1f}/s"), ("loads", "{:.2f}")):
            blind, ours = (mean(r[figure][way] for r in rows if r["exponent"] == exponent) for way in WAYS)
            cells += [form.format(blind), form.format(ours), f"{ours / blind:.2f}x"]
        found.append(cells)
    return f"{about}\n\n{table(head, found)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exponents", nargs="+", type=float, default=[0.6, 0.8, 1.0, 1.2, 1.5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--load-s", type=float, default=0.1)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        asked = [pool.submit(measure, e, seed, options) for e in options.exponents for seed in options.seeds]
        rows = []
        for one in asked:
            rows.append(one.result())
            print(json.dumps(rows[-1]), flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "adapters.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "adapters.md").write_text(markdown(rows, options))
    print(markdown(rows, options))


if __name__ == "__main__":
    main()
