"""A simulator's profile from measurements on a real server.

`measure_profile` times prompts by length, and tokens by batch size and by context, on a server whose workers all
prefill and decode (`configs/aggregated-cpu.yaml`), and keep doing so. `fit_profile` computes the coefficients. Memory
and link are not measured: they are those of `base`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import accumulate

import msgspec

from orchestrator.simulator.engine.profile import Profile
from orchestrator.simulator.real.client import MeasureError, Target
from orchestrator.simulator.real.drive import Prompts

DECODE_TOKENS = 48
SHORT_PROMPT = 32
BATCHES, REPEATS = (1, 2, 4, 8), 3
_GOLDEN = 0.618  # its multiples are spread evenly over a step
# Before each request: an engine that has just answered has all it needs in the caches of its cores, and none of its
# processes sleeps. Users' requests come to one that has done something else, or nothing.
PAUSE_S = 0.1
_IN_ONE_PIECE = f"{DECODE_TOKENS} tokens came in one piece: the server, or a proxy before it, does not stream"
_NEAR_S = 0.002  # tokens of different workers that come within it may be of either
# Workers that slow each other by less count as alone: it is noise, and steps whose length depends on others make a
# simulation slow.
_LEAST_SLOWED = 1.05
MOST_TURNS = 8  # in which so many workers compute and one alone does
MEASURE_S = 1.0  # at least, for each figure: a quick engine's first steps are slow


class Measured(msgspec.Struct, frozen=True):
    """`ttft`: (prompt tokens, TTFT in s). `batches`: (sequences at once on each worker, s per token). `contexts`:
    (context tokens, s per token). `beside`: (TTFT in s, s of the step that computes it) of a short prompt beside a
    running sequence. `crowded`: how many times as long steps take while 2, 3 and so on up to all workers compute."""

    ttft: list[tuple[int, float]]
    batches: list[tuple[int, float]]
    contexts: list[tuple[int, float]]
    beside: tuple[float, float]
    crowded: tuple[float, ...] = ()


async def measure_profile(
    target: Target, lengths: Sequence[int], say: Callable[[str], None], workers: int = 1
) -> Measured:
    """Measure a server of so many workers. Every figure but `crowded` is a median, and every prompt is new, so that
    none is cached. Raises MeasureError."""
    seed, prompts = 0, Prompts()

    def fresh(tokens: int) -> list[int]:
        nonlocal seed
        seed += 1
        return prompts.make(tokens, own=seed)

    async def ttft(length: int) -> list[float]:
        return [(await target.complete(fresh(length), 1)).ttft_s]

    async def gaps_by_sequence(batch: int, length: int) -> list[list[float]]:
        asked = [fresh(length) for _ in range(batch)]
        timings = await asyncio.gather(*(target.complete(prompt, DECODE_TOKENS) for prompt in asked))
        # Without the first quarter of the gaps, which contains the prefills of the others.
        return [timing.gaps_s[len(timing.gaps_s) // 4 :] for timing in timings]

    async def gaps(batch: int, length: int) -> list[float]:
        return [gap_s for of_one in await gaps_by_sequence(batch, length) for gap_s in of_one]

    await _median(partial(gaps, 1, SHORT_PROMPT))  # lets the server compile, allocate and connect
    by_length = []
    for length in lengths:
        by_length.append((length, await _median(partial(ttft, length), REPEATS)))
        say(f"prompt of {length} tokens: TTFT {by_length[-1][1] * 1e3:.1f} ms")
    contexts = []
    for length in (SHORT_PROMPT, max(lengths)):
        contexts.append((length + DECODE_TOKENS // 2, await _median(partial(gaps, 1, length))))
        say(f"context of {contexts[-1][0]} tokens: {contexts[-1][1] * 1e3:.1f} ms per token")
    by_batch = []
    for batch in BATCHES:  # the router gives each worker as many
        by_batch.append((batch, await _median(partial(gaps, batch * workers, SHORT_PROMPT))))
        say(f"{batch} sequences at once on each worker: {by_batch[-1][1] * 1e3:.1f} ms per token")

    async def slowed(computing: int) -> list[float]:
        # In turns: a shared machine changes within seconds by more than neighbours do.
        alone_s = statistics.median(await gaps(1, SHORT_PROMPT))
        together = await gaps_by_sequence(computing, SHORT_PROMPT)
        return [statistics.median(of_one) / max(1e-6, alone_s) for of_one in together if of_one]

    crowded: list[float] = []
    for computing in range(2, workers + 1):  # the router gives each of so many workers one
        # The mean, of other workers each time: two on one core take twice as long, and two on two cores do not.
        turns = max(REPEATS, min(MOST_TURNS, 2 * workers // (computing - 1)))
        crowded.append(statistics.fmean(await _found(partial(slowed, computing), turns)))
        say(f"while {computing} workers compute: {crowded[-1]:.2f} times as long")
    steps_s: list[float] = []

    async def beside() -> list[float]:
        before_s = by_length[0][1] + (DECODE_TOKENS // 4 + seed * _GOLDEN % 1.0) * contexts[0][1]
        running = [fresh(SHORT_PROMPT) for _ in range(workers)]
        ttft_s, step_s = await _beside(target, running, fresh(SHORT_PROMPT), before_s)
        steps_s.append(step_s)
        return [ttft_s]

    ttft_s = await _median(beside, 2 * REPEATS)
    step_s = statistics.median(steps_s)
    told = f"TTFT {ttft_s * 1e3:.1f} ms, their step {step_s * 1e3:.1f} ms"
    say(f"prompt of {SHORT_PROMPT} tokens beside a running sequence: {told}")
    return Measured(by_length, by_batch, contexts, (ttft_s, step_s), tuple(crowded))


async def _beside(target: Target, running: list[list[int]], prompt: list[int], before_s: float) -> tuple[float, float]:
    """Send `prompt` so many seconds after `running`, one for each worker. Returns its TTFT and the gap of another's
    tokens that it made, in seconds."""

    async def later() -> tuple[float, float]:
        await asyncio.sleep(before_s)
        sent = time.perf_counter()
        return sent, (await target.complete(prompt, 1)).ttft_s

    began = time.perf_counter()
    others = asyncio.gather(*(target.complete(other, DECODE_TOKENS) for other in running))
    timings, (sent, first_s) = await asyncio.gather(others, later())
    ends = [
        (abs(end - sent - first_s), gap_s)
        for timing in timings
        for end, gap_s in zip(
            accumulate(timing.gaps_s, initial=began + timing.ttft_s), (0.0, *timing.gaps_s), strict=True
        )
        if gap_s
    ]
    if not ends:
        raise MeasureError(_IN_ONE_PIECE)
    # One step ends with a token of both. Another worker's may end as near by chance, and is shorter.
    nearest_s = min(ends)[0]
    return first_s, max(gap_s for away_s, gap_s in ends if away_s <= nearest_s + _NEAR_S)


async def _median(measure: Callable[[], Awaitable[list[float]]], at_least: int = 1) -> float:
    """Raises MeasureError."""
    return statistics.median(await _found(measure, at_least))


async def _found(measure: Callable[[], Awaitable[list[float]]], at_least: int) -> list[float]:
    """What so many measurements find, and as many more as begin within MEASURE_S. Raises MeasureError."""
    found, until = [], time.monotonic() + MEASURE_S
    while at_least > 0 or time.monotonic() < until:
        await asyncio.sleep(PAUSE_S)
        found += await measure()
        at_least -= 1
    if not found:
        raise MeasureError(_IN_ONE_PIECE)
    return found


def fit_profile(measured: Measured, base: Profile, name: str, origin: str) -> Profile:
    """A profile by least squares of relative errors. No coefficient is negative. `base` has what was not measured."""
    fixed, per_token, curve = _quadratic(measured.ttft)
    beside = tuple(accumulate((max(1.0, factor) for factor in measured.crowded), max))
    beside = beside if beside and beside[-1] >= _LEAST_SLOWED else ()
    slowed = beside[-1] if beside else 1.0  # what follows was measured while all workers computed
    step, per_sequence = _line([(batch, seconds / slowed) for batch, seconds in measured.batches])
    (near, near_s), (far, far_s) = measured.contexts[0], measured.contexts[-1]
    per_context = max(0.0, (far_s - near_s) / (far - near)) if far > near else 0.0
    loaded_s, mixed_s = (seconds / slowed for seconds in measured.beside)
    alone_s = max(1e-6, step + per_sequence)
    prompt_s = max(0.0, mixed_s - alone_s - SHORT_PROMPT * per_token)
    # A prompt arrives in the middle of a step, on average.
    waited = (loaded_s - fixed - SHORT_PROMPT * per_token) / alone_s - 0.5
    return msgspec.structs.replace(
        base,
        name=name,
        origin=origin,
        step_s=max(1e-6, step - per_context * SHORT_PROMPT),
        prefill_s_per_token=max(1e-9, per_token),
        attention_s=2 * curve,  # a prompt of n tokens costs n * (n / 2) of it
        prompt_s=prompt_s,
        steps_ahead=min(2, max(0, round(waited))),
        slowed_beside=beside,
        decode_s_per_seq=per_sequence,
        kv_s_per_token=per_context,
        router_s=max(0.0, fixed - step - prompt_s),
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
