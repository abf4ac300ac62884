"""Two classes of requests in one fleet, against a fleet for each class with as many workers in all.

Interactive requests have objectives of 0.3 s and 50 ms, those of the batch 30 s and none. Prints the highest rates at
which 95% of each class are in time, for several shares of interactive requests. A load takes as long at every rate,
alone and beside the other, so that it has the same bursts.
"""

from __future__ import annotations

import argparse
import functools
import heapq
from collections.abc import Callable

import msgspec

from orchestrator.config.settings import SLOConfig
from orchestrator.simulator.engine.profile import PROFILES, load_profile
from orchestrator.simulator.loads import LOADS, synthetic
from orchestrator.simulator.plan import WARM_UP
from orchestrator.simulator.report import Report, goodput, report
from orchestrator.simulator.settings import Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import Arrival, Load, at_rate

PROFILE = load_profile(PROFILES / "h100-llama-8b.json")
INTERACTIVE, BATCH = SLOConfig(ttft_s=0.3, tpot_s=0.05), SLOConfig(ttft_s=30.0, tpot_s=1e6)
SHARE = 0.95
MOST_AT_ONCE = (
    3  # requests in a stretch of the load, over the mean number: those of the stretch are taken, however many
)


def of_seconds(name: str, rate: float, seconds: float, seed: int) -> Load:
    """The first so many seconds of a load, which may be a calm or a burst."""
    made = at_rate(synthetic(name, max(2, round(MOST_AT_ONCE * rate * seconds)), seed), rate)
    return Load(name, [arrival for arrival in made.arrivals if arrival.at <= seconds], made.unit_tokens)


def simulate(load: Load, workers: int, slo: SLOConfig) -> Simulation:
    prefill = workers // 2
    settings = Settings(prefill=prefill, decode=workers - prefill, profile=PROFILE, stack=stack("ours"), slo=slo)
    return Simulation(settings, load).run()


def both(interactive: Load, batch: Load) -> Load:
    """The requests of both, those of the batch with their objectives, while both come."""
    keyed = [msgspec.structs.replace(one, keys=tuple(2 * key for key in one.keys)) for one in interactive.arrivals]
    others = [_of_batch(one) for one in batch.arrivals]
    until = min(keyed[-1].at, others[-1].at)
    merged = heapq.merge(keyed, others, key=lambda arrival: arrival.at)
    unit = interactive.unit_tokens or batch.unit_tokens
    return Load("both", [arrival for arrival in merged if arrival.at <= until], unit)


def _of_batch(one: Arrival) -> Arrival:
    keys = tuple(2 * key + 1 for key in one.keys)
    return msgspec.structs.replace(one, keys=keys, ttft_slo_s=BATCH.ttft_s, tpot_slo_s=BATCH.tpot_s)


def of_worse_class(sim: Simulation) -> Report:
    """The figures of all requests, with the share in time of the class that has less."""
    classes: dict[bool, list[bool]] = {True: [], False: []}
    since = WARM_UP * sim.jobs[-1].arrival.at
    for job in sim.jobs:
        if job.arrival.at >= since:
            classes[job.arrival.ttft_slo_s is None].append(all(job.met(INTERACTIVE)))
    worse = min(sum(met) / len(met) for met in classes.values())
    return msgspec.structs.replace(report(sim, WARM_UP), attained=worse)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interactive", choices=LOADS, default="bursty")
    parser.add_argument("--batch", choices=LOADS, default="heavy_tailed")
    parser.add_argument("--seconds", type=float, default=120.0, help="of arrivals")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.2, 0.5, 0.8, 0.95], help="interactive ones of all"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    for seed in options.seeds:

        def of_class(of: int, rate: float, seed: int = seed) -> Load:
            return of_seconds((options.interactive, options.batch)[of], rate, options.seconds, seed)

        @functools.cache
        def alone(of: int, workers: int, of_class: Callable[[int, float], Load] = of_class) -> float:
            def run(rate: float) -> Report:
                return report(simulate(of_class(of, rate), workers, (INTERACTIVE, BATCH)[of]), WARM_UP)

            return goodput(run, 3.0 * workers, 10.0 * workers, share=SHARE).rate

        for share in options.shares:

            def run(rate: float, share: float = share, of_class: Callable[[int, float], Load] = of_class) -> Report:
                mixed = both(of_class(0, share * rate), of_class(1, (1 - share) * rate))
                return of_worse_class(simulate(mixed, options.workers, INTERACTIVE))

            apart = [
                (min(alone(0, own) / share, alone(1, options.workers - own) / (1 - share)), own)
                for own in range(1, options.workers)
            ]
            best, own = max(apart)
            found = goodput(run, best, 1.5 * best, share=SHARE).rate
            ratio = found / best if best else float("inf")
            print(
                f"seed {seed}, {share:.0%} interactive: one fleet {found:.1f} requests/s, "
                f"{own} + {options.workers - own} workers {best:.1f}: {ratio:.2f} times",
                flush=True,
            )


if __name__ == "__main__":
    main()
