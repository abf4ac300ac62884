"""The order of the prefill queue: arrival, moved by the work that a job brings and by its priority.

No clock, no I/O. A place is fixed when a job is enqueued. Time moves on, so nothing starves.
"""

from __future__ import annotations

LATE_S = 30.0  # how far behind those still in time a hopeless job goes
MAX_STEPS = 10  # of priority: clients name it, and nobody may pass everybody for ever


def delay_s(
    uncached_tokens: int,
    weight: float,
    seconds_per_token: float,
    ttft_slo_s: float,
    priority: int = 0,
    late: bool = False,
) -> float:
    """How many seconds behind its arrival a job's place in the queue is; before it where negative.

    `weight * uncached_tokens * seconds_per_token`. Weight 0 is first come, first served; a large one is shortest job
    first, which minimises the mean wait (W. E. Smith, "Various optimizers for single-stage production", 1956).
    Arrival plus a fixed urgency is J. R. Jackson's dynamic priority ("Some problems in queueing with dynamic
    priorities", 1960): newcomers' places grow with time, so none waits for ever behind them.

    Each step of `priority` is worth one TTFT objective, at most `MAX_STEPS` of them; lower numbers are more important,
    as in vLLM. `late` marks a job that was predicted to miss its objective whatever is done.
    """
    steps = max(-MAX_STEPS, min(MAX_STEPS, priority))
    return weight * uncached_tokens * seconds_per_token + steps * ttft_slo_s + (LATE_S if late else 0.0)
