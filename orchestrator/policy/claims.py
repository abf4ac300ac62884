"""Which waiting jobs a prefill worker claims: from the head of the queue, to its token budget, by prefix affinity.

Pure: the window is what the caller read at the head of the queue, in score order. The claim itself, and losing a
race for a job, are the queue's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.types import WindowJob


def claim_budget(
    claim_batches: float, max_num_batched_tokens: int, claimed_tokens: int, held: int, free_tokens: int
) -> int:
    """Prompt tokens that may be claimed now; 0 or less is none.

    `claimed_tokens`: claimed and not computed yet, of `held` jobs. An idle engine takes one job of any size, for which
    any budget above 0 will do; a busy one only what its batches and its free KV memory can take.
    """
    by_batches = int(claim_batches * max_num_batched_tokens) - claimed_tokens
    if held == 0:
        return max(1, min(by_batches, free_tokens))
    return min(by_batches, free_tokens - claimed_tokens)


def choose_claims(
    window: Sequence[WindowJob],
    budget_tokens: int,
    idle: bool,
    seconds_per_token: float,
    affinity: float = 1.0,
) -> list[str]:
    """Ids to claim, best first, until their uncached tokens fill `budget_tokens`.

    The order is the score, moved by the time that claiming here saves (or, against the worker that holds more, loses).
    A job that belongs elsewhere is left there while waiting costs less than recomputing; an idle worker takes one
    (steals) all the same, and any worker takes what has waited longer than recomputing would take. A single job
    larger than the budget is claimed alone by an idle worker: otherwise nobody would ever take it. One that does not
    fit is overtaken, by those behind it that do, for as long as it computes; then room is kept for it, until it fits
    or the worker is idle.
    """
    ranked = sorted(window, key=lambda job: job.score - affinity * seconds_per_token * _gain(job))
    chosen: list[str] = []
    left = budget_tokens
    for job in ranked:
        cost = max(1, job.tokens - job.cached_here)
        starving = idle and not chosen
        if cost > left and not starving:
            if job.waited_s <= cost * seconds_per_token:
                continue
            break
        belongs_elsewhere = affinity > 0 and -_gain(job) * seconds_per_token > job.waited_s
        if belongs_elsewhere and not starving:
            continue
        chosen.append(job.request_id)
        left -= cost
        if left <= 0:
            break
    return chosen


def _gain(job: WindowJob) -> int:
    """Tokens that claiming here saves over claiming where most is cached; negative when that is elsewhere."""
    return job.cached_here if job.cached_here >= job.cached_elsewhere else job.cached_here - job.cached_elsewhere
