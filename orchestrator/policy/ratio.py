"""How many workers should prefill and how many decode: rate matching over a window of measured loads.

Two observations of a fleet give a load sample, a window of samples the demand of each side, and the demand a split.
Who observes, and who applies the split (role flips first, then starting and draining processes), is not here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from orchestrator.config.settings import RatioConfig
from orchestrator.policy.predict import LineFit, Predictor
from orchestrator.types import DesiredRatio, Offered

# The share of its KV memory that a full decode worker has in use: sequences still grow. Prefill workers need no such
# reserve, since prompts can be prefilled on decode workers.
FULL_MEMORY_SHARE = 0.8
MEAN_PROMPT_TOKENS = 1024  # assumed for a sample in which no prompt arrived
CONTEXT_WEIGHT = 0.3  # of an observation in the running mean of a sequence's context

# With `cost` placement decode workers prefill what is too much for the prefill workers. So they must have time left for
# it, and the prefill side may be left with more load than it can take. In load per worker; at 1 it is always busy.
OVERFLOW_MAX_DECODE_LOAD = 0.5
OVERFLOW_MAX_PREFILL_LOAD = 2.0


class Observation(msgspec.Struct, frozen=True):
    """The fleet at one moment."""

    at: float  # unix seconds
    offered: Offered  # since it began to be counted
    queued_prefill_tokens: int
    holding: int  # sequences with KV on decode workers
    waiting: int  # sequences that wait for room there
    held_tokens: int  # of the KV in use on decode workers
    worker_tokens: int  # that one decode worker's KV pool holds
    worker_sequences: int  # at most in one decode worker's batch


class LoadSample(msgspec.Struct, frozen=True):
    """The fleet over one sampling period. Offered load is what arrived, whether or not it was served or rejected."""

    at: float  # unix seconds, end of the period
    period_s: float
    offered_requests: int
    offered_prefill_tokens: int  # uncached prompt tokens that arrived
    offered_output_tokens: float  # predicted for what arrived
    queued_prefill_tokens: int  # at the end of the period
    filled_decode_workers: float  # that the sequences decoding, or waiting to, would fill at the end of the period
    prefill_s_per_token: float  # measured on a prefill worker
    decode_tokens_per_s: float  # of one decode worker, as full as memory and the TPOT objective allow


class LoadSampler:
    """Learns step times and sequence lengths, and turns each observation into the load since the one before."""

    def __init__(self, tpot_slo_s: float, prior_step_s: float = 0.0) -> None:
        self._tpot_slo_s = tpot_slo_s
        self._step_s = LineFit(0.0, prior_step_s)  # by sequences decoding
        self._context_tokens = 0.0  # mean of a sequence
        self._last: Observation | None = None

    def observe_step(self, sequences: int, seconds: float) -> None:
        """Take the time of a decode step that computed no prompt: that work counts as prefill."""
        if sequences > 0 and seconds > 0:
            self._step_s.observe(sequences, seconds)

    def sample(self, now: Observation, predictor: Predictor) -> LoadSample | None:
        """The load since the last observation; None for the first, and when the clock was set back."""
        last, self._last = self._last, now
        if now.holding:
            mean_tokens = now.held_tokens / now.holding
            weight = CONTEXT_WEIGHT if self._context_tokens else 1.0
            self._context_tokens += weight * (mean_tokens - self._context_tokens)
        if last is None or now.at <= last.at:
            return None
        requests = now.offered.requests - last.offered.requests
        tokens = now.offered.prefill_tokens - last.offered.prefill_tokens
        prompt_tokens = max(1, tokens // requests) if requests > 0 else MEAN_PROMPT_TOKENS
        concurrency = self._concurrency(now)
        step_s = self._step_s.at(concurrency)
        return LoadSample(
            at=now.at,
            period_s=now.at - last.at,
            offered_requests=requests,
            offered_prefill_tokens=tokens,
            offered_output_tokens=now.offered.output_tokens - last.offered.output_tokens,
            queued_prefill_tokens=now.queued_prefill_tokens,
            filled_decode_workers=(now.holding + now.waiting) / concurrency,
            prefill_s_per_token=predictor.prefill_s(prompt_tokens) / prompt_tokens,
            decode_tokens_per_s=concurrency / step_s if step_s > 0 else 0.0,
        )

    def _concurrency(self, now: Observation) -> float:
        """Sequences that fill one decode worker: its batch, its memory, or its steps at the TPOT objective."""
        by_memory = FULL_MEMORY_SHARE * now.worker_tokens / max(1.0, self._context_tokens)
        fit = self._step_s
        by_time = (self._tpot_slo_s - fit.intercept) / fit.slope if fit.slope > 0 else by_memory
        return max(1.0, min(now.worker_sequences, by_memory, by_time))


class Demand(msgspec.Struct, frozen=True):
    """Workers kept busy by the offered load, on each side."""

    prefill: float
    decode: float


def offered_since(before: dict[str, Offered], now: dict[str, Offered]) -> Offered:
    """What arrived at all frontends between two readings of their counts. All that a new frontend counts is new."""
    total = Offered()
    for name, count in now.items():
        total += count - before.get(name, Offered())
    return total


def samples_in_window(config: RatioConfig) -> int:
    """Load samples that a decision is made on."""
    return max(2, round(config.window_s / config.interval_s))


def demand(window: Sequence[LoadSample], backlog_s: float = RatioConfig().backlog_s) -> Demand:
    """P = rate * prefill time, D = rate * output tokens / decode rate (NVIDIA's rate matching, by offered load).

    With TTFT one prefill's service time, OSL output tokens and C_dec sequences a decode worker holds at TPOT, this is
    P/D = C_dec * TTFT / (OSL * TPOT). The queue counts as load that is to be worked off within `backlog_s`.
    """
    seconds = sum(sample.period_s for sample in window)
    if not window or seconds <= 0:
        return Demand(0.0, 0.0)
    last = window[-1]
    prefill_tokens_per_s = sum(sample.offered_prefill_tokens for sample in window) / seconds
    output_tokens_per_s = sum(sample.offered_output_tokens for sample in window) / seconds
    backlog_tokens_per_s = last.queued_prefill_tokens / backlog_s
    offered = output_tokens_per_s / last.decode_tokens_per_s if last.decode_tokens_per_s > 0 else 0.0
    # Output lengths are learned from requests that ended, and long ones end last. Where the rate is therefore guessed
    # too low, what decodes now is the better measure.
    filled = sum(sample.filled_decode_workers * sample.period_s for sample in window) / seconds
    return Demand(
        prefill=(prefill_tokens_per_s + backlog_tokens_per_s) * last.prefill_s_per_token,
        decode=max(offered, filled),
    )


def desired_ratio(
    window: Sequence[LoadSample],
    current: DesiredRatio,
    config: RatioConfig = RatioConfig(),
    overflow: bool = False,
    max_step: int | None = None,
) -> DesiredRatio | None:
    """A better split of the same number of workers; None to keep the current one.

    It is kept while nothing is offered, for `config.cool_down_s` after a change, while the busier side is less busy
    than `config.busy`, and where a change would relieve that side by less than `config.gain` (hysteresis). `overflow`:
    prompts can be prefilled on decode workers (`cost` placement). At most `max_step` workers change roles at once, by
    default an eighth of the fleet and at least one.
    """
    total = current.prefill + current.decode
    if not window or total < config.min_prefill + config.min_decode:
        return None
    now = window[-1].at
    if now - current.set_at < config.cool_down_s:
        return None
    # The window and both its halves must ask for a change in the same direction: a burst is no reason to move.
    middle = len(window) // 2
    parts = [part for part in (window, window[:middle], window[middle:]) if part]
    best, *halves = [_best_prefill(part, current, config, overflow) - current.prefill for part in parts]
    if best == 0 or any(half * best <= 0 for half in halves):
        return None
    step = max_step or max(1, total // 8)
    prefill = current.prefill + max(-step, min(step, best))
    return DesiredRatio(prefill, total - prefill, set_by="ratio", set_at=now)


def _best_prefill(window: Sequence[LoadSample], current: DesiredRatio, config: RatioConfig, overflow: bool) -> int:
    """The number of prefill workers at which the busier side is least busy; the current one unless that is a gain.

    With overflow, decode gives workers away only if those left are at most `OVERFLOW_MAX_DECODE_LOAD` busy. And where
    decode is the busier side, a prefill side that gives workers to it counts as busy only at
    `OVERFLOW_MAX_PREFILL_LOAD`: prefill overflows to decode, but decode cannot overflow to prefill.
    """
    total = current.prefill + current.decode
    need = demand(window, config.backlog_s)
    if need.prefill + need.decode <= 0:
        return current.prefill
    decode_is_busier = need.decode * current.prefill > need.prefill * current.decode
    max_decode_load = OVERFLOW_MAX_DECODE_LOAD if overflow else 1.0

    def load_of_busier_side(prefill: int) -> float:
        decode = total - prefill
        if not prefill or not decode:
            return float("inf")
        overfull = overflow and decode_is_busier and prefill < current.prefill
        max_prefill_load = OVERFLOW_MAX_PREFILL_LOAD if overfull else 1.0
        return max(need.prefill / (prefill * max_prefill_load), need.decode / decode)

    load = load_of_busier_side(current.prefill)
    if load < config.busy:
        return current.prefill
    options = [
        prefill
        for prefill in range(config.min_prefill, total - config.min_decode + 1)
        if prefill <= current.prefill or need.decode <= max_decode_load * (total - prefill)
    ]
    if not options:
        return current.prefill
    best = min(options, key=lambda prefill: (load_of_busier_side(prefill), abs(prefill - current.prefill)))
    return best if load_of_busier_side(best) <= (1 - config.gain) * load else current.prefill
