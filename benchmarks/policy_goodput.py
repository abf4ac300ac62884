"""Goodput at 90, 95 and 99% of our default policies, of fixed splits, of an aggregated fleet and of others' policies.

Our defaults begin at an even split and may change roles. Each fixed split is tried at a rate a step above the best so
far, and a run ends when too many of its requests are late, so that the search costs little more than one run for each
split. Each load has a process. Not responsible for tables (`policy_tables`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.config.settings import SLOConfig
from orchestrator.simulator.engine.profile import PROFILES, load_profile
from orchestrator.simulator.job import Job
from orchestrator.simulator.loads import LOADS, PHASES, synthetic
from orchestrator.simulator.plan import AUTO, FIELD_POLICIES, FIXED, WARM_UP
from orchestrator.simulator.report import SHARES, Report, goodputs, report
from orchestrator.simulator.settings import Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import Load, at_rate, first, read_trace, repeated

SPLITS = (2, 4, 8, 10, 14)  # prefill workers of 16, besides the aggregated fleet
STEP = 1.03  # ratio of two rates that are distinguished
FIELD_TOLERANCE, FIELD_START = 0.1, 0.4  # of others' policies, whose search begins at this share of `Case.rate`
LEAST_OF_AUTO = 0.92  # the search for the best split begins at this share of the automatic split's goodput
LOOK_SHARE = 0.02  # of the requests: after so many more have ended, the late ones are counted again
PHASE_S = 600.0  # of the load that changes
NICE = 19


class Case(msgspec.Struct, frozen=True):
    """A load with its profile and objectives. `rate`: where the search begins, requests per second. `requests`: how
    many there are. Both are for 16 workers."""

    name: str
    profile: str
    ttft_s: float
    tpot_s: float
    rate: float
    requests: int
    file: str = ""


CASES = [
    Case("code", "h100-llama-8b", 1.0, 0.05, 112.0, 9_000),
    Case("agents", "h100-llama-8b", 1.0, 0.05, 57.0, 28_000),
    Case("chat", "h100-llama-8b", 1.0, 0.05, 124.0, 48_000),
    Case("bursty", "h100-llama-8b", 1.0, 0.05, 96.0, 60_000),  # 15 bursts: they differ
    # The objectives and the kind of machine of the Mooncake paper.
    Case("mooncake", "a100x8-llama-70b", 30.0, 0.1, 7.5, 4_000, "mooncake_conversation_trace.jsonl"),
    Case("azure", "h100-llama-8b", 1.0, 0.05, 176.0, 19_366, "azure2023_conv.csv"),
    # Six minutes: an answer of 8,000 tokens takes five.
    Case("heavy_tailed", "h100-llama-8b", 2.0, 0.05, 130.0, 48_000),
]


def load_of(case: Case, traces: Path, requests: int, seed: int = 0) -> Load | None:
    """A case's load; None if its trace is missing."""
    if case.name in LOADS:
        return synthetic(case.name, requests, seed)
    path = traces / case.file
    if not path.exists():
        return None
    load = read_trace(path, seed)
    return first(repeated(load, -(-requests // len(load.arrivals))), requests)


def simulate(case: Case, load: Load, prefill: int, decode: int, policy: str, rate: float) -> Report:
    return report(_run(case, load, prefill, decode, policy, rate), WARM_UP)


def simulate_while(
    share: float, case: Case, load: Load, prefill: int, decode: int, policy: str, rate: float
) -> Report | None:
    """The same; None as soon as fewer than this share of the requests that count can meet both objectives."""
    last_looked = 0

    def look(ended: int) -> None:
        nonlocal last_looked
        if ended - last_looked < LOOK_SHARE * len(sim.jobs):
            return
        last_looked = ended
        counted = [job for job in sim.jobs if job.arrival.at >= WARM_UP * sim.jobs[-1].arrival.at]
        if sum(_late(job, sim) for job in counted) > (1 - share) * len(counted):
            raise TooManyLateError

    sim = _simulation(case, load, prefill, decode, policy, rate)
    try:
        return report(sim.run(look), WARM_UP)
    except TooManyLateError:
        return None


class TooManyLateError(Exception):
    """Ends a simulation: see `simulate_while`."""


def _late(job: Job, sim: Simulation) -> bool:
    """Whether the request has missed its objectives by now, whatever comes."""
    first_s = (sim.now if job.first_at is None else job.first_at) - job.arrival.at
    return first_s > (job.arrival.ttft_slo_s or sim.router.slo.ttft_s) or (
        job.done_at is not None and not all(job.met(sim.router.slo))
    )


def _run(case: Case, load: Load, prefill: int, decode: int, policy: str, rate: float) -> Simulation:
    return _simulation(case, load, prefill, decode, policy, rate).run()


def _simulation(case: Case, load: Load, prefill: int, decode: int, policy: str, rate: float) -> Simulation:
    settings = Settings(
        prefill=prefill,
        decode=decode,
        profile=load_profile(PROFILES / f"{case.profile}.json"),
        stack=stack(policy),
        slo=SLOConfig(ttft_s=case.ttft_s, tpot_s=case.tpot_s),
    )
    return Simulation(settings, at_rate(load, rate))


# ---- one load --------------------------------------------------------------------------------------------------


def measure(case: Case, traces: Path, half: int, share_of_requests: float) -> dict[str, Any] | None:
    """Goodput of all policies on one load, for a fleet of `half` prefill and `half` decode workers; None if the load's
    trace is missing."""
    os.nice(NICE - os.nice(0))
    began, workers = time.monotonic(), 2 * half
    load = load_of(case, traces, int(case.requests * share_of_requests * half / 8))
    if load is None:
        return None
    start = case.rate * half / 8

    def goodput_of(prefill: int, policy: str, tolerance: float, begin: float = start) -> dict[str, Any]:
        run = partial(simulate, case, load, prefill, workers - prefill, policy)
        found = goodputs(run, begin * 0.95, begin * 1.05, tolerance)
        for less, more in reversed(list(pairwise(SHARES))):  # goodput at a larger share holds for a smaller one too
            if found[more].rate > found[less].rate:
                found[less] = found[more]
        runs = {at.rate: at.attained for good in found.values() for at in good.runs}
        return {
            "goodput": {str(share): good.rate for share, good in found.items()},
            "at": {str(share): msgspec.to_builtins(good.at) for share, good in found.items()},
            "curve": sorted(runs.items()),
        }

    ways = {"ours": goodput_of(half, AUTO, STEP - 1), "aggregated": goodput_of(0, FIXED, STEP - 1)}
    ways["best split"] = _best_split(
        lambda prefill, rate, share: simulate_while(share, case, load, prefill, workers - prefill, FIXED, rate),
        [prefill * workers // 16 for prefill in SPLITS],
        ways["ours"]["goodput"],
        ways["aggregated"],
    )
    for name in FIELD_POLICIES:
        ways[name] = goodput_of(half, name, FIELD_TOLERANCE, start * FIELD_START)
    return {
        "profile": case.profile,
        "ttft_s": case.ttft_s,
        "tpot_s": case.tpot_s,
        "requests": len(load.arrivals),
        "wall_s": round(time.monotonic() - began),
        "ways": ways,
    }


def _best_split(
    run: Callable[[int, float, float], Report | None],
    prefills: list[int],
    automatic: dict[str, float],
    aggregated: dict[str, Any],
) -> dict[str, Any]:
    """The fixed split with the highest goodput at each share, the aggregated fleet included. If no split reaches
    `LEAST_OF_AUTO` of the automatic split's goodput, the rate is 0.

    `run` takes the number of prefill workers, the rate and the share, and returns None if fewer are in time."""
    tried: dict[tuple[int, float], Report | None] = {}
    found: dict[str, Any] = {"goodput": {}, "at": {}, "split": {}}
    for share in map(str, SHARES):
        floor = LEAST_OF_AUTO * automatic[share]
        rate, at, split = aggregated["goodput"][share], aggregated["at"][share], 0
        if rate < floor:
            rate, at, split = floor, None, -1
        for prefill in prefills:
            while True:
                key = prefill, rate * STEP
                if key not in tried:
                    tried[key] = run(*key, float(share))
                if (seen := tried[key]) is None or seen.attained < float(share):
                    break
                rate, at, split = key[1], msgspec.to_builtins(seen), prefill
        found["goodput"][share], found["at"][share], found["split"][share] = rate if split >= 0 else 0.0, at, split
    return found


def measure_all(
    traces: Path, half: int, share_of_requests: float, processes: int, names: list[str]
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Measure loads in parallel. Yields each load's name and result when it is done."""
    cases = [case for case in CASES if case.name in names]
    with ProcessPoolExecutor(processes) as pool:
        running = {pool.submit(measure, case, traces, half, share_of_requests): case.name for case in cases}
        for done in as_completed(running):
            yield running[done], done.result()


# ---- a load that changes ---------------------------------------------------------------------------------------


def measure_changing() -> dict[str, dict[str, list[float]]]:
    """For each policy: the share of requests within both objectives, in each phase and in its first minute."""
    half, rate = 4, 50.0
    case = Case("changing", "h100-llama-8b", 1.0, 0.05, rate, int(rate * PHASE_S * sum(PHASES.values())))
    load = synthetic(case.name, case.requests)
    ways = [(half, AUTO), *((prefill, FIXED) for prefill in range(2 * half - 2))]
    found = {}
    for prefill, policy in ways:
        sim = _run(case, load, prefill, 2 * half - prefill, policy, rate)
        row: dict[str, list[float]] = {"phases": [], "first_minutes": []}
        for number in range(len(PHASES)):
            begin = number * PHASE_S
            row["phases"].append(_attained(sim, begin, begin + PHASE_S))
            row["first_minutes"].append(_attained(sim, begin, begin + 60))
        found["automatic" if policy == AUTO else f"{prefill}P{2 * half - prefill}D"] = row
    return found


def _attained(sim: Simulation, begin: float, end: float) -> float:
    jobs = [job for job in sim.jobs if begin <= job.arrival.at < end]
    return sum(all(job.met(sim.router.slo)) for job in jobs) / max(1, len(jobs))
