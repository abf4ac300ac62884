"""Prefix-heavy loads on 16 workers: fetches from other workers and a host tier, each on and off, all of the workers
aggregated, and a cache that nothing betters.

Prints by load the share of prompt tokens that come after the same tokens of an earlier prompt, which no cache exceeds.
Then, by way, goodput at 95% of the requests of all seeds together, and at one rate the share of prompt tokens that were
not computed. A way that is `aggregated` has the same prefix routing and no fetches. In an `ideal` one each worker has
every prefix as soon as any worker has begun to compute it, at no cost of time or memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from multiprocessing import Pool
from pathlib import Path
from statistics import mean
from typing import Literal

import msgspec

from benchmarks.policy_goodput import CASES, Case, load_of
from orchestrator.config.settings import KVConfig, SLOConfig
from orchestrator.simulator.engine.kv import KVPool
from orchestrator.simulator.engine.profile import PROFILES, load_profile
from orchestrator.simulator.job import Job
from orchestrator.simulator.plan import AUTO, FIXED, WARM_UP
from orchestrator.simulator.report import Report, goodput, report
from orchestrator.simulator.settings import SHIPPED, Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import Arrival, Load, at_rate

HALF = 8
LOADS = ("mooncake", "agents")
TIER_SHARES = 10  # times a device's cache
LOW, HIGH = 0.9, 1.2  # of `Case.rate`: between these the search begins


class Way(msgspec.Struct, frozen=True):
    """`prefill`: so many of the workers, fixed; None: half of them at first, and as our defaults change that."""

    prefill: int | None = None
    fetch: Literal["off", "auto"] = "off"
    tier: bool = False
    ideal: bool = False


WAYS = {
    "neither": Way(),
    "fetches": Way(fetch="auto"),
    "host tier": Way(tier=True),
    "both": Way(fetch="auto", tier=True),
    "ideal": Way(ideal=True),
    "aggregated": Way(prefill=0),
    "aggregated, host tier": Way(prefill=0, tier=True),
    "aggregated, ideal": Way(prefill=0, ideal=True),
}


def most_reused(arrivals: Sequence[Arrival], unit_tokens: int) -> float:
    """The share of prompt tokens in units that follow the same units in an earlier prompt."""
    seen: set[int] = set()
    reused = 0
    for arrival in arrivals:
        reused += _leading(arrival.keys, seen) * unit_tokens
        seen.update(arrival.keys)
    return reused / sum(arrival.prompt_tokens for arrival in arrivals)


def _leading(keys: Sequence[int], seen: set[int]) -> int:
    return next((depth for depth, key in enumerate(keys) if key not in seen), len(keys))


class Everywhere(KVPool):
    """The memory of a worker that has whatever any worker has begun to compute."""

    __slots__ = ("_seen",)

    def __init__(self, total: int, unit_blocks: int, seen: set[int]) -> None:
        super().__init__(total, unit_blocks)
        self._seen = seen

    def hit_units(self, keys: Sequence[int]) -> int:
        return _leading(keys, self._seen)

    held_units = hit_units

    def acquire(self, keys: Sequence[int], blocks: int) -> int:
        if (hits := super().acquire(keys, blocks)) >= 0:
            self._seen.update(keys)
        return hits


def make_ideal(sim: Simulation) -> None:
    seen: set[int] = set()
    for worker in sim.workers.values():
        worker.kv = Everywhere(worker.kv.total, worker.kv.unit_blocks, seen)

    def look_up(job: Job) -> dict[str, int]:
        job.hits = dict.fromkeys(sim.workers, _leading(job.arrival.keys, seen) * sim.load.unit_tokens)
        job.hits_at = sim.now
        return job.hits

    sim.router.look_up = look_up  # type: ignore[method-assign]


def simulate(case: Case, load: Load, way: Way, rate: float, seed: int) -> Report:
    profile = load_profile(PROFILES / f"{case.profile}.json")
    tier_bytes = TIER_SHARES * profile.blocks * profile.block_size * profile.kv_bytes_per_token if way.tier else 0
    config = msgspec.structs.replace(SHIPPED, kv=KVConfig(fetch=way.fetch, host_tier_bytes=tier_bytes))
    prefill = HALF if way.prefill is None else way.prefill
    settings = Settings(
        prefill=prefill,
        decode=2 * HALF - prefill,
        profile=profile,
        stack=stack(AUTO if way.prefill is None else FIXED, config),
        seed=seed,
        slo=SLOConfig(ttft_s=case.ttft_s, tpot_s=case.tpot_s),
    )
    sim = Simulation(settings, at_rate(load, rate))
    if way.ideal:
        make_ideal(sim)
    return report(sim.run(), WARM_UP)


def measure(point: tuple[str, str, int | None, int, tuple[int, ...], Path]) -> str:
    name, named, split, requests, seeds, traces = point
    way = WAYS[named] if split is None else msgspec.structs.replace(WAYS[named], prefill=split)
    case = next(case for case in CASES if case.name == name)
    loads = {seed: load_of(case, traces, requests, seed) for seed in seeds}
    shown: dict[float, str] = {}

    def run(rate: float) -> Report:
        """Of all seeds: means of what is printed here."""
        found = [simulate(case, load, way, rate, seed) for seed, load in loads.items() if load is not None]
        shown[rate] = ", ".join(f"{at.attained:.1%}" for at in found)
        fields = ("attained", "prefix_hit", "ttft_p50_s", "exposed_p50_s", "exposed_p99_s")
        means = {field: mean(getattr(at, field) for at in found) for field in fields}
        return msgspec.structs.replace(found[0], **means)

    at, best = run(case.rate), goodput(run, LOW * case.rate, HIGH * case.rate, share=0.95)
    tried = "; ".join(f"{rate:.4g}/s {shown[rate]}" for rate in sorted(shown))
    said = f"{at.prefix_hit:.1%} of prompts cached, {at.attained:.1%} in time, TTFT P50 {at.ttft_p50_s:.3f} s, "
    said += f"exposed transfer P50 {at.exposed_p50_s * 1e3:.1f}, P99 {at.exposed_p99_s * 1e3:.1f} ms"
    return f"{name}, {named}: {best.rate:.4g}/s; at {case.rate:g}/s {said} ({tried})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path(__file__).parent / "traces", help="folder of public traces")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--split", type=int, help="so many prefill workers, fixed; by default the automatic split")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    points = []
    for name in options.loads:
        case = next(case for case in CASES if case.name == name)
        bounds = []
        for seed in options.seeds:
            if (load := load_of(case, options.traces, options.requests, seed)) is None:
                parser.exit(2, f"{case.file} is not in {options.traces}\n")
            bounds.append(most_reused(at_rate(load, case.rate).arrivals, load.unit_tokens))
        print(f"{name}: {', '.join(f'{bound:.1%}' for bound in bounds)} of prompt tokens could be cached", flush=True)
        seeds = tuple(options.seeds)
        points += [(name, way, options.split, options.requests, seeds, options.traces) for way in options.ways]
    with Pool(options.processes) as pool:
        for line in pool.imap(measure, points):
            print(line, flush=True)


if __name__ == "__main__":
    main()
