"""Two racks between which KV takes eight times as long: pairing by cost against pairing that does not know of racks.

Prints, by load and seed, the 99th percentile of exposed transfer time at a few rates, and the goodput at 95%.
"""

from __future__ import annotations

import argparse
from multiprocessing import Pool
from typing import Any

from orchestrator.policy import policies
from orchestrator.simulator.engine.profile import PROFILES, load_profile
from orchestrator.simulator.loads import synthetic
from orchestrator.simulator.report import Report, goodput, report
from orchestrator.simulator.settings import Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import at_rate

PROFILE = load_profile(PROFILES / "h100-llama-8b.json")
RATES = {"chat": 165.0, "code": 105.0, "documents": 115.0, "bursty": 105.0}  # about the goodput
SHARES = (0.4, 0.6, 0.8)  # of these rates
BY_COST = policies.pair


def blind(request: Any, candidates: Any, links: Any, choose: Any, *_: Any) -> Any:
    return choose(request, candidates)


def measure(case: tuple[str, int, int]) -> str:
    load, seed, requests = case
    arrivals = synthetic(load, requests, seed)

    def run(rate: float, aware: bool) -> Report:
        policies.pair = BY_COST if aware else blind  # type: ignore[assignment]
        settings = Settings(
            prefill=8, decode=8, profile=PROFILE, stack=stack("ours"), seed=seed, racks=2, between_racks=8.0
        )
        return report(Simulation(settings, at_rate(arrivals, rate)).run(), 0.1)

    top, said = RATES[load], []
    for share in SHARES:
        with_it, without = run(share * top, True), run(share * top, False)
        both = f"{with_it.exposed_p99_s * 1e3:.0f} of {without.exposed_p99_s * 1e3:.0f} ms"
        ratio = with_it.exposed_p99_s / max(1e-9, without.exposed_p99_s)
        said.append(
            f"{share * top:.0f}/s {both} ({ratio:.2f}), in time {with_it.attained:.1%} of {without.attained:.1%}"
        )
    rates = [goodput(lambda rate, way=way: run(rate, way), top / 1.5, top, share=0.95).rate for way in (True, False)]
    return (
        f"{load} seed {seed}: {'; '.join(said)}; goodput {rates[0]:.1f} of {rates[1]:.1f}/s ({rates[0] / rates[1]:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--loads", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    cases = [(load, seed, options.requests) for load in options.loads for seed in options.seeds]
    with Pool(options.processes) as pool:
        for line in pool.imap(measure, cases):
            print(line, flush=True)


if __name__ == "__main__":
    main()
