"""How many workers should prefill and how many decode, none that prefill included: the split with most headroom.

Two observations of a fleet give a load sample, a window of samples the traffic, and `attainment` says how much of that
traffic each split would bear. Who observes, and who applies the split (role changes first, then starting and draining
processes), is not here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from orchestrator.config.settings import RatioConfig, SLOConfig
from orchestrator.policy.attainment import Traffic, after_moves, headroom, with_prompts
from orchestrator.policy.predict import FIT_MEMORY, MIN_FIT_SAMPLES, LineFit, Predictor, Smoothed
from orchestrator.types import DesiredRatio, Offered

# The share of its KV memory that a full decode worker has in use: sequences still grow.
FULL_MEMORY_SHARE = 0.8
CONTEXT_WEIGHT = 0.3  # of an observation in the running mean of a sequence's context
LEAST_ENDED = 0.25  # of those that came: fewer say too little of how long answers are
MIN_REQUESTS = 20  # in half a window: fewer say too little of their lengths
# A window is as short as it may be: as long as one of these, and with this many requests.
LEAST_WINDOWS_S, ENOUGH_REQUESTS = (10.0, 20.0, 40.0), 200
MOST_SPLITS = 32  # compared of a large fleet's: evenly spread
# A decode worker can do all that a prefill worker does, but not the other way round, so workers go to decode while the
# fleet still bears this many times the load at which they would go to prefill.
DECODE_EARLIER = 1.25
TO_PREFILL_SURER = 2.0  # how many times the standard error that going to prefill has to stand; to decode: once


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

    def sample(self, now: Observation, predictor: Predictor) -> LoadSample | None:
        """The load since the last observation; None for the first, and when the clock was set back."""
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


class RatioDecision(msgspec.Struct, frozen=True):
    """A change of the split, and the numbers that it was decided on."""

    before: DesiredRatio
    after: DesiredRatio
    headroom_before: float  # the multiple of the arriving rate that each would attain
    headroom_after: float
    traffic: Traffic

    def __str__(self) -> str:
        t = self.traffic
        return (
            f"{self.before.prefill}P{self.before.decode}D -> {self.after.prefill}P{self.after.decode}D: "
            f"bears {self.headroom_after:.2f} instead of {self.headroom_before:.2f} times what arrives: "
            f"{t.requests_per_s:.3g} requests/s, {t.prefill_s * 1e3:.3g} ms of prefill and "
            f"{t.output_tokens:.3g} tokens out each, steps of {t.step_s * 1e3:.3g} ms and "
            f"{t.step_s_per_sequence * 1e3:.2g} ms a sequence"
        )


def desired_ratio(
    window: Sequence[LoadSample],
    current: DesiredRatio,
    config: RatioConfig = RatioConfig(),
    slo: SLOConfig = SLOConfig(),
    max_step: int | None = None,
) -> RatioDecision | None:
    """A better split of the same number of workers; None to keep the current one.

    It is kept while too little arrives to tell, for `config.cool_down_s` after a change, while it bears
    `1 / config.busy` times what arrives, and where no other bears more by `config.gain` whatever
    chance makes of so few requests (hysteresis). The latest samples are asked first, then ever more of them: what is
    seen for longer need not be as clear. Each time all of them and both halves must ask for a change in the same
    direction: a burst is no reason to move. A worker goes to decode for what two samples say, and to prefill for what
    lasts ten seconds, because a decode worker can do both. For the same reason as many go to decode at once as should,
    and to prefill at most `max_step`, by default a quarter of the fleet and at least one.
    """
    total = current.prefill + current.decode
    if not window or total < config.min_prefill + config.min_decode:
        return None
    if window[-1].at - current.set_at < config.cool_down_s:
        return None
    step = max_step or max(1, total // 4)
    asked = 0
    for least_s in (0.0, *LEAST_WINDOWS_S, config.window_s):
        part = recent(window, config, least_s)
        if len(part) == asked and least_s > LEAST_WINDOWS_S[0]:
            continue
        asked = len(part)
        more = min(step, _agreed(part, current, config, slo))
        if more < 0 or (more > 0 and least_s > 0 and not _warming(part)):
            return _decision(part, current, more, slo)
    return None


def _decision(window: Sequence[LoadSample], current: DesiredRatio, more: int, slo: SLOConfig) -> RatioDecision:
    arriving = traffic(window)
    assert arriving is not None
    after = DesiredRatio(current.prefill + more, current.decode - more, set_by="ratio", set_at=window[-1].at)
    return RatioDecision(
        before=current,
        after=after,
        headroom_before=headroom(arriving, current.prefill, current.decode, slo),
        headroom_after=headroom(
            after_moves(arriving, current.prefill, current.decode, more), after.prefill, after.decode, slo
        ),
        traffic=arriving,
    )


def _agreed(window: Sequence[LoadSample], current: DesiredRatio, config: RatioConfig, slo: SLOConfig) -> int:
    """How many more workers should prefill, fewer where negative; 0 where the window and its halves disagree."""
    more = _best_prefill(window, current, config, slo) - current.prefill if window else 0
    middle = len(window) // 2
    for half in (window[:middle], window[middle:]):
        if more and half and (_best_prefill(half, current, config, slo) - current.prefill) * more <= 0:
            return 0
    return more


def _best_prefill(window: Sequence[LoadSample], current: DesiredRatio, config: RatioConfig, slo: SLOConfig) -> int:
    """The number of prefill workers that bears most; the current one unless that is a gain that is needed."""
    total = current.prefill + current.decode
    arriving = traffic(window)
    if arriving is None:
        return current.prefill
    now = headroom(arriving, current.prefill, current.decode, slo)
    if now * config.busy > DECODE_EARLIER:
        return current.prefill
    # What decodes has to fit on the workers that go on decoding. Where all are too few for it, each one more helps.
    holding = math.ceil(window[-1].sequences / window[-1].max_sequences)
    most = total - max(config.min_decode, holding)
    if most < config.min_prefill:
        most = current.prefill
    if now * config.busy > 1 or _growing(window):
        most = min(most, current.prefill)
    step = max(1, total // MOST_SPLITS)
    gains = {current.prefill: 1.0}
    for prefills, surer in (
        (range(config.min_prefill, min(most + 1, current.prefill), step), 1.0),
        (range(current.prefill + 1, most + 1, step), TO_PREFILL_SURER),
    ):
        gains |= _gains(arriving, current, prefills, surer * _chance(window, arriving, config), slo)
    if current.prefill > 0 and gains.get(0, 0.0) * now < 1 <= headroom(with_prompts(arriving, 0.0), 0, total, slo):
        gains[0] = 0.0  # more prompts than it bears, and no queue to hold some back: all would be late
    best = max(gains, key=lambda prefill: (gains[prefill], -abs(prefill - current.prefill)))
    return best if gains[best] >= 1 + config.gain else current.prefill


def _gains(
    arriving: Traffic, current: DesiredRatio, prefills: Iterable[int], error: float, slo: SLOConfig
) -> dict[int, float]:
    """How many times what the current split bears each of these bears, by its prefill workers: the least of that, be
    prompts shorter or longer by `error` than they seem. All splits bear the same prompts, so that the error of the
    comparison is less than theirs."""
    may_be = [arriving, with_prompts(arriving, 1 / (1 + error)), with_prompts(arriving, 1 + error)]
    bears_now = [max(1e-9, headroom(each, current.prefill, current.decode, slo)) for each in may_be]
    gains = {}
    for prefill in prefills:
        more = prefill - current.prefill
        gains[prefill] = min(
            headroom(after_moves(each, current.prefill, current.decode, more), prefill, current.decode - more, slo)
            / now
            for each, now in zip(may_be, bears_now, strict=True)
        )
    return gains


def _growing(window: Sequence[LoadSample]) -> bool:
    """Whether ever more sequences decode, by more than chance (two standard deviations of Poisson numbers): then the
    longest answers have not ended, and what decode workers will have to bear is not known."""
    seconds, first = 0.0, len(window) - 1
    while first > 0 and seconds < LEAST_WINDOWS_S[0]:
        seconds += window[first].period_s
        first -= 1
    before, after = window[first].sequences, window[-1].sequences
    return after - before > 2 * math.sqrt(before + after)


def _warming(window: Sequence[LoadSample]) -> bool:
    """Whether prompts take less in the second half than in the first, by more than chance (a standard error). Caches
    fill after a start or a change of load, and until then prompts look as if more workers should prefill."""
    middle = len(window) // 2
    parts = window[:middle], window[middle:]
    first, second = (traffic(part) for part in parts)
    if first is None or second is None:
        return False
    requests = [sum(sample.offered.requests for sample in part) for part in parts]
    return first.least_s - second.least_s > math.hypot(
        *(math.sqrt(half.least_s2 / count) for half, count in zip((first, second), requests, strict=True))
    )


def _chance(window: Sequence[LoadSample], arriving: Traffic, config: RatioConfig) -> float:
    """How far off the mean work of so few requests may be, by their spread (its standard error). Where requests stay
    on a decode worker for less than a cool-down, a wrong change is as soon undone, and it counts for less."""
    if arriving.prefill_s <= 0:
        return 0.0
    seconds = sum(sample.period_s for sample in window)
    stay_s = sum(sample.sequences * sample.period_s for sample in window) / (arriving.requests_per_s * seconds)
    spread = arriving.prefill_s2 / (arriving.prefill_s * arriving.prefill_s)
    error = math.sqrt(spread / (arriving.requests_per_s * seconds))
    return error * min(1.0, stay_s / max(config.cool_down_s, 1e-9))
