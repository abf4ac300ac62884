"""Which waiting jobs a prefill worker claims: from the head of the queue, within its token budget, by prefix affinity.

The caller reads a window of jobs at the head of the queue, in the order of their scores. The queue makes the claim, and
decides which worker gets a job that two workers want.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.config.settings import SLOConfig
from orchestrator.types import Claimer, WindowJob

CLAIM_BATCHES = 2  # engine batches (max_num_batched_tokens) of prompt tokens that a prefill worker may have claimed
# Of the tightest TTFT objective: what a worker has claimed takes no longer. The rest is for the last prompt's KV, and
# for the time that it waited in the queue.
CLAIM_SHARE = 0.6
LEAST_CLAIM = 8  # of an engine batch, the part that a worker may have claimed however tight an objective is
BROUGHT_BY = 1 / 8  # of the jobs that it claimed last, for a tighter objective than the fleet's to count
_LEAST_S = 1e-9  # of a token, where a fitted line is flat
AFFINITY_WINDOW = 32  # jobs at the queue's head among which it looks for one whose prefix it has cached


def claims_as(held: int, claimed_tokens: int, max_num_batched_tokens: int, free_tokens: int, lockstep: bool) -> Claimer:
    """How a worker that has `held` requests, and has yet to compute `claimed_tokens`, claims and waits for jobs.

    A rank in `lockstep` with others is `ahead` while the step after the one that it takes would not be full: what it
    computes now counts as claimed until that has ended, and the next step begins at once then. That takes as long as
    the others' step anyway, and a rank that first had to be done with what it has before it may claim a large job would
    wait meanwhile. One with nothing to compute is idle, whatever it still sends.
    """
    if held == 0:
        return "idle"
    batch = max_num_batched_tokens
    if not lockstep or batch > free_tokens - claimed_tokens or claimed_tokens >= CLAIM_BATCHES * batch:
        return "busy"
    return "ahead" if claimed_tokens else "idle"


def takes_any_size(claimer: Claimer, others_idle: bool) -> bool:
    """Whether it may claim one job of any size now."""
    return claimer == "idle" or (claimer == "ahead" and not others_idle)


def most_claimed(
    max_num_batched_tokens: int, slo: SLOConfig, latest_s: float, seconds_per_token: float, decodes: bool = False
) -> int:
    """Prompt tokens that a busy worker may have claimed: `CLAIM_BATCHES` batches, or fewer by `CLAIM_SHARE`. One that
    also `decodes` has the least: it computes little in a step (`choices.steps`), and others are sooner done.

    Nothing overtakes a job that is claimed: a short prompt would wait behind all that its worker has claimed before, a
    batch's included, and share its steps with them. In the queue it goes where there is room first, and is counted
    where requests are placed. `latest_s`: the TTFT objective that the jobs brought which it claimed last; what comes
    next is most like these.
    """
    tightest_s = min([latest_s, *(own.ttft_s for own in slo.classes.values() if own.ttft_s is not None)])
    in_time = int(CLAIM_SHARE * tightest_s / max(seconds_per_token, _LEAST_S))
    # Smaller steps take more time for each token: with fewer tokens, fewer would seem to be in time, and so on.
    least = max_num_batched_tokens // LEAST_CLAIM
    return least if decodes else min(CLAIM_BATCHES * max_num_batched_tokens, max(in_time, least))


def claim_budget(most_tokens: int, claimed_tokens: int, idle: bool, free_tokens: int) -> int:
    """Prompt tokens that a worker may claim now; none if 0 or less.

    It has yet to compute `claimed_tokens`. A busy worker claims what fits into `most_tokens` with these and into its
    free KV memory. An idle worker may claim one job of any size, so its budget is at least 1.
    """
    room = min(most_tokens, free_tokens) - claimed_tokens
    return max(1, room) if idle else room


def claim_limits(prefills: int, budget_tokens: int, idle: bool, free_tokens: int, jobs: int) -> tuple[int, int]:
    """Prompt tokens, and jobs, that a worker with so many `prefills` may claim now.

    One that only decodes, since it was a decode worker, may claim one job of any size that its memory has room for:
    nothing that it has claimed waits, and it is not idle, which would let it claim what does not fit.
    """
    return (budget_tokens, jobs) if prefills or idle else (free_tokens, min(jobs, 1))


def fair_share_tokens(waiting_tokens: int, idle_others: int) -> int | None:
    """Waiting tokens that an idle worker may claim while `idle_others` are idle too; None means all.

    The claim in `store/lua/queue/claim.lua` has the same formula.
    """
    return math.ceil(waiting_tokens / (idle_others + 1)) if idle_others else None


def choose_claims(
    window: Sequence[WindowJob],
    budget_tokens: int,
    idle: bool,
    seconds_per_token: float,
    affinity: float = 1.0,
    share_tokens: int | None = None,
) -> list[str]:
    """The ids of the jobs to claim, best first, whose uncached tokens fit into `budget_tokens`.

    `share_tokens` is given while other workers are idle: then an idle worker claims at most that many tokens, or one
    job, and a busy worker only jobs that it has partly cached or whose adapter it has.

    Jobs are ordered by their score, less the time that this worker's cache saves, or plus the time that it would lose
    where another worker has more cached. A job whose prefix another worker has cached is left to that worker, also by
    idle workers, until it has waited longer than recomputing the prefix takes. So waiting costs at most as much as
    recomputing at once. An idle worker claims a job larger than its budget alone, because no worker would otherwise
    claim it. A worker passes over a job that does not fit, and claims smaller ones behind it, until the job has waited
    as long as its prefill takes. From then on it claims nothing behind that job.

    A LoRA adapter that a worker has counts as the prompt tokens that could be computed in the time of a load.
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
        if share_tokens is not None and not (idle or job.cached_here or job.adapter_here):
            continue
        if affinity > 0 and -_gain(job) * seconds_per_token > job.waited_s:
            continue  # another worker has more of it cached
        chosen.append(job.request_id)
        left -= cost
        if left <= 0:
            break
    return chosen


def _gain(job: WindowJob) -> int:
    """Prompt tokens cached here, with what the adapter here saves; if another worker has more, minus the tokens that it
    has in addition."""
    here = job.cached_here + job.adapter_here
    return here if here >= job.cached_elsewhere else here - job.cached_elsewhere
