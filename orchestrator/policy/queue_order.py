"""The order of the prefill queue: arrival, moved by the work a job brings, its priority or its deadline.

No clock, no I/O. What is returned is added to the arrival, and fixed from then on: nothing starves.
"""

from __future__ import annotations

from typing import Literal

from orchestrator.policy import slack


def score(
    arrived_at: float,
    uncached_tokens: int,
    weight: float,
    seconds_per_token: float,
    ttft_slo_s: float = 0.0,
    priority: int = 0,
    late: bool = False,
) -> float:
    """A waiting prefill's place in the queue, in seconds on the queue's clock; the lowest is served first.

    `arrived_at + weight * uncached_tokens * seconds_per_token`. Weight 0 is first come, first served; a large one is
    shortest job first, which minimises the mean wait (W. E. Smith, "Various optimizers for single-stage
    production", 1956). Arrival plus a fixed urgency is J. R. Jackson's dynamic priority ("Some problems in queueing
    with dynamic priorities", 1960): newcomers' scores grow with time, so none waits for ever behind them.
    Each step of `priority` is worth one TTFT objective (`slack.steps`); `late` is `slack.score`'s.
    """
    moved_s = slack.steps(priority) * ttft_slo_s + (slack.LATE_S if late else 0.0)
    return arrived_at + weight * uncached_tokens * seconds_per_token + moved_s


def delay_s(
    order: Literal["length", "slack"],
    uncached_tokens: int,
    weight: float,
    seconds_per_token: float,
    ttft_slo_s: float,
    priority: int = 0,
    late: bool = False,
) -> float:
    """How far behind its arrival a job's place in the queue is; before it where negative."""
    if order == "slack":
        return slack.score(0.0, uncached_tokens, seconds_per_token, ttft_slo_s, priority, weight, late)
    return score(0.0, uncached_tokens, weight, seconds_per_token, ttft_slo_s, priority, late)
