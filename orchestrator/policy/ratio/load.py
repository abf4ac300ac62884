"""The load of a fleet: two observations give a load sample, and a window of samples what arrives and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from orchestrator.config.settings import RatioConfig
from orchestrator.policy.predict import FIT_MEMORY, MIN_FIT_SAMPLES, LineFit, Predictor, Smoothed
from orchestrator.policy.ratio.attainment import Traffic
from orchestrator.policy.ratio.reuse import Reuse
from orchestrator.types import Offered

# The share of its KV memory that a full decode worker has in use: sequences still grow.
FULL_MEMORY_SHARE = 0.8
CONTEXT_WEIGHT = 0.3  # of an observation in the running mean of a sequence's context
LEAST_ENDED = 0.25  # of those that came: fewer say too little of how long answers are
MIN_REQUESTS = 20  # in half a window: fewer say too little of their lengths
# A window is as short as it may be: as long as one of these, and with this many requests.
LEAST_WINDOWS_S, ENOUGH_REQUESTS = (10.0, 20.0, 40.0), 200


class Observation(msgspec.Struct, frozen=True):
    """The fleet at one moment."""

    at: float  # unix seconds
    offered: Offered  # since it began to be counted
    holding: int  # sequences with KV on decode workers
    waiting: int  # sequences that wait there
    held_tokens: int  # of the KV in use on decode workers
    worker_tokens: int  # that one decode worker's KV pool holds
    worker_sequences: int  # at most in one decode worker's batch


class LoadSample(msgspec.Struct, frozen=True):
    """The fleet over one sampling period. Offered load is what arrived, whether or not it was served or rejected."""

    at: float  # unix seconds, end of the period
    period_s: float
    offered: Offered
    sequences: int  # on decode workers at the end of the period, those that wait included
    # Measured. What a step takes whatever is in it is no prompt's: prompts share it, and decode steps have it anyway.
    prefill_s_per_token: float
    step: tuple[float, float]  # of decode, measured: fixed seconds, and seconds per sequence
    itl_s: float  # measured, mean over the workers
    max_sequences: float  # that one decode worker holds, by its batch or its memory
    worker_tokens: float = 0.0  # that one worker's KV memory holds
    reuse: Reuse = Reuse()  # of the prompts that came


class LoadSampler:
    """Learns step times and sequence lengths, and turns each observation into the load since the one before."""

    def __init__(self) -> None:
        self._step_s = LineFit(0.0)  # by sequences decoding
        self._fixed_s = 0.0  # as the engine measured it, and the means of what steps take beyond it, and of sequences
        self._beyond_s, self._sequences = Smoothed(0.0, 1 / FIT_MEMORY), Smoothed(1.0, 1 / FIT_MEMORY)
        self._context_tokens = 0.0  # mean of a sequence
        self._last: Observation | None = None

    def observe_step(self, sequences: int, seconds: float) -> None:
        """Take the time of a decode step that computed no prompt: that work counts as prefill."""
        if sequences > 0 and seconds > 0:
            self._step_s.observe(sequences, seconds)
            self._beyond_s.observe(max(0.0, seconds - self._fixed_s))
            self._sequences.observe(sequences)

    def sample(self, now: Observation, predictor: Predictor, reuse: Reuse = Reuse()) -> LoadSample | None:
        """The load since the last observation, `reuse` since then; None for the first, and when the clock was set
        back."""
        last, self._last = self._last, now
        if predictor.speed.step_s != self._fixed_s:
            self._fixed_s = predictor.speed.step_s
            self._beyond_s = Smoothed(predictor.speed.step_s_per_sequence, 1 / FIT_MEMORY)
            self._sequences = Smoothed(1.0, 1 / FIT_MEMORY)
        if now.holding:
            mean_tokens = now.held_tokens / now.holding
            weight = CONTEXT_WEIGHT if self._context_tokens else 1.0
            self._context_tokens += weight * (mean_tokens - self._context_tokens)
        if last is None or now.at <= last.at:
            return None
        itl_s = predictor.mean_itl_s
        by_memory = FULL_MEMORY_SHARE * now.worker_tokens / max(1.0, self._context_tokens)
        return LoadSample(
            at=now.at,
            period_s=now.at - last.at,
            offered=now.offered - last.offered,
            sequences=now.holding + now.waiting,
            prefill_s_per_token=predictor.s_per_token,
            step=self._step(itl_s),
            itl_s=itl_s,
            max_sequences=max(1.0, min(now.worker_sequences, by_memory)),
            worker_tokens=now.worker_tokens,
            reuse=reuse,
        )

    def _step(self, itl_s: float) -> tuple[float, float]:
        """What a step takes without sequences is the engine's, which measured it when it started. What a sequence adds
        depends on its context. A line through both would take long contexts for a long step, as numbers of sequences
        vary little; it is all there is where the engine has measured nothing."""
        if self._fixed_s > 0:
            return self._fixed_s, self._beyond_s.value / self._sequences.value
        line = self._step_s
        return (line.intercept, line.slope) if line.samples >= MIN_FIT_SAMPLES else (itl_s, 0.0)


def offered_since(before: dict[str, Offered], now: dict[str, Offered]) -> Offered:
    """What arrived at all frontends between two readings of their counts. All that a new frontend counts is new."""
    total = Offered()
    for name, count in now.items():
        total += count - before.get(name, Offered())
    return total


def samples_in_window(config: RatioConfig) -> int:
    """Load samples that a decision is made on."""
    return max(2, round(config.window_s / config.interval_s))


def recent(
    window: Sequence[LoadSample], config: RatioConfig = RatioConfig(), least_s: float = LEAST_WINDOWS_S[0]
) -> Sequence[LoadSample]:
    """The latest samples, at least two and of at least `least_s`, that say enough of what arrives: all of them where
    little does."""
    seconds, requests = 0.0, 0
    least_s = min(least_s, config.window_s)
    for start in range(len(window) - 1, -1, -1):
        seconds += window[start].period_s
        requests += window[start].offered.requests
        if seconds >= 0.95 * least_s and requests >= ENOUGH_REQUESTS and start <= len(window) - 2:
            return window[start:]
    return window if len(window) >= samples_in_window(config) else ()


def traffic(window: Sequence[LoadSample]) -> Traffic | None:
    """What arrived in the window, and what it costs; None where too little arrived to tell."""
    total = sum((sample.offered for sample in window), Offered())
    seconds = sum(sample.period_s for sample in window)
    if total.requests < MIN_REQUESTS or seconds <= 0:
        return None
    last, per_token, count = window[-1], window[-1].prefill_s_per_token, total.requests
    rate = count / seconds
    # Output lengths are learned from requests that ended, and long ones end last. What all that are there have
    # generated, over the requests that ended meanwhile, counts those too that have not ended. What waits counts as
    # well: it is to be decoded beside what arrives.
    generated = sum(s.sequences * s.period_s / s.itl_s for s in window if s.itl_s > 0)
    ended = max(count * LEAST_ENDED, count - max(0, last.sequences - window[0].sequences))
    return Traffic(
        requests_per_s=rate,
        prefill_s=per_token * total.prefill_tokens / count,
        prefill_s2=per_token * per_token * total.prefill_tokens2 / count,
        local_s=per_token * total.local_tokens / count,
        local_s2=per_token * per_token * total.local_tokens2 / count,
        least_s=per_token * total.least_tokens / count,
        least_s2=per_token * per_token * total.least_tokens2 / count,
        output_tokens=max(1.0, total.output_tokens / count, generated / ended),
        step_s=last.step[0],
        step_s_per_sequence=last.step[1],
        max_sequences=last.max_sequences,
    )


def stay_s(window: Sequence[LoadSample], arriving: Traffic) -> float:
    """How long requests stay on a decode worker, by Little's law."""
    seconds = sum(sample.period_s for sample in window)
    return sum(sample.sequences * sample.period_s for sample in window) / (arriving.requests_per_s * seconds)
