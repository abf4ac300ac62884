"""The load of a fleet: a load sample from two observations, and the traffic from a window of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from orchestrator.policy.predict.estimates import FIT_MEMORY, MIN_FIT_SAMPLES, LineFit, Smoothed
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.policy.prefix_keys import Reuse
from orchestrator.policy.ratio.attainment import Traffic
from orchestrator.types import Offered

# A decode worker is full when this share of its KV memory is in use, because its sequences still grow.
FULL_MEMORY_SHARE = 0.8
CONTEXT_WEIGHT = 0.3  # of an observation in the running mean of a sequence's context
MIN_ENDED_SHARE = 0.25  # lower bound of ended requests over arrived ones, in the mean length of answers
MOST = 0.5  # of the squares of prompts
MIN_REQUESTS = 20  # in half a window: fewer tell too little about lengths
INTERVAL_S = 2.0  # between two samples
WINDOW_S, WINDOW_SAMPLES = 60.0, 30  # that must agree; fewer where many requests arrive
NEARLY = 0.95  # of a window's seconds: periods vary
# A window is the shortest one that has one of these lengths (s) and this many requests, which tell the mean of
# exponential sizes to a tenth. A shorter window may be one burst, and needs more requests.
MIN_WINDOWS_S, ENOUGH_REQUESTS, ENOUGH_OF_A_BURST = (10.0, 20.0, 40.0), 100, 200


class Observation(msgspec.Struct, frozen=True):
    """The fleet at one moment."""

    at: float  # unix seconds
    offered: Offered  # since counting began
    holding: int  # sequences with KV there
    waiting: int  # sequences that wait there
    held_tokens: int  # tokens whose KV is in use on decode workers
    worker_tokens: int  # size of one decode worker's KV pool
    worker_sequences: int  # in one decode worker's batch, at most
    decode_workers: tuple[str, ...] = ()  # their ids; what others decoded before a role change tells nothing now
    link_s_per_token: float = 0.0  # in which a worker's link carries a token's KV; 0: not known
    host_tokens: int = 0  # size of one worker's host tier
    former: int = 0  # sequences that prefill workers still decode since they were decode workers


class LoadSample(msgspec.Struct, frozen=True):
    """The fleet over one sampling period. Offered load counts all arrivals, served or rejected."""

    at: float  # unix seconds, end of the period
    period_s: float
    offered: Offered
    sequences: int  # on decode workers at the end of the period, waiting ones included
    # Measured. The fixed time of a step is not charged to prompts: they share steps, and decode steps take it anyway.
    prefill_s_per_token: float
    step: tuple[float, float]  # a decode step, measured: fixed seconds, and seconds per sequence
    max_sequences: float  # on one decode worker, by batch size or memory
    memory_sequences: float = math.inf  # the same by memory alone
    worker_tokens: float = 0.0  # for which one worker caches KV, on its device or in its host tier, which copies that
    reuse: Reuse = Reuse()  # of the prompts that arrived
    link_s_per_token: float = 0.0  # `Observation`'s
    former: int = 0  # `Observation`'s

    @property
    def decoding(self) -> int:
        """Sequences that have not ended, on workers of either role."""
        return self.sequences + self.former


class LoadSampler:
    """Turns each observation into the load since the previous one; learns step times and sequence lengths for it."""

    def __init__(self) -> None:
        self._step_s = LineFit(0.0)  # by decoding sequences
        # The fixed time of a step, as the engine measured it. Then means: seconds beyond it per step, and sequences.
        self._fixed_s = 0.0
        self._beyond_s, self._sequences = Smoothed(0.0, 1 / FIT_MEMORY), Smoothed(1.0, 1 / FIT_MEMORY)
        self._context_tokens = 0.0  # mean of a sequence
        self._last: Observation | None = None

    def observe_step(self, sequences: int, seconds: float) -> None:
        """Take the time of a step that only decoded. Steps with prompt tokens are left out: their work is prefill."""
        if sequences > 0 and seconds > 0:
            self._step_s.observe(sequences, seconds)
            self._beyond_s.observe(max(0.0, seconds - self._fixed_s))
            self._sequences.observe(sequences)

    def sample(self, now: Observation, predictor: Predictor, reuse: Reuse = Reuse()) -> LoadSample | None:
        """The load since the previous observation, with the `reuse` since then; None for the first observation, and
        after the clock was set back."""
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
        by_memory = FULL_MEMORY_SHARE * now.worker_tokens / max(1.0, self._context_tokens)
        return LoadSample(
            at=now.at,
            period_s=now.at - last.at,
            offered=now.offered - last.offered,
            sequences=now.holding + now.waiting,
            prefill_s_per_token=predictor.s_per_token,
            step=self._step(predictor.mean_itl_s(now.decode_workers)),
            max_sequences=max(1.0, min(now.worker_sequences, by_memory)),
            memory_sequences=max(1.0, by_memory),
            worker_tokens=max(now.worker_tokens, now.host_tokens),
            reuse=reuse,
            link_s_per_token=now.link_s_per_token,
            former=now.former,
        )

    def _step(self, itl_s: float) -> tuple[float, float]:
        """A decode step's fixed seconds, and its seconds per sequence.

        The engine measured the fixed time at its start. The time per sequence is measured while serving, because it
        grows with the context. A line fitted to both would take long contexts for a long fixed time, since the number
        of sequences varies little; it serves only if the engine measured nothing.
        """
        if self._fixed_s > 0:
            return self._fixed_s, self._beyond_s.value / self._sequences.value
        line = self._step_s
        return (line.intercept, line.slope) if line.samples >= MIN_FIT_SAMPLES else (itl_s, 0.0)


def offered_since(before: dict[str, Offered], now: dict[str, Offered]) -> Offered:
    """The load that arrived at all frontends between two readings of their counts. What one counted before it was read
    first is not of now: it may have been there before, and Redis had lost it for a while."""
    total = Offered()
    for name, count in now.items():
        total += count - before.get(name, count)
    return total


def recent(window: Sequence[LoadSample], least_s: float = MIN_WINDOWS_S[0]) -> Sequence[LoadSample]:
    """The fewest latest samples, at least two, that cover `least_s` seconds and `ENOUGH_REQUESTS` requests
    (`ENOUGH_OF_A_BURST` where `least_s` is below `MIN_WINDOWS_S`).

    If none do, the whole window once it is full; until then, no samples.
    """
    seconds, requests = 0.0, 0
    enough = ENOUGH_REQUESTS if least_s >= MIN_WINDOWS_S[0] else ENOUGH_OF_A_BURST
    for start in range(len(window) - 1, -1, -1):
        seconds += window[start].period_s
        requests += window[start].offered.requests
        if seconds >= NEARLY * least_s and requests >= enough and start <= len(window) - 2:
            return window[start:]
    return window if len(window) >= WINDOW_SAMPLES else ()


def traffic(window: Sequence[LoadSample]) -> Traffic | None:
    """The arriving load of a window and its cost; None if fewer than `MIN_REQUESTS` requests arrived."""
    total = sum((sample.offered for sample in window), Offered())
    seconds = sum(sample.period_s for sample in window)
    if total.requests < MIN_REQUESTS or seconds <= 0:
        return None
    last, per_token, count = window[-1], window[-1].prefill_s_per_token, total.requests
    rate, prefill_s = count / seconds, per_token * total.prefill_tokens / count
    # Mean output lengths are learned from ended requests, and long answers end last. Dividing the tokens generated for
    # all sequences by the number of ended requests also counts answers that have not ended. For exponential lengths it
    # is the maximum-likelihood estimate.
    ended = max(count * MIN_ENDED_SHARE, count + window[0].decoding - last.decoding)
    return Traffic(
        requests_per_s=rate,
        prefill_s=prefill_s,
        prefill_s2=max(
            prefill_s * prefill_s, per_token * per_token * (total.prefill_tokens2 - total.patient_tokens2) / count
        ),
        local_s=per_token * total.local_tokens / count,
        local_s2=per_token * per_token * total.local_tokens2 / count,
        least_s=per_token * total.least_tokens / count,
        least_s2=per_token * per_token * total.least_tokens2 / count,
        output_tokens=max(1.0, total.output_tokens / count, total.generated_tokens / ended),
        step_s=last.step[0],
        step_s_per_sequence=last.step[1],
        max_sequences=last.max_sequences,
        link_share=last.link_s_per_token / per_token if per_token > 0 else 0.0,
    )


def prompt_error(window: Sequence[LoadSample]) -> float:
    """The relative standard error of the window's prefill work, from the spread of its prompts, however long each may
    wait."""
    total = sum((sample.offered for sample in window), Offered())
    return math.sqrt(total.prefill_tokens2) / total.prefill_tokens if total.prefill_tokens else 0.0


def long_prompts_wait(window: Sequence[LoadSample]) -> bool:
    """Whether most of the long prompts may wait for longer than others, by squares, which only long ones fill: a short
    one that may wait hardly counts, nor does one that may wait for hardly longer."""
    total = sum((sample.offered for sample in window), Offered())
    return total.patient_tokens2 > MOST * total.prefill_tokens2


def residence_s(window: Sequence[LoadSample], arriving: Traffic) -> float:
    """Mean seconds that a request stays on a decode worker, by Little's law."""
    seconds = sum(sample.period_s for sample in window)
    return sum(sample.decoding * sample.period_s for sample in window) / (arriving.requests_per_s * seconds)


def decode_growing(window: Sequence[LoadSample]) -> bool:
    """Whether the number of decoding sequences grows, by more than chance (two standard deviations of Poisson numbers).

    While it grows the longest answers have not ended, so the future load of decode workers is not known.
    """
    seconds, first = 0.0, len(window) - 1
    while first > 0 and seconds < MIN_WINDOWS_S[0]:
        seconds += window[first].period_s
        first -= 1
    before, after = window[first].decoding, window[-1].decoding
    return after - before > 2 * math.sqrt(before + after)


def caches_filling(window: Sequence[LoadSample]) -> bool:
    """Whether prompts cost less in the second half than in the first, by more than chance (a standard error).

    Caches fill after a start or a change of load. Until they are full, prompts look longer than they will be, and more
    prefill workers seem to be needed.
    """
    middle = len(window) // 2
    parts = window[:middle], window[middle:]
    first, second = (traffic(part) for part in parts)
    if first is None or second is None:
        return False
    requests = [sum(sample.offered.requests for sample in part) for part in parts]
    return first.least_s - second.least_s > math.hypot(
        *(math.sqrt(half.least_s2 / count) for half, count in zip((first, second), requests, strict=True))
    )
