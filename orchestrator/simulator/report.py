"""The figures of one simulated run, and goodput: the highest rate at which enough requests meet both objectives.

Requests that were rejected, failed or never finished count as having missed the objectives.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable

import msgspec

from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.worker import ITL_BUCKETS_PER_OCTAVE, Worker

SHARES = (0.9, 0.95, 0.99)  # shares of all requests for which goodput is reported


class Report(msgspec.Struct, frozen=True):
    """Times are in seconds. Percentiles are over finished requests, those of TTFT over all with a first token."""

    policy: str
    load: str
    fleet: str
    profile: str
    rate: float  # requests per second offered
    requests: int
    finished: int
    rejected: int
    unfinished: int
    attained: float  # share of all requests that met both objectives
    attained_ttft: float
    attained_tpot: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_max_s: float
    exposed_p50_s: float  # of a KV transfer: from the end of the prefill until all has come
    exposed_p99_s: float
    itl_p50_s: float
    itl_p90_s: float
    itl_p99_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    tpot_p99_s: float
    tpot_max_s: float
    imbalance: float  # largest block usage of a decode worker over their mean, averaged over time
    usage: float  # mean block usage of decode workers
    preemptions: int
    prefix_hit: float  # share of prompt tokens that were not computed
    output_tokens_per_s: float
    reasons: dict[str, int]


def report(sim: Simulation, warm_up: float = 0.0) -> Report:
    """The figures of a simulation that has run. Requests that arrive in the first share `warm_up` of the load's time
    count neither for latencies nor for attainment."""
    slo, settings = sim.router.slo, sim.settings
    since = warm_up * sim.jobs[-1].arrival.at
    jobs = [job for job in sim.jobs if job.arrival.at >= since]
    finished, met = [times for job in jobs if (times := job.times()) is not None], [job.met(slo) for job in jobs]
    ttft = sorted(job.first_at - job.arrival.at for job in jobs if job.first_at is not None)
    exposed = sorted(job.exposed_s for job in jobs if job.exposed_s is not None)
    tpot = sorted(tpot_s for _, tpot_s in finished)
    outcomes = Counter(job.outcome for job in jobs)
    total = len(jobs)
    # Block usage without the start, when the fleet fills, and without the drain at the end.
    last = sim.jobs[-1].arrival.at
    middle = [(top, mean) for time, top, mean in sim.usage if 0.2 * last <= time <= last and mean > 0]
    workers = list(sim.workers.values())
    span = max(sim.now, 1e-9)
    prompt_tokens = sum(job.arrival.prompt_tokens for job in sim.jobs if job.outcome == "ok")
    computed = sum(worker.computed_tokens for worker in workers)
    return Report(
        policy=settings.stack.name,
        load=sim.load.name,
        fleet=f"{settings.prefill}P{settings.decode}D",
        profile=settings.profile.name,
        rate=sim.load.rate,
        requests=total,
        finished=len(finished),
        rejected=outcomes["rejected"] + outcomes["too_long"],
        unfinished=outcomes[""],
        attained=sum(map(all, met)) / total,
        attained_ttft=sum(in_ttft for in_ttft, _ in met) / total,
        attained_tpot=sum(in_tpot for _, in_tpot in met) / total,
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p90_s=percentile(ttft, 0.9),
        ttft_p99_s=percentile(ttft, 0.99),
        ttft_max_s=percentile(ttft, 1.0),
        exposed_p50_s=percentile(exposed, 0.5),
        exposed_p99_s=percentile(exposed, 0.99),
        itl_p50_s=_itl_percentile(workers, 0.5),
        itl_p90_s=_itl_percentile(workers, 0.9),
        itl_p99_s=_itl_percentile(workers, 0.99),
        tpot_p50_s=percentile(tpot, 0.5),
        tpot_p90_s=percentile(tpot, 0.9),
        tpot_p99_s=percentile(tpot, 0.99),
        tpot_max_s=percentile(tpot, 1.0),
        imbalance=sum(top / mean for top, mean in middle) / len(middle) if middle else 1.0,
        usage=sum(mean for _, mean in middle) / len(middle) if middle else 0.0,
        preemptions=sum(worker.preemptions for worker in workers),
        prefix_hit=1 - computed / prompt_tokens if prompt_tokens else 0.0,
        output_tokens_per_s=sum(job.arrival.output_tokens for job in sim.jobs if job.outcome == "ok") / span,
        reasons=dict(sim.router.reasons),
    )


def percentile(ordered: list[float], share: float) -> float:
    """The percentile of ascending values by nearest rank; 0.0 without values. `share` is from 0 to 1."""
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


class Goodput(msgspec.Struct, frozen=True):
    """`rate` (requests per second) is 0 if even the lowest rate tried is too high; `at` is its report. `runs` are the
    reports of all rates tried, in order of the rate."""

    rate: float
    at: Report | None
    runs: list[Report]


def goodput(
    run: Callable[[float], Report], low: float, high: float, tolerance: float = 0.03, share: float = SHARES[0]
) -> Goodput:
    """Bisect for the highest rate at which this share of all requests meets both objectives.

    The result is exact to the relative `tolerance`. `run` simulates one rate. The bounds `low` and `high` are widened
    as needed, each by a factor of at most 64.
    """
    runs: dict[float, Report] = {}

    def meets(rate: float) -> bool:
        if rate not in runs:
            runs[rate] = run(rate)
        return runs[rate].attained >= share

    for _ in range(6):
        if meets(low):
            break
        low, high = low / 2, low
    for _ in range(6):
        if not meets(high):
            break
        low, high = high, high * 2
    while high / low > 1 + tolerance and meets(low):
        middle = math.sqrt(low * high)
        if meets(middle):
            low = middle
        else:
            high = middle
    ordered = [runs[rate] for rate in sorted(runs)]
    good = meets(low)
    return Goodput(low if good else 0.0, runs[low] if good else None, ordered)


def goodputs(run: Callable[[float], Report], low: float, high: float, tolerance: float = 0.03) -> dict[float, Goodput]:
    """`goodput` for each of `SHARES`, which ascend. No rate is simulated twice."""
    once, found = functools.cache(run), dict[float, Goodput]()
    for share in SHARES:
        found[share] = goodput(once, low, high, tolerance, share)
        if found[share].rate:
            low, high = found[share].rate / 1.5, found[share].rate  # a larger share is met at lower rates only
    return found


def _itl_percentile(workers: list[Worker], share: float) -> float:
    """The percentile of all gaps between tokens (s), from the workers' histograms: its bucket's middle, within 2.2%."""
    counts: Counter[int] = Counter()
    for worker in workers:
        counts.update(worker.itl_buckets)
    left = share * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return float(2 ** ((bucket + 0.5) / ITL_BUCKETS_PER_OCTAVE))
    return 0.0
