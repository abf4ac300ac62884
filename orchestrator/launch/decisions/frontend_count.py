"""How many frontends a machine should have, by their CPU time and requests (`frontend.replicas: auto`). Pure.

A frontend is one event loop: near a whole core of work its requests wait for each other. With hysteresis: frontends are
added after seconds of overload, and one is removed after a minute in which the others would have had ample room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

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
    """The new number of frontends, within the limits, or None for no change. All `samples`, oldest first, are of the
    present number."""
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
