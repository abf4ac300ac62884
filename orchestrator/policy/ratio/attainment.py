"""The headroom of a split: how much more load it could serve within the objectives, by a queueing model.

Nothing is simulated: two closed forms, one for prefill and one for decode, cost tens of microseconds. `decision`
compares splits by their headroom.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec

from orchestrator.config.settings import SLOConfig

# Nearly all requests must meet the objectives, so the model takes 99th percentiles: the mean plus 2.326 standard
# deviations of a normal distribution, and 4.605 means (ln 100) of an exponential one.
Z_99, LN_100 = 2.326, 4.605
MAX_UTILIZATION = 0.95  # utilisation of prefill workers, at most
MAX_HEADROOM = 64.0
FEW = 0.05  # of the arriving rate: so little that the headroom is a multiple of it
_NORMAL = NormalDist()
STEPS = 18  # of a bisection: it halves its interval each time


class Split(msgspec.Struct, frozen=True):
    """Workers by role. `unit_size` of them change roles together, and both numbers are multiples of it."""

    prefill: int
    decode: int
    unit_size: int = 1


class Traffic(msgspec.Struct, frozen=True):
    """The arriving load and its cost. Seconds are those of one worker."""

    requests_per_s: float
    prefill_s: float  # computing one prompt's uncached tokens on a prefill worker, mean
    prefill_s2: float  # and its second moment, seconds squared, in which a prompt that may wait counts as short
    local_s: float  # the same on the decode worker with most of the prompt cached
    local_s2: float
    least_s: float  # the same on the worker of either role with most of the prompt cached
    least_s2: float
    output_tokens: float
    step_s: float  # a decode step without sequences
    step_s_per_sequence: float
    max_sequences: float  # on one decode worker, by batch size or memory
    link_share: float = 0.0  # seconds in which a worker's link carries a token's KV, per second of its prefill


def after_moves(traffic: Traffic, prefill: int, decode: int, more: int) -> Traffic:
    """The traffic after `more` workers have gone to prefill; a negative number goes to decode.

    Workers keep their caches when they change roles. So a prompt that is cached on the role that shrinks is cached on
    the other role with a probability equal to the share of workers that moved. What workers that go to prefill take
    over counts in full, since prompts that may wait are no reason for more of them.
    """
    if more < 0:
        stayed = (prefill + more) / prefill
        return msgspec.structs.replace(
            traffic,
            local_s=traffic.least_s + stayed * (traffic.local_s - traffic.least_s),
            local_s2=traffic.least_s2 + stayed * (traffic.local_s2 - traffic.least_s2),
        )
    stayed = (decode - more) / decode
    return msgspec.structs.replace(
        traffic,
        prefill_s=traffic.least_s + stayed * (traffic.prefill_s - traffic.least_s),
        prefill_s2=traffic.least_s2 + stayed * (traffic.prefill_s2 - traffic.least_s2),
    )


def scale_prefill_times(traffic: Traffic, factor: float) -> Traffic:
    """The same requests with prompts that take `factor` times as long."""
    return msgspec.structs.replace(
        traffic,
        prefill_s=traffic.prefill_s * factor,
        prefill_s2=traffic.prefill_s2 * factor * factor,
        local_s=traffic.local_s * factor,
        local_s2=traffic.local_s2 * factor * factor,
        least_s=traffic.least_s * factor,
        least_s2=traffic.least_s2 * factor * factor,
    )


def headroom(traffic: Traffic, prefill: int, decode: int, slo: SLOConfig) -> float:
    """The multiple of the arriving rate at which 99% of requests would still meet both objectives; at most 64.

    Above 1 the split can serve the arriving load. Below 1 it is the share of the arriving requests that can be in time:
    those with the shortest prompts, since what would be late goes behind all others (`admission`). The `decode` workers
    compute the prompts that would wait too long for the `prefill` workers or for a link, or all if `prefill` is 0.
    """
    if decode < 1:
        return 0.0
    if traffic.requests_per_s <= 0:
        return MAX_HEADROOM
    taken = min(
        prefill * max_utilization(prefill, traffic, slo.ttft_s),
        carried(min(prefill, decode), traffic, slo.ttft_s),
    )
    low, middle, high = 0.0, 1.0, MAX_HEADROOM
    for _ in range(STEPS):
        if tpot_s(traffic, middle, taken, decode) <= slo.tpot_s:
            low = middle
        else:
            high = middle
        middle = (low + high) / 2
    return low


def multiple(traffic: Traffic, prefill: int, decode: int, slo: SLOConfig) -> float:
    """As `headroom`, but below 1 too the multiple of the arriving rate at which 99% of requests would be in time."""
    few = msgspec.structs.replace(traffic, requests_per_s=FEW * traffic.requests_per_s)
    return FEW * headroom(few, prefill, decode, slo)


def max_utilization(workers: int, traffic: Traffic, ttft_slo_s: float) -> float:
    """The highest utilisation of `workers` prefill workers with one queue at which 99% of prompts are in time.

    The mean wait is H. Sakasegawa's approximation of M/G/c ("An approximation formula Lq", 1977). The distribution of
    waits is taken to be exponential.
    """
    mean_s = traffic.prefill_s
    if workers < 1 or mean_s <= 0:
        return MAX_UTILIZATION
    spread = traffic.prefill_s2 / (mean_s * mean_s)  # 1 + the squared coefficient of variation
    deviation_s = math.sqrt(max(0.0, traffic.prefill_s2 - mean_s * mean_s))
    # A prompt can wait for what its own prefill leaves of the objective, but at least half of the objective.
    slack_s = max(ttft_slo_s - mean_s - Z_99 * deviation_s, ttft_slo_s / 2)
    power = math.sqrt(2 * (workers + 1)) - 1
    low, high = 0.0, MAX_UTILIZATION
    for _ in range(STEPS):
        busy = (low + high) / 2
        wait_s = mean_s * spread / 2 * busy**power / (workers * (1 - busy))
        if LN_100 * wait_s <= slack_s:
            low = busy
        else:
            high = busy
    return low


def carried(links: int, traffic: Traffic, ttft_slo_s: float) -> float:
    """The most prefill work, in workers, whose KV is in time over this many links; each has a queue of its own.

    What a prompt's KV takes on a link follows from its uncached tokens on the decode worker, since only those are sent.
    """
    if traffic.link_share <= 0 or traffic.local_s <= 0:
        return math.inf
    kv = msgspec.structs.replace(
        traffic,
        prefill_s=traffic.link_share * traffic.local_s,
        prefill_s2=traffic.link_share * traffic.link_share * traffic.local_s2,
    )
    return links * max_utilization(1, kv, ttft_slo_s) * traffic.prefill_s / kv.prefill_s


def in_time_without_queue(traffic: Traffic, decode: int, slo: SLOConfig) -> float:
    """The share of the arriving requests that meet the TPOT objective on `decode` workers without prefill workers, over
    0.99; at most 1. There no queue holds the longest prompts back, as `headroom` below 1 takes it: they delay what
    decodes beside them."""
    mean_s, deviation_s = tpot_spread(traffic, 1.0, 0.0, decode)
    if math.isinf(mean_s):
        return 0.0
    deviations = (slo.tpot_s - mean_s) / max(deviation_s, 1e-9)
    return min(1.0, _NORMAL.cdf(deviations) / _NORMAL.cdf(Z_99))


def tpot_s(traffic: Traffic, factor: float, taken: float, decode: int) -> float:
    """The 99th percentile of TPOT (s); the arguments are those of `tpot_spread`."""
    mean_s, deviation_s = tpot_spread(traffic, factor, taken, decode)
    return mean_s + Z_99 * deviation_s


def tpot_spread(traffic: Traffic, factor: float, taken: float, decode: int) -> tuple[float, float]:
    """TPOT at `factor` times the arriving rate, its mean and standard deviation (s); the mean is infinite if decode
    workers cannot keep up. A `factor` below 1 is the share of the arriving requests that are served, those with the
    shortest prompts.

    `taken` is the prefill work that prefill workers do, in workers. Decode workers do the rest, which takes a share of
    their time and stops their sequences for one whole prompt at a time. A request is delayed by a Poisson number of
    prompts, and by the prompts that arrive while these are computed. So its delay has the variance of a delay cycle of
    M/G/1: the rate of prompts, times the request's duration, times the second moment of a prompt's time, over the
    square of the share of time left for decoding. Prefill workers take the longest prompts (`shortest`).
    """
    arriving = max(1.0, factor) * traffic.requests_per_s
    work = arriving * traffic.prefill_s
    served = shortest(factor, traffic) if factor < 1 else 1.0  # share of the prefill work
    left_share = max(0.0, served - taken / work) if work > 0 else 0.0  # the same, left to decode workers
    overflow = left_share * arriving * traffic.local_s / decode  # share of their time that it takes
    tokens_per_s = factor * traffic.requests_per_s * traffic.output_tokens / decode
    left = 1 - overflow - traffic.step_s_per_sequence * tokens_per_s
    if left <= 0:
        return math.inf, 0.0
    # Little: sequences = tokens_per_s * TPOT, and TPOT = (step_s + step_s_per_sequence * sequences) / (1 - overflow).
    mean_s = traffic.step_s / left
    # Sequences come and go at random, so their number is about Poisson.
    sequences = tokens_per_s * mean_s
    if sequences + Z_99 * math.sqrt(sequences) > traffic.max_sequences:
        return math.inf, 0.0
    if overflow <= 0:
        return mean_s, 0.0
    second_moment = shortest(left_share, traffic) * arriving / decode * traffic.local_s2
    variance = second_moment * traffic.output_tokens * mean_s / (left * left)
    return mean_s, math.sqrt(variance) / max(1.0, traffic.output_tokens)


def shortest(share: float, traffic: Traffic) -> float:
    """The share of prefill work of the shortest prompts, which are `share` of all; or, if they are `share` of the work,
    their share of the second moment of prefill times.

    Prefill times are taken to be log-normal, and to spread as the least ones do, on which neither objectives nor moves
    bear. Up to any x, such a distribution has the share Phi((ln x - mu - k sigma^2) / sigma) of its moment k.
    """
    if not 0 < share < 1 or traffic.least_s <= 0:
        return share
    sigma = math.sqrt(math.log(max(1.0, traffic.least_s2 / (traffic.least_s * traffic.least_s))))
    return _NORMAL.cdf(_NORMAL.inv_cdf(share) - sigma)
