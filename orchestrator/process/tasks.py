"""Tasks that are waited for together, and what becomes of those that are not needed any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def cancelled(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel these, those that there are, and wait until they have ended. What they raise is dropped."""
    there = [task for task in tasks if task is not None]
    for task in there:
        task.cancel()
    await asyncio.gather(*there, return_exceptions=True)


@contextlib.asynccontextmanager
async def first_of(
    work: Awaitable[T], *others: Awaitable[Any], within_s: float | None = None
) -> AsyncIterator[asyncio.Future[T]]:
    """The task of `work` once it or one of the others has ended, or the time is over. What still runs at the end of the
    context is cancelled, and has ended then: shield a task that is to go on."""
    tasks = [asyncio.ensure_future(each) for each in (work, *others)]
    try:
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        yield tasks[0]
    finally:
        await cancelled(*tasks)
