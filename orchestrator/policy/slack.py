"""Queue order by deadline, for requests that carry a latency objective or a priority (least slack first).

A score is fixed when a job is enqueued, like `queue_order`'s: time moves on, so nothing starves, and a sorted set
can hold it. Slack = deadline - own service time; fixing it loses nothing, since all slacks shrink equally.
"""

from __future__ import annotations

LATE_S = 30.0  # how far behind those still in time a hopeless job goes
MAX_STEPS = 10  # of priority: clients name it, and nobody may pass everybody for ever


def steps(priority: int) -> int:
    """Objectives by which a priority moves a request; lower numbers are more important, as in vLLM."""
    return max(-MAX_STEPS, min(MAX_STEPS, priority))


def score(
    arrived_at: float,
    tokens: int,
    seconds_per_token: float,
    ttft_slo_s: float,
    priority: int = 0,
    weight: float = 0.0,
    late: bool = False,
) -> float:
    """Unix seconds; the least goes first.

    The deadline is one objective after arrival, and one later or earlier with each of the priority's `steps`.
    `weight` 0 is least slack (the latest moment to start in time), 1 is plain earliest deadline, and
    more prefers short jobs, without which overload makes every job late together (the domino effect of EDF).
    `late` marks a job that was predicted to miss its deadline whatever is done.
    """
    deadline = arrived_at + ttft_slo_s * (1 + steps(priority))
    return deadline + (weight - 1.0) * tokens * seconds_per_token + (LATE_S if late else 0.0)
