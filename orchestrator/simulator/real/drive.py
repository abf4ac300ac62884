"""Makes prompts, and sends a load: each request at its own time (open loop), or by users who wait (closed loop)."""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from orchestrator.simulator.real.client import MeasureError, Target, Timing
from orchestrator.simulator.trace import Arrival, Load

_FIRST_ID, _VOCABULARY = 100, 10_000  # lower ids may be special tokens
_RING = 1 << 16  # length of the ring of random ids that prompts are cut from
_MARK_IDS = 5  # ids at the start of a piece that differ from those of every other piece


class Sent(msgspec.Struct, frozen=True):
    """One request and its outcome. `at_s`: seconds from the start of the run."""

    at_s: float
    timing: Timing | None
    error: str = ""


class Run(msgspec.Struct, frozen=True):
    """One run of a load. `client_cpu_s` is the CPU time of this process meanwhile; `late_s` is the greatest delay with
    which it sent a request."""

    url: str
    load: str
    sent: list[Sent]
    span_s: float
    client_cpu_s: float
    late_s: float = 0.0
    rate: float | None = None  # of the load, requests per second; None in a closed loop
    users: int | None = None  # of a closed loop


Done = Callable[[Sent], None]


class PromptSource(Protocol):
    def make(self, tokens: int, keys: tuple[int, ...] = (), unit_tokens: int = 0, own: int = 0) -> list[int] | str:
        """A prompt of `tokens` tokens, as ids or as text; the other arguments are those of `Prompts.make`."""


class Prompts:
    """Makes prompts of token ids below 10,000. Equal seeds make equal prompts, different seeds different ones."""

    def __init__(self, seed: int = 0) -> None:
        self._span = _VOCABULARY - _FIRST_ID
        ring = random.Random(seed).choices(range(_FIRST_ID, _VOCABULARY), k=_RING)
        self._ring = ring + ring
        self._seed = seed

    def make(self, tokens: int, keys: tuple[int, ...] = (), unit_tokens: int = 0, own: int = 0) -> list[int]:
        """A prompt of `tokens` ids: a unit of `unit_tokens` for each key, then a rest. Equal keys give equal units, and
        equal numbers `own` give equal rests."""
        ids: list[int] = []
        for key in keys:
            ids += self._piece(unit_tokens, 2 * key)
        return ids + self._piece(tokens - len(ids), 2 * own + 1)

    def _piece(self, tokens: int, number: int) -> list[int]:
        """A piece of a prompt: the digits of `number` as ids, then a cut of the ring whose start depends on it."""
        number += self._seed << 40
        digits = []
        left = number
        for _ in range(min(tokens, _MARK_IDS)):
            left, digit = divmod(left, self._span)
            digits.append(_FIRST_ID + digit)
        at, ids = number * 7919 % _RING, digits
        while len(ids) < tokens:
            ids = ids + self._ring[at : at + min(_RING, tokens - len(ids))]
        return ids


async def open_loop(target: Target, load: Load, prompts: PromptSource, done: Done = lambda sent: None) -> Run:
    """Send each request at its time in the load. Its user waits from that time on, even if this process sends it late:
    otherwise a client that falls behind would leave out the longest waits."""
    clock = _Clock()
    late_s = 0.0

    async def one(number: int, arrival: Arrival) -> Sent:
        nonlocal late_s
        prompt = prompts.make(arrival.prompt_tokens, arrival.keys, load.unit_tokens, number)
        late_s = max(late_s, clock.now - arrival.at)
        return await _send(target, prompt, arrival.output_tokens, clock, done, arrival.at)

    tasks = []
    for number, arrival in enumerate(load.arrivals):
        # Sleep even when late, so that answers are read.
        await asyncio.sleep(max(0.0, arrival.at - clock.now))
        tasks.append(asyncio.create_task(one(number, arrival)))
    sent = await asyncio.gather(*tasks)
    return Run(target.url, load.name, list(sent), clock.now, clock.cpu_s, late_s, rate=load.rate)


async def closed_loop(
    target: Target, load: Load, users: int, prompts: PromptSource, done: Done = lambda sent: None
) -> Run:
    """Each user sends the load's next request when its last one has ended. The load's times are ignored."""
    clock = _Clock()
    waiting = enumerate(load.arrivals)
    sent: list[Sent] = []

    async def user() -> None:
        for number, arrival in waiting:
            prompt = prompts.make(arrival.prompt_tokens, arrival.keys, load.unit_tokens, number)
            sent.append(await _send(target, prompt, arrival.output_tokens, clock, done, clock.now))

    await asyncio.gather(*(user() for _ in range(users)))
    return Run(target.url, load.name, sent, clock.now, clock.cpu_s, users=users)


async def _send(
    target: Target, prompt: list[int] | str, output_tokens: int, clock: _Clock, done: Done, at_s: float
) -> Sent:
    timing, error = None, ""
    try:
        timing = await target.complete(prompt, output_tokens, clock.began + at_s)
    except MeasureError as failed:
        error = str(failed)
    sent = Sent(at_s, timing, error)
    done(sent)
    return sent


class _Clock:
    def __init__(self) -> None:
        self.began, self._cpu = time.perf_counter(), _cpu_s()

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began

    @property
    def cpu_s(self) -> float:
        return _cpu_s() - self._cpu


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
