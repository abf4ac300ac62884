"""Prefix-heavy loads on 16 workers: fetches from other workers and a host tier, each on and off, and all aggregated.

Prints, by load, goodput at 95%, and at one rate the share of prompt tokens that were not computed and of requests in
time. A way that is `aggregated` has the same prefix routing and no fetches.
"""

from __future__ import annotations

import argparse
from multiprocessing import Pool
from pathlib import Path

import msgspec
from policy_goodput import CASES, load_of

from orchestrator.config.settings import KVConfig, SLOConfig
from orchestrator.simulator.plan import AUTO, FIXED
from orchestrator.simulator.profile import PROFILES, load_profile
from orchestrator.simulator.report import Report, goodput, report
from orchestrator.simulator.settings import SHIPPED, Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import at_rate

HALF = 8
LOADS = ("mooncake", "agents")
TIER_SHARES = 10  # times a device's cache
# Name, prefill workers, fetches, host tier.
WAYS = (
    ("neither", HALF, "off", False),
    ("fetches", HALF, "auto", False),
    ("host tier", HALF, "off", True),
    ("both", HALF, "auto", True),
    ("aggregated", 0, "off", False),
    ("aggregated, host tier", 0, "off", True),
)


def measure(point: tuple[str, str, int, int, Path]) -> str:
    load, way, requests, seed, traces = point
    case = next(case for case in CASES if case.name == load)
    _, prefill, fetch, tier = next(known for known in WAYS if known[0] == way)
    arrivals = load_of(case, traces, requests, seed)
    if arrivals is None:
        return f"{load}: {case.file} is not in {traces}"
    profile = load_profile(PROFILES / f"{case.profile}.json")
    tier_bytes = TIER_SHARES * profile.blocks * profile.block_size * profile.kv_bytes_per_token if tier else 0
    config = msgspec.structs.replace(SHIPPED, kv=KVConfig(fetch=fetch, host_tier_bytes=tier_bytes))

    def run(rate: float) -> Report:
        settings = Settings(
            prefill=prefill,
            decode=2 * HALF - prefill,
            profile=profile,
            stack=stack(AUTO if prefill else FIXED, config),
            seed=seed,
            slo=SLOConfig(ttft_s=case.ttft_s, tpot_s=case.tpot_s),
        )
        return report(Simulation(settings, at_rate(arrivals, rate)).run(), 0.25)

    at, best = run(case.rate), goodput(run, case.rate / 1.5, case.rate, share=0.95)
    said = f"{at.prefix_hit:.1%} of prompts cached, {at.attained:.1%} in time, TTFT P50 {at.ttft_p50_s:.3f} s"
    return f"{load}, seed {seed}, {way}: {best.rate:.4g}/s; at {case.rate:g}/s {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path(__file__).parent / "traces", help="folder of public traces")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    ways = [way for way, *_ in WAYS]
    points = [
        (load, way, options.requests, seed, options.traces)
        for load in options.loads
        for seed in options.seeds
        for way in ways
    ]
    with Pool(options.processes) as pool:
        for line in pool.imap(measure, points):
            print(line, flush=True)


if __name__ == "__main__":
    main()
