"""The order of the prefill queue: arrival, pushed back in proportion to the work a job brings. No clock, no I/O."""

from __future__ import annotations


def score(arrived_at: float, uncached_tokens: int, weight: float, seconds_per_token: float) -> float:
    """A waiting prefill's place in the queue, in seconds on the queue's clock; the lowest is served first.

    `arrived_at + weight * uncached_tokens * seconds_per_token`. Weight 0 is first come, first served; a large one is
    shortest job first, which minimises the mean wait (W. E. Smith, "Various optimizers for single-stage
    production", 1956). Arrival plus a fixed urgency is J. R. Jackson's dynamic priority ("Some problems in queueing
    with dynamic priorities", 1960): newcomers' scores grow with time, so none waits for ever behind them.
    """
    return arrived_at + weight * uncached_tokens * seconds_per_token
