"""How many workers and frontends there should be, by what their requests met and their processes used.

`resized` says whether more workers are needed, or fewer do, and `FleetSize` keeps its samples; `policy.ratio` splits
the total between the roles. `Idleness` tells when all end because nobody asks for the model (`idle_after_s`).
`frontends_wanted` is for `frontend.replicas: auto`: a frontend is one event loop, and near a whole core of work its
requests wait for each other. All have hysteresis: they grow soon, and shrink when much less had long been enough.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from orchestrator.config.settings import ScaleConfig
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.types import DesiredRatio, Offered, Role, WorkerState

_LEAST_REQUESTS = 20  # fewer give no useful share of requests on time
# A size at which too many were late is not gone back to for this many times `shrink_after_s`.
_REMEMBERED_WINDOWS = 6
_TELL_ANEW_S = 2.0  # after Redis was away; frontends tell it what they counted every second
_STEP_SHARE = 8  # at most an eighth of the fleet comes at once, and at least one worker


# When a period ended, monotonic, and what was counted in it, at one size and with as many workers ready throughout.
Sample = tuple[float, Offered]


def resized(
    samples: Sequence[Sample], desired: DesiredRatio, scale: ScaleConfig, late_at: Mapping[int, float], now: float
) -> DesiredRatio | None:
    """Another size, or None. `samples` are of the present size; `late_at`: when another size last had too many late.

    It grows by what the last `scale.grow_after_s` show, on the side whose objective is missed more often; it shrinks
    by one after `scale.shrink_after_s` in which far more were on time than `scale.attainment` asks for, unless it has
    been found too small at that size (hysteresis: a fleet at its limit must not go up and down).
    """
    total = desired.prefill + desired.decode
    recent = [sample for sample in samples if sample[0] > now - scale.grow_after_s]
    if _covered(samples, scale.grow_after_s, now) and _ended(recent) >= _LEAST_REQUESTS:
        if _attained(recent) < scale.attainment and scale.max_workers is not None and total < scale.max_workers:
            step = min(max(1, total // _STEP_SHARE), scale.max_workers - total)
            first = sum(counted.late_first for _, counted in recent)
            others = sum(counted.late_tokens for _, counted in recent)
            prefill = desired.prefill + (step if desired.prefill and first >= others else 0)
            why = f"{first} first tokens and {others} answers were late, of {_ended(recent)} requests"
            return _resize(prefill, total + step - prefill, f"{why} in {scale.grow_after_s:g} s")
    far_above = (1 + scale.attainment) / 2
    of_prefill = desired.prefill > 1 and (desired.prefill >= desired.decode or desired.decode == 1)
    able = of_prefill or desired.decode > 1
    may_shrink = able and scale.min_workers is not None and total > scale.min_workers
    remembered = late_at.get(total - 1, -float("inf")) > now - _REMEMBERED_WINDOWS * scale.shrink_after_s
    if not may_shrink or remembered or not _covered(samples, scale.shrink_after_s, now):
        return None
    long = [sample for sample in samples if sample[0] > now - scale.shrink_after_s]
    if _attained(long) < far_above or (_ended(recent) and _attained(recent) < far_above):
        return None
    prefill = desired.prefill - of_prefill
    why = f"{_attained(long):.1%} of {_ended(long)} requests were on time in {scale.shrink_after_s:g} s"
    return _resize(prefill, total - 1 - prefill, why)


def _resize(prefill: int, decode: int, why: str) -> DesiredRatio:
    return DesiredRatio(prefill, decode, "objectives", why=why)


def _covered(samples: Sequence[Sample], window_s: float, now: float) -> bool:
    return bool(samples) and samples[0][0] <= now - window_s


def _ended(samples: Sequence[Sample]) -> int:
    return sum(counted.ended for _, counted in samples)


def _attained(samples: Sequence[Sample]) -> float:
    """The share that was on time; 1 while nothing ended."""
    return 1 - sum(counted.late for _, counted in samples) / _ended(samples) if _ended(samples) else 1.0


class FleetSize:
    """Takes every reading of the registry, says when the size should change."""

    def __init__(self, scale: ScaleConfig) -> None:
        self.scale = scale
        self._samples: deque[Sample] = deque()
        self._counted: dict[str, Offered] = {}
        self._size: tuple[int, int, float, int] | None = None
        self._late_at: dict[int, float] = {}
        self._told_at = 0.0  # when all frontends have told what they counted without Redis

    @property
    def is_on(self) -> bool:
        return self.scale.min_workers is not None or self.scale.max_workers is not None

    def observe(self, snapshot: Snapshot) -> DesiredRatio | None:
        """`snapshot.read_at` is now. While workers are missing, which may be for ever, it does not grow."""
        now, desired = snapshot.read_at, snapshot.desired
        counts = {name: frontend.offered for name, frontend in snapshot.frontends.items()}
        if snapshot.was_away:
            self._told_at = now + _TELL_ANEW_S
        period, before = Offered(), self._counted if now > self._told_at else {}  # without Redis no size is to blame
        for name, count in counts.items():
            period += count - before.get(name, count)  # what a frontend counted before it was seen is not of now
        self._counted = counts
        ready = sum(info.state is WorkerState.READY for info in snapshot.units.values())
        if desired is None:
            self._samples.clear()
            return None
        size = (desired.prefill, desired.decode, desired.set_at, ready)
        if size != self._size:
            self._samples.clear()
            self._size = size
        self._samples.append((now, period))
        while self._samples[0][0] < now - 2 * self.scale.shrink_after_s:
            self._samples.popleft()
        missing = ready < desired.prefill + desired.decode
        scale = msgspec.structs.replace(self.scale, max_workers=None) if missing else self.scale
        resize = resized(self._samples, desired, scale, self._late_at, now)
        if resize is not None and resize.prefill + resize.decode > desired.prefill + desired.decode:
            self._late_at[desired.prefill + desired.decode] = now
        return resize


class Idleness:
    def __init__(self) -> None:
        # Monotonic; since then a decode worker has been ready, and no frontend has gone: its requests may go on.
        self._awake_since: float | None = None
        self._frontends: frozenset[str] = frozenset()  # at the last look

    def observe(self, snapshot: Snapshot, desired: DesiredRatio, idle_after_s: float | None) -> bool:
        """Whether its workers are to end: for so long they could have served, and no frontend had a request."""
        ready = any(u.role is Role.DECODE and u.state is WorkerState.READY for u in snapshot.units.values())
        under_way = snapshot.rollout is not None and snapshot.rollout.under_way
        gone, self._frontends = self._frontends - snapshot.frontends.keys(), frozenset(snapshot.frontends)
        if idle_after_s is None or desired.idle or under_way or not ready or gone:
            self._awake_since = None
            return False
        if self._awake_since is None:
            self._awake_since = snapshot.read_at
        if snapshot.read_at - self._awake_since < idle_after_s or not snapshot.frontends:
            return False
        return all(frontend.idle_s >= idle_after_s for frontend in snapshot.frontends.values())


GROW_CPU, AIM_CPU, SHRINK_CPU = 0.75, 0.5, 0.35  # of a core, for each frontend
GROW_REQUESTS, SHRINK_REQUESTS = 512, 192  # in flight, for each frontend
GROW_AFTER_S, SHRINK_AFTER_S = 5.0, 60.0


class FrontendSample(msgspec.Struct, frozen=True):
    """What the frontends of one machine did together at one moment."""

    at: float  # monotonic seconds
    frontends: int
    cpu: float  # cores
    in_flight: int  # requests


def frontends_wanted(samples: Sequence[FrontendSample], least: int, most: int, now: float) -> int | None:
    """Another number of frontends, or None. All `samples`, oldest first, are of the present number."""
    if not samples:
        return None
    last = samples[-1]
    count = last.frontends
    if not least <= count <= most:
        return min(max(count, least), most)
    recent = [sample for sample in samples if sample.at > now - GROW_AFTER_S]
    if count < most and samples[0].at <= now - GROW_AFTER_S and all(_is_overloaded(sample) for sample in recent):
        needed = max(math.ceil(last.cpu / AIM_CPU), math.ceil(last.in_flight / GROW_REQUESTS))
        return min(most, max(count + 1, needed))
    long = [sample for sample in samples if sample.at > now - SHRINK_AFTER_S]
    if count > least and samples[0].at <= now - SHRINK_AFTER_S and all(_is_underloaded(sample) for sample in long):
        return count - 1
    return None


def _is_overloaded(sample: FrontendSample) -> bool:
    return sample.cpu > GROW_CPU * sample.frontends or sample.in_flight > GROW_REQUESTS * sample.frontends


def _is_underloaded(sample: FrontendSample) -> bool:
    fewer = sample.frontends - 1
    return sample.cpu < SHRINK_CPU * fewer and sample.in_flight < SHRINK_REQUESTS * fewer
