"""How much more load a split of the workers would bear before requests miss their objectives, by a queueing model.

Nothing is simulated: two closed forms, one for each side, cost microseconds. `ratio` compares splits by it.
"""

from __future__ import annotations

import math

import msgspec

from orchestrator.config.settings import SLOConfig

# Objectives hold for nearly all requests, so both sides are judged at their 95th percentile: 1.645 standard deviations
# of a normal distribution, and three means of an exponential one (ln 20).
Z_95, LN_20 = 1.645, 3.0
MOST_BUSY = 0.95  # of a worker's time
MOST_HEADROOM = 64.0
STEPS = 24  # of a bisection: it halves its interval each time


class Traffic(msgspec.Struct, frozen=True):
    """What arrives, and what it costs. Seconds are those of one worker."""

    requests_per_s: float
    prefill_s: float  # computing one prompt's uncached tokens on a prefill worker, mean
    prefill_s2: float  # and its second moment, seconds squared
    local_s: float  # the same on the decode worker that has most of it cached
    local_s2: float
    least_s: float  # the same on the worker of either role that has most of it cached
    least_s2: float
    output_tokens: float
    step_s: float  # of a decode step without sequences
    step_s_per_sequence: float
    max_sequences: float  # that decode on one worker, by its batch or its memory


def after_moves(traffic: Traffic, prefill: int, decode: int, more: int) -> Traffic:
    """What prompts cost once `more` of the workers prefill, or fewer where negative.

    Workers take along what they have cached: a prompt that one role has more of than the other finds it there with the
    share of those workers that moved.
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


def with_prompts(traffic: Traffic, factor: float) -> Traffic:
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
    """The multiple of the arriving rate at which 95% of requests would still meet both objectives; at most 64.

    Above 1 the split attains what arrives. Prompts that would wait too long for `prefill` workers are computed on the
    `decode` workers, all of them where `prefill` is 0.
    """
    if decode < 1:
        return 0.0
    if traffic.requests_per_s <= 0:
        return MOST_HEADROOM
    taken = prefill * most_busy(prefill, traffic, slo.ttft_s)
    low, high = 0.0, MOST_HEADROOM
    for _ in range(STEPS):
        middle = (low + high) / 2
        if tpot_s(traffic, middle, taken, decode) <= slo.tpot_s:
            low = middle
        else:
            high = middle
    return low


def most_busy(workers: int, traffic: Traffic, ttft_slo_s: float) -> float:
    """The utilisation of `workers` prefill workers with one queue at which 95% of prompts are in time.

    The mean wait is H. Sakasegawa's approximation of M/G/c ("An approximation formula Lq", 1977), and waits are taken
    to be exponential.
    """
    mean_s = traffic.prefill_s
    if workers < 1 or mean_s <= 0:
        return MOST_BUSY
    spread = traffic.prefill_s2 / (mean_s * mean_s)  # 1 + the squared coefficient of variation
    deviation_s = math.sqrt(max(0.0, traffic.prefill_s2 - mean_s * mean_s))
    # What a long prompt computes for is no wait; but at least half of the objective is there to wait in.
    slack_s = max(ttft_slo_s - mean_s - Z_95 * deviation_s, ttft_slo_s / 2)
    power = math.sqrt(2 * (workers + 1)) - 1
    low, high = 0.0, MOST_BUSY
    for _ in range(STEPS):
        busy = (low + high) / 2
        wait_s = mean_s * spread / 2 * busy**power / (workers * (1 - busy))
        if LN_20 * wait_s <= slack_s:
            low = busy
        else:
            high = busy
    return low


def tpot_s(traffic: Traffic, factor: float, taken: float, decode: int) -> float:
    """The 95th percentile of TPOT at `factor` times the arriving rate; infinite where a decode worker cannot keep up.

    `taken` is the work, in workers, that prefill workers do. The rest takes a share of each decode worker's time, and
    comes in lumps, one a prompt: a request meets a Poisson number of them, and of those that come meanwhile. So the
    time that they take from it has the variance of a delay cycle of M/G/1: their rate times its duration times the
    second moment of a prompt's time, over the square of the share of time that is left. Prefill workers get the
    longest prompts: of work that is spread exponentially, a share of it leaves the square of that of its second moment.
    """
    rate = factor * traffic.requests_per_s
    work = rate * traffic.prefill_s
    left_share = max(0.0, 1 - taken / work) if work > 0 else 0.0  # of the prefill work, for decode workers
    overflow = left_share * rate * traffic.local_s / decode  # the share of their time
    tokens_per_s = rate * traffic.output_tokens / decode
    left = 1 - overflow - traffic.step_s_per_sequence * tokens_per_s
    if left <= 0:
        return math.inf
    # Little: sequences = tokens_per_s * TPOT, and TPOT = (step_s + step_s_per_sequence * sequences) / (1 - overflow).
    mean_s = traffic.step_s / left
    # They come and go at random, so that their number is about Poisson.
    sequences = tokens_per_s * mean_s
    if sequences + Z_95 * math.sqrt(sequences) > traffic.max_sequences:
        return math.inf
    if overflow <= 0:
        return mean_s
    second_moment = left_share * left_share * rate / decode * traffic.local_s2
    variance = second_moment * traffic.output_tokens * mean_s / (left * left)
    return mean_s + Z_95 * math.sqrt(variance) / max(1.0, traffic.output_tokens)
