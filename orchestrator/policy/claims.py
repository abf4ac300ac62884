"""Which waiting jobs a prefill worker claims: from the head of the queue, within its token budget, by prefix affinity.

The caller reads a window of jobs at the head of the queue, in the order of their scores. The queue makes the claim, and
says who has won when two workers want the same job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.types import WindowJob


def claim_budget(
    claim_batches: float, max_num_batched_tokens: int, claimed_tokens: int, held: int, free_tokens: int
) -> int:
    """Prompt tokens that may be claimed now; 0 or less: none.

    The worker has claimed `held` jobs and has not computed `claimed_tokens` of them yet. An idle worker may take one
    job of any size, so its budget is above 0. A busy one takes only what its batches and its free KV memory can take.
    """
    by_batches = int(claim_batches * max_num_batched_tokens) - claimed_tokens
    if held == 0:
        return max(1, min(by_batches, free_tokens))
    return min(by_batches, free_tokens - claimed_tokens)


def share_of(waiting_tokens: int, idle_others: int) -> int | None:
    """Waiting tokens that an idle worker may claim while `idle_others` are idle too; None: all. `queue.lua` agrees."""
    return math.ceil(waiting_tokens / (idle_others + 1)) if idle_others else None


def choose_claims(
    window: Sequence[WindowJob],
    budget_tokens: int,
    idle: bool,
    seconds_per_token: float,
    affinity: float = 1.0,
    share_tokens: int | None = None,
) -> list[str]:
    """Ids to claim, best first, until their uncached tokens fill `budget_tokens`.

    With `share_tokens` other workers are idle: an idle one takes no more than that, or one job, and a busy one only
    what it has cached.

    Jobs are ordered by their score, less the time that claiming here saves (plus the time that it loses, where another
    worker has more cached). A job whose prefix another worker has cached is left to that worker, by idle workers too,
    until it has waited for longer than recomputing the prefix takes: then the wait has cost at most as much again as
    recomputing at once. An idle worker takes a job larger than its budget, alone: nobody else ever would. A busy worker
    passes over a job that does not fit, and takes smaller ones behind it, until the job has waited for as long as it
    computes. From then on it takes nothing behind that job, until the job fits or the worker is idle.
    """
    ranked = sorted(window, key=lambda job: job.score - affinity * seconds_per_token * _gain(job))
    chosen: list[str] = []
    left = budget_tokens if share_tokens is None or not idle else max(1, min(budget_tokens, share_tokens))
    for job in ranked:
        cost = max(1, job.tokens - job.cached_here)
        starving = idle and not chosen
        if cost > left and not starving:
            if job.waited_s <= cost * seconds_per_token:
                continue
            break
        if share_tokens is not None and not (idle or job.cached_here):
            continue
        if affinity > 0 and -_gain(job) * seconds_per_token > job.waited_s:
            continue  # it belongs elsewhere
        chosen.append(job.request_id)
        left -= cost
        if left <= 0:
            break
    return chosen


def _gain(job: WindowJob) -> int:
    """Prompt tokens that need not be computed here; where another worker has more cached, minus the difference."""
    return job.cached_here if job.cached_here >= job.cached_elsewhere else job.cached_here - job.cached_elsewhere
