"""A clock for whoever judges others by their silence: it says for how long the judge itself did not look."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator


async def ticks(interval_s: float) -> AsyncGenerator[float, None]:
    """Each `interval_s`, without end: how late this tick is, seconds.

    For that long this process was stopped, starved, or busy with one thing, and heard nobody. What is between two
    ticks is not waited for: do little there.
    """
    while True:
        due = time.monotonic() + interval_s
        await asyncio.sleep(interval_s)
        yield max(0.0, time.monotonic() - due)
