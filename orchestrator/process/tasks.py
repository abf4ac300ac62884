"""What is waited for: tasks together, and what becomes of those that are not needed any more; calls that block, made in
threads of their own, of which one that does not answer holds up only who waits for it; and the next look of a loop.

Whoever waits for a call has a deadline, and says what becomes of an answer that is late. Loops of one process that look
every so often wake together, and what they ask of Redis leaves together: to wake costs an idle process more than to
look.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# A loop that meets an error again and again tells of it once in this time, and in it of at most so many different ones.
SAID_FOR_S, MOST_SAID = 60.0, 8
_NOW_S = 0.002  # a tick that is nearer is this one, woken early: uvloop rounds to milliseconds


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


async def in_thread(call: Callable[[], T], unwanted: Callable[[T], object] = lambda result: None) -> T:
    """What the call returns or raises. One that nobody waits for any more goes on, and `unwanted` gets its result. The
    threads of the loop's own pool are few, the whole process shares them, and its end waits for each."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    said: Future[T] = Future()

    def settle() -> None:
        if (error := said.exception()) is None and answer.done():  # cancelled
            unwanted(said.result())
        elif error is None:
            answer.set_result(said.result())
        elif not answer.done():
            answer.set_exception(error)

    def run() -> None:
        try:
            said.set_result(call())
        except BaseException as error:
            said.set_exception(error)
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop has ended
            if said.exception() is None:
                unwanted(said.result())

    threading.Thread(target=run, name="pd-call", daemon=True).start()
    return await answer


def in_background(call: Callable[[], Any]) -> None:
    """Make a call whose answer nobody needs."""

    def run() -> None:
        with contextlib.suppress(Exception):  # the cluster has gone, or what the call is about
            call()

    threading.Thread(target=run, name="pd-call", daemon=True).start()


class Turns:
    """Those of a loop that must go on whatever one of them meets: a defect, or a system without a free descriptor."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log, self._what = log, what
        self._said: dict[str, float] = {}  # errors that were logged within the last minute, and when

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """What is raised in it is logged, but the same no more than once a minute."""
        try:
            yield
        except Exception as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """The same, for what is too short to be a turn. Call it in the handling of the exception."""
        said, now = repr(error), time.monotonic()
        self._said = {known: at for known, at in self._said.items() if now - at < SAID_FOR_S}
        if said not in self._said and len(self._said) < MOST_SAID:
            self._said[said] = now
            self._log.exception("%s: failed, and is tried again", self._what)


class Asked(Generic[T]):
    """A question that is asked again and again, and never twice at once. An answer that is late is dropped."""

    def __init__(self, call: Callable[[], T], within_s: float) -> None:
        self._call, self._within_s = call, within_s
        self._asking: asyncio.Task[T] | None = None

    async def answer(self) -> T:
        """Raises TimeoutError, and what the call raises."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(in_thread(self._call))
            self._asking.add_done_callback(lambda late: late.cancelled() or late.exception())
        done, _ = await asyncio.wait({self._asking}, timeout=self._within_s)
        if not done:
            raise TimeoutError(f"no answer within {self._within_s:g} s")
        return self._asking.result()


@functools.cache
def _offset_s(pid: int) -> float:
    """Other processes tick at other times: what a thousand of them ask of Redis must not come at once. Those of
    containers may have the same number, and forked ones the same state of `random`."""
    return int.from_bytes(os.urandom(4)) / 1e6


def left_s(interval_s: float) -> float:
    """Seconds to this process's next tick of this interval. Ticks of a multiple of it are ticks of it."""
    left = interval_s - (time.monotonic() - _offset_s(os.getpid())) % interval_s
    return left if left > _NOW_S else left + interval_s


def rest_s(began: float, least_s: float, most_s: float) -> float:
    """How long to rest after work that began then (monotonic), between these bounds: four times as long as it took, so
    that it takes a fifth of the time at most."""
    return min(max(least_s, 4 * (time.monotonic() - began)), most_s)


def backoff_s(failures: int, first_s: float, most_s: float) -> float:
    """The pause after so many failures in a row: about `first_s`, then twice as long each time, about `most_s` at last.
    Half more or less by chance, not shared by forked processes: thousands that lost a server do not return together."""
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


async def set_whenever(event: asyncio.Event, told: AsyncGenerator[object, None]) -> None:
    """Set the event each time that something is told. Runs until cancelled, or until no more is."""
    async with contextlib.aclosing(told):
        async for _ in told:
            event.set()


async def ticks(interval_s: float) -> AsyncGenerator[float, None]:
    """Each `interval_s`, without end: how late this tick is, seconds. For that long this process was stopped, starved,
    or busy with one thing, and heard nobody. What is between two ticks is not waited for: do little there."""
    while True:
        due = time.monotonic() + (left := left_s(interval_s))
        await asyncio.sleep(left)
        yield max(0.0, time.monotonic() - due)
