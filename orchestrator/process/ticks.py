"""When loops look that look every so often, or once they are told. Those of one process wake together, and what they
ask of Redis leaves together: to wake costs an idle process more than to look."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import time
from collections.abc import AsyncGenerator

_NOW_S = 0.002  # a tick that is nearer is this one, woken early: uvloop rounds to milliseconds


@functools.cache
def _offset_s(pid: int) -> float:
    """Other processes tick at other times: what a thousand of them ask of Redis must not come at once. Those of
    containers may have the same number, and forked ones the same state of `random`."""
    return int.from_bytes(os.urandom(4)) / 1e6


def left_s(interval_s: float) -> float:
    """Seconds to this process's next tick of this interval. Ticks of a multiple of it are ticks of it."""
    left = interval_s - (time.monotonic() - _offset_s(os.getpid())) % interval_s
    return left if left > _NOW_S else left + interval_s


def backoff_s(failures: int, first_s: float, most_s: float) -> float:
    """The pause after so many failures in a row: about `first_s`, then twice as long each time, about `most_s` at last.
    Half more or less by chance, which forked processes share no state of: thousands that have lost a server at one
    moment do not come back to it at one moment."""
    chance: float = random.SystemRandom().uniform(0.5, 1.5)
    return float(min(most_s, first_s * 2.0 ** min(failures - 1, 30)) * chance)


async def until_told(event: asyncio.Event, within_s: float) -> bool:
    """Wait until the event is set, at most so long, and clear it. Whether it was set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()
    was_set = event.is_set()
    event.clear()
    return was_set


async def ticks(interval_s: float) -> AsyncGenerator[float, None]:
    """Each `interval_s`, without end: how late this tick is, seconds. For that long this process was stopped, starved,
    or busy with one thing, and heard nobody. What is between two ticks is not waited for: do little there."""
    while True:
        due = time.monotonic() + (left := left_s(interval_s))
        await asyncio.sleep(left)
        yield max(0.0, time.monotonic() - due)
