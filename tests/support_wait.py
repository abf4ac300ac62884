"""How tests wait: for a condition, never for a time."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0


async def until(condition: Callable[[], Any], what: str = "a condition", timeout_s: float = DEADLINE_S) -> Any:
    """Call a function, plain or async, until its result is true, and return that. Fails after the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.005)
