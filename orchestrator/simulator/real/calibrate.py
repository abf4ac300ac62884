"""A simulator's profile from measurements on a real server.

`measure_profile` times prompts by length, and tokens by batch size and by context, on a server with *one* worker that
prefills and decodes (`configs/aggregated-cpu.yaml` with one replica). `fit_profile` computes the coefficients. Memory
and link are not measured: they are those of `base`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from orchestrator.simulator.profile import Profile
from orchestrator.simulator.real.client import Target
from orchestrator.simulator.real.prompts import Prompts

DECODE_TOKENS = 48
SHORT_PROMPT = 32
BATCHES, REPEATS = (1, 2, 4, 8), 3
MEASURE_S = 1.0  # at least, for each figure: a quick engine's first steps are slow


class Measured(msgspec.Struct, frozen=True):
    """`ttft`: (prompt tokens, TTFT in s). `batches`: (sequences at once, s per token). `contexts`: (context tokens, s
    per token)."""

    ttft: list[tuple[int, float]]
    batches: list[tuple[int, float]]
    contexts: list[tuple[int, float]]


async def measure_profile(target: Target, lengths: Sequence[int], say: Callable[[str], None]) -> Measured:
    """Measure a server. Every figure is a median, and every prompt is new, so that none is cached.
    Raises MeasureError."""
    seed, prompts = 0, Prompts()

    def fresh(tokens: int) -> list[int]:
        nonlocal seed
        seed += 1
        return prompts.make(tokens, own=seed)

    async def ttft(length: int) -> list[float]:
        return [(await target.complete(fresh(length), 1)).ttft_s]

    async def gaps(batch: int, length: int) -> list[float]:
        asked = [fresh(length) for _ in range(batch)]
        timings = await asyncio.gather(*(target.complete(prompt, DECODE_TOKENS) for prompt in asked))
        # Without the first quarter of the gaps, which contains the prefills of the others.
        return [gap for timing in timings for gap in timing.gaps_s[len(timing.gaps_s) // 4 :]]

    await _median(partial(gaps, 1, SHORT_PROMPT))  # lets the server compile, allocate and connect
    by_length = []
    for length in lengths:
        by_length.append((length, await _median(partial(ttft, length), REPEATS)))
        say(f"prompt of {length} tokens: TTFT {by_length[-1][1] * 1e3:.1f} ms")
    by_batch = []
    for batch in BATCHES:
        by_batch.append((batch, await _median(partial(gaps, batch, SHORT_PROMPT))))
        say(f"{batch} sequences at once: {by_batch[-1][1] * 1e3:.1f} ms per token")
    contexts = []
    for length in (SHORT_PROMPT, max(lengths)):
        contexts.append((length + DECODE_TOKENS // 2, await _median(partial(gaps, 1, length))))
        say(f"context of {contexts[-1][0]} tokens: {contexts[-1][1] * 1e3:.1f} ms per token")
    return Measured(by_length, by_batch, contexts)


async def _median(measure: Callable[[], Awaitable[list[float]]], at_least: int = 1) -> float:
    """The median of what so many measurements find, and as many more as begin within MEASURE_S."""
    found, until = [], time.monotonic() + MEASURE_S
    while at_least > 0 or time.monotonic() < until:
        found += await measure()
        at_least -= 1
    return statistics.median(found)


def fit_profile(measured: Measured, base: Profile, name: str, origin: str) -> Profile:
    """A profile by least squares of relative errors. No coefficient is negative. `base` has what was not measured."""
    fixed, per_token, curve = _quadratic(measured.ttft)
    step, per_sequence = _line(measured.batches)
    (near, near_s), (far, far_s) = measured.contexts[0], measured.contexts[-1]
    per_context = max(0.0, (far_s - near_s) / (far - near)) if far > near else 0.0
    return msgspec.structs.replace(
        base,
        name=name,
        origin=origin,
        step_s=max(1e-6, step - per_context * SHORT_PROMPT),
        prefill_s_per_token=max(1e-9, per_token),
        attention_s=2 * curve,  # a prompt of n tokens costs n * (n / 2) of it
        decode_s_per_seq=per_sequence,
        kv_s_per_token=per_context,
        router_s=max(0.0, fixed - step),
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope, neither negative."""
    intercept, slope = _solve([((1.0, x), y) for x, y in points])
    if slope < 0:
        return statistics.median(y for _, y in points), 0.0
    return (intercept, slope) if intercept >= 0 else (0.0, statistics.median(y / x for x, y in points))


def _quadratic(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    if len(points) >= 3:
        fixed, per_token, curve = _solve([((1.0, x, x * x), y) for x, y in points])
        if fixed >= 0 and per_token > 0 and curve >= 0:
            return fixed, per_token, curve
    return (*_line(points), 0.0)


def _solve(rows: list[tuple[tuple[float, ...], float]]) -> list[float]:
    """The coefficients of least squares of relative errors, by the normal equations; all 0 if these are singular."""
    size = len(rows[0][0])
    left = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    scale = [max(abs(row[i]) for row, _ in rows) or 1.0 for i in range(size)]
    for row, value in rows:
        scaled = [x / s / max(value, 1e-9) for x, s in zip(row, scale, strict=True)]
        for i in range(size):
            right[i] += scaled[i]
            for j in range(size):
                left[i][j] += scaled[i] * scaled[j]
    for i in range(size):  # Gauss-Jordan with pivoting
        pivot = max(range(i, size), key=lambda r: abs(left[r][i]))
        left[i], left[pivot], right[i], right[pivot] = left[pivot], left[i], right[pivot], right[i]
        factor = left[i][i]
        if abs(factor) < 1e-12:
            return [0.0] * size
        left[i] = [x / factor for x in left[i]]
        right[i] /= factor
        for r in range(size):
            if r != i:
                times = left[r][i]
                left[r] = [x - times * y for x, y in zip(left[r], left[i], strict=True)]
                right[r] -= times * right[i]
    return [x / s for x, s in zip(right, scale, strict=True)]
