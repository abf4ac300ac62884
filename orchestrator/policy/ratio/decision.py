"""How many workers should prefill and how many decode: the split with most headroom. It may have no prefill worker.

A window of load samples (`load`) gives the traffic, and `attainment` the headroom of each split. This module neither
observes the load (`fleet.ratio_controller`) nor applies the split (`launch`: role changes first, then processes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from orchestrator.config.settings import RatioConfig, SLOConfig
from orchestrator.policy.predict.predictor import Z_95
from orchestrator.policy.ratio.attainment import (
    Split,
    Traffic,
    headroom,
    in_time_without_queue,
    multiple,
    scale_prefill_times,
)
from orchestrator.policy.ratio.caches import Caches, caches_of, traffic_after
from orchestrator.policy.ratio.load import (
    INTERVAL_S,
    MIN_WINDOWS_S,
    NEARLY,
    WINDOW_S,
    LoadSample,
    caches_filling,
    decode_growing,
    long_prompts_wait,
    prompt_error,
    recent,
    residence_s,
    traffic,
)
from orchestrator.types import DesiredRatio

COOL_DOWN_S = 10.0  # no change for this long after any change, an operator's included
QUICK_S = 2 * INTERVAL_S  # the same where requests end between two samples
BUSY = 0.8  # nor while the load is below this share of the fleet's capacity
MAX_SPLITS = 32  # about as many splits of a large fleet are compared, evenly spread
# Workers go to decode already at a headroom that is larger by this factor than the one at which they go to prefill: a
# decode worker can do all that a prefill worker does, but not the other way round.
DECODE_EARLIER = 1.25
# They go to prefill only at a headroom that is smaller by this factor: while all requests are in time it helps nobody,
# and fewer decode workers are left if the load changes.
PREFILL_LATER = 0.9
# While all requests are in time, nothing is changed for a fleet that works for less than this share of its time: most
# requests find an idle worker on either split.
NEARLY_IDLE = 0.25
# Another split must bear more load by the first share. Under overload it must have more requests in time by the second,
# since a model of 99th percentiles tells no smaller share; and if that is less than the third, bear more load as well.
GAIN, OVERLOADED_GAIN, SURE_GAIN = 0.02, 0.01, 0.1
BACK_GAIN = 0.05  # and by this one to take a change back within `COOL_DOWN_S`
# A move to prefill must be better even if the prefill work is this many standard errors off; a move to decode, one. The
# last prefill worker also needs so much to go: without it a long prompt delays all that decode.
SURE_STANDARD_ERRORS = 2.0


class RatioDecision(msgspec.Struct, frozen=True):
    """A change of the split, and the numbers behind it."""

    before: DesiredRatio
    after: DesiredRatio
    headroom_before: float  # the multiple of the arriving rate that each split could serve
    headroom_after: float
    traffic: Traffic
    # On the decode workers, before and after: uncached tokens of the mean prompt, and the seconds for which caches keep
    # an unused block. None if the caches are not known.
    uncached: tuple[float, float] | None = None
    kept_s: tuple[float, float] | None = None

    @property
    def more(self) -> int:
        """How many more units prefill; negative: fewer."""
        return self.after.prefill - self.before.prefill

    def __str__(self) -> str:
        t = self.traffic
        return (
            f"{self.before.prefill}P{self.before.decode}D -> {self.after.prefill}P{self.after.decode}D: "
            f"{self.after.why}: "
            f"{t.requests_per_s:.3g} requests/s, {t.prefill_s * 1e3:.3g} ms of prefill and "
            f"{t.output_tokens:.3g} tokens out each, steps of {t.step_s * 1e3:.3g} ms and "
            f"{t.step_s_per_sequence * 1e3:.2g} ms a sequence{self._of_links()}{self._of_caches()}"
        )

    def _of_links(self) -> str:
        link_s = self.traffic.link_share * self.traffic.local_s
        return f", KV that takes a link {link_s * 1e3:.3g} ms each" if link_s else ""

    def _of_caches(self) -> str:
        if self.uncached is None or self.kept_s is None:
            return ""
        return (
            f"; caches keep prefixes for {self.kept_s[1]:.3g} instead of {self.kept_s[0]:.3g} s, so that "
            f"{self.uncached[1]:.0f} instead of {self.uncached[0]:.0f} tokens are computed where they decode"
        )


def desired_ratio(
    window: Sequence[LoadSample],
    current: DesiredRatio,
    config: RatioConfig = RatioConfig(),
    slo: SLOConfig = SLOConfig(),
    max_step: int | None = None,
    unit_size: int = 1,
    went: int = 0,
) -> RatioDecision | None:
    """A better split of the same number of units; None to keep the current one.

    `current`, `max_step` and the least numbers of `config` count units. Each has `unit_size` workers, which change
    roles together and have requests of their own: the ranks of a data-parallel group, or one worker. `went`: how
    many more went to prefill in the last change (negative: fewer); 0 if that is not known, or somebody else's.

    The current split is kept for `COOL_DOWN_S` (`QUICK_S`) after a change, while fewer than `MIN_REQUESTS` requests
    arrive, while its headroom is above `PREFILL_LATER / BUSY` (for a move to decode: `DECODE_EARLIER / BUSY`), while
    the workers are nearly idle and all requests in time, and unless another split is better by enough (`GAIN`) in spite
    of chance (`_gains`). Within `COOL_DOWN_S` a change back needs `BACK_GAIN`: a load that alternates would drag
    workers to and fro for little.

    The latest samples are evaluated first, then longer windows, whose larger number of requests shows a smaller gain.
    The whole window and both halves must call for a change in the same direction, so that a burst moves nobody. A move
    to decode needs two samples, a move to prefill ten seconds of them unless requests end between two samples, because
    a decode worker can do both. For the same reason any number of workers goes to decode at once, and at most
    `max_step` (default: `_max_move_to_prefill`) to prefill. Under overload a move to decode that gains less than
    `SURE_GAIN` needs the whole window: at the peak of a load that swings it would be for little, and too few workers
    would prefill after it.
    """
    if not window or current.prefill + current.decode < config.min_prefill + config.min_decode:
        return None
    since_s = abs(window[-1].at - current.set_at)  # the server's clock may have been set back since
    split = Split(current.prefill * unit_size, current.decode * unit_size, unit_size)
    config = msgspec.structs.replace(
        config, min_prefill=config.min_prefill * unit_size, min_decode=config.min_decode * unit_size
    )
    last_stays, asked = long_prompts_wait(window), 0  # by all samples: a burst of others does not end that
    for least_s in (0.0, *MIN_WINDOWS_S, WINDOW_S):
        part = recent(window, least_s)
        if len(part) == asked and least_s > MIN_WINDOWS_S[0]:
            continue
        asked = len(part)
        quick = _stay_s(part) < INTERVAL_S
        if since_s < (QUICK_S if quick and went else COOL_DOWN_S):
            continue
        at_once = max_step * unit_size if max_step else _max_move_to_prefill(split)
        more = _agreed_move(part, split, at_once, config, slo, last_stays)
        if more < 0 or (more > 0 and (least_s > 0 or quick) and not caches_filling(part)):
            found = _decision(part, current, split, more, slo)
            gain = found.headroom_after / max(1e-9, found.headroom_before) - 1
            whole = sum(sample.period_s for sample in part) >= NEARLY * WINDOW_S or _decode_overloaded(part, split)
            if more < 0 and found.headroom_before < 1 and gain < SURE_GAIN and not whole:
                continue
            if since_s >= COOL_DOWN_S or more * went > 0 or gain >= BACK_GAIN:
                return found
    return None


def _max_move_to_prefill(current: Split) -> int:
    """A quarter of the fleet, at least one unit: what they still decode is slower beside the prompts that they take."""
    quarter = (current.decode + current.prefill) // 4
    return max(1, quarter // current.unit_size) * current.unit_size


def _stay_s(window: Sequence[LoadSample]) -> float:
    """Mean seconds that a request stays on a decode worker; as long as a cool-down if there are too few to tell. It
    is no less than its tokens take, however many of those that came have not reached decode yet."""
    if (arriving := traffic(window)) is None:
        return COOL_DOWN_S
    return max(residence_s(window, arriving), arriving.output_tokens * arriving.step_s)


def _why(before: float, after: float) -> str:
    if after < 1:
        return f"{after:.0%} instead of {min(before, 1.0):.0%} of what arrives can be in time"
    more = f", {after / before - 1:.0%} more" if before >= 0.01 else ""
    return f"bears {after:.2f} instead of {before:.2f} times what arrives{more}"


def _is_nearly_idle(arriving: Traffic, workers: int) -> bool:
    """Taking each sequence for a step of its own, which is more than batches need."""
    return (
        arriving.requests_per_s * (arriving.prefill_s + arriving.output_tokens * arriving.step_s)
        < NEARLY_IDLE * workers
    )


def _decision(
    window: Sequence[LoadSample], before: DesiredRatio, current: Split, more: int, slo: SLOConfig
) -> RatioDecision:
    arriving = traffic(window)
    assert arriving is not None
    caches = caches_of(window, arriving, current)
    moved = traffic_after(arriving, caches, current, more)
    prefill, decode, per_token = current.prefill + more, current.decode - more, window[-1].prefill_s_per_token
    now, then = headroom(arriving, current.prefill, current.decode, slo), headroom(moved, prefill, decode, slo)
    units = more // current.unit_size
    return RatioDecision(
        before=before,
        after=DesiredRatio(before.prefill + units, before.decode - units, "ratio", window[-1].at, _why(now, then)),
        headroom_before=now,
        headroom_after=then,
        traffic=arriving,
        uncached=(arriving.local_s / per_token, moved.local_s / per_token) if caches is not None else None,
        kept_s=(caches.at_decode(0)[2], caches.at_decode(more)[2]) if caches is not None else None,
    )


def _agreed_move(
    window: Sequence[LoadSample],
    current: Split,
    at_once: int,
    config: RatioConfig,
    slo: SLOConfig,
    last_stays: bool,
) -> int:
    """How many more workers should prefill (negative: fewer); 0 if the window and its halves disagree."""
    if not window:
        return 0
    overloaded, middle = _decode_overloaded(window, current), len(window) // 2

    def move(part: Sequence[LoadSample]) -> int:
        return _best_prefill(part, current, at_once, config, slo, last_stays, overloaded) - current.prefill

    more = move(window)
    halves = (half for half in (window[:middle], window[middle:]) if more and half)
    return 0 if any(move(half) * more <= 0 for half in halves) else more


def _best_prefill(
    window: Sequence[LoadSample],
    current: Split,
    at_once: int,
    config: RatioConfig,
    slo: SLOConfig,
    last_stays: bool,
    overloaded: bool,
) -> int:
    """The number of prefill workers of the split with most headroom; the current number if more headroom is not needed
    or the gain is too small (`GAIN`). Only `at_once` more are asked about: half the way to a better split may bear
    less. With `last_stays` the last prefill worker goes only for `SURE_GAIN`.

    With `overloaded` the current split is left even for one with less headroom, because the sequences that decode now
    do not fit in its decode workers' memory; but not for one without prefill workers.
    """
    total = current.prefill + current.decode
    arriving = traffic(window)
    if arriving is None:
        return current.prefill
    now = headroom(arriving, current.prefill, current.decode, slo)
    if now * BUSY > DECODE_EARLIER or (now >= 1 and _is_nearly_idle(arriving, total)):
        return current.prefill
    # The sequences that decode now must fit on the remaining decode workers. If all workers together are too few for
    # them, workers only go to decode.
    holding = math.ceil(window[-1].sequences / window[-1].max_sequences)
    most = total - max(config.min_decode, holding)
    most = min(current.prefill + at_once, most) if most >= config.min_prefill else current.prefill
    if now * BUSY > PREFILL_LATER or decode_growing(window):
        most = min(most, current.prefill)
    unit = current.unit_size
    step = unit * max(1, total // unit // MAX_SPLITS)
    caches = caches_of(window, arriving, current)
    gains = {current.prefill: 0.0 if overloaded and current.prefill > most else 1.0}
    for prefills, standard_errors in (
        (range(max(unit, config.min_prefill), min(most + 1, current.prefill), step), 1.0),
        (range(config.min_prefill, min(1, most + 1, current.prefill)), SURE_STANDARD_ERRORS),
        (range(current.prefill + unit, most + 1, step), SURE_STANDARD_ERRORS),
    ):
        error = standard_errors * _relative_error(window, arriving)
        gains |= _gains(arriving, caches, current, prefills, error, slo)
    if current.prefill > 0 and headroom(scale_prefill_times(arriving, 0.0), 0, total, slo) >= 1:
        all_decode = traffic_after(arriving, caches, current, -current.prefill)
        all_decode = msgspec.structs.replace(all_decode, max_sequences=math.inf)
        if (in_time := in_time_without_queue(all_decode, total, slo)) < 1:
            gains[0] = min(gains.get(0, 0.0), in_time / max(1e-9, min(1.0, now)))  # no queue holds long prompts back
    if last_stays and current.prefill > 0 and gains.get(0, 0.0) < (1 + SURE_GAIN) * gains.get(unit, 0.0):
        gains[0] = 0.0  # only in a queue long prompts wait: in the next burst they would slow all that decode
    if overloaded and gains.get(0, 1.0) < 1:
        gains[0] = 0.0  # the last prefill worker holds back long prompts, which would delay all others
    best = max(gains, key=lambda prefill: (gains[prefill], -abs(prefill - current.prefill)))
    gain = gains[best] / max(1e-9, gains[current.prefill]) - 1
    if now < 1 and gain < SURE_GAIN:
        if gain < OVERLOADED_GAIN:
            return current.prefill
        more, before = best - current.prefill, multiple(arriving, current.prefill, current.decode, slo)
        moved = traffic_after(arriving, caches, current, more)
        gain = multiple(moved, best, current.decode - more, slo) / max(1e-9, before) - 1
    return best if gain >= GAIN else current.prefill


def _gains(
    arriving: Traffic,
    caches: Caches | None,
    current: Split,
    prefills: Iterable[int],
    error: float,
    slo: SLOConfig,
) -> dict[int, float]:
    """The headroom of each split of `prefills` over that of the current split, by number of prefill workers.

    The least of three ratios: with prompts as measured, and shorter and longer by the relative `error`. Both splits of
    a ratio have the same prompts, so the error of the ratio is smaller than that of either headroom.
    """
    prompt_factors = 1.0, 1 / (1 + error), 1 + error
    headroom_now = [
        max(1e-9, headroom(scale_prefill_times(arriving, factor), current.prefill, current.decode, slo))
        for factor in prompt_factors
    ]
    gains = {}
    for prefill in prefills:
        more = prefill - current.prefill
        moved = traffic_after(arriving, caches, current, more)
        gains[prefill] = min(
            headroom(scale_prefill_times(moved, factor), prefill, current.decode - more, slo) / now
            for factor, now in zip(prompt_factors, headroom_now, strict=True)
        )
    return gains


def _decode_overloaded(window: Sequence[LoadSample], current: Split) -> bool:
    """Whether decode workers had more sequences than their memory can hold throughout the window, by more than chance:
    the number is about Poisson. Those are preempted and computed again. What lacks a place in a batch only waits."""
    return all(
        sample.sequences - Z_95 * math.sqrt(sample.sequences) > sample.memory_sequences * current.decode
        for sample in window
    )


def _relative_error(window: Sequence[LoadSample], arriving: Traffic) -> float:
    """The relative standard error of the window's prefill work (`prompt_error`). It counts for less if requests stay on
    a decode worker for less than a cool-down: a wrong change is then soon undone."""
    return prompt_error(window) * min(1.0, residence_s(window, arriving) / COOL_DOWN_S)
