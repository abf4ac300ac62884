"""Requests that an engine runs before it serves: for its one-time set-up, and to measure its speed.

vLLM compiles some operations when a request first needs them, and all requests on the engine wait for that. The
policies use the measured speed before the first request. A short and a long prompt, each alone, give the time of a
prefill; the tokens after the short one (`SHORT_TOKENS` of prompt), and those of several sequences together
(`DECODE_TOKENS` each), give the time of a decode step. Afterwards the prefix cache is emptied. No client is served
meanwhile, so where nothing is compiled each prompt is computed once, and requests of all kinds together.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import time
from itertools import count, pairwise
from statistics import median
from typing import Any, Protocol

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from orchestrator.types import EngineSpeed
from workers.engine import EngineStep

log = logging.getLogger("pd.worker")

BUDGET_S = 3.0  # for the whole measurement; a slower engine reports no speed
PROMPT_S = 0.25  # prompts grow by `GROWTH`, at least once, while the next one is expected to take less than this
SHORT_TOKENS, GROWTH = 16, 4
DECODE_TOKENS, STEPS, SEQUENCES = 4, 4, 16  # of a prompt; tokens generated; most sequences at once


WARM_TOKENS, WARM_STEPS = 4, 2
# Compilers make one variant for one row, another for exactly two, and a third for any number.
WARM_SEQUENCES = (1, 2, 3)


class Measured(Protocol):
    """The methods of an engine that are used here."""

    async def give(self, request: EngineCoreRequest) -> None: ...

    async def next_step(self) -> EngineStep: ...

    async def abort(self, keys: list[str]) -> None: ...

    async def call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any: ...


async def warm_up(engine: Measured, vocabulary: int, most_sequences: int, compiles: bool = True) -> None:
    """Run a few short requests, so that the engine does its one-time set-up. `compiles`: it compiles what a request
    first needs. Raises EngineDead."""
    test = _SpeedTest(engine, vocabulary)
    # vLLM compiles log-probabilities, and on a CPU the sampling of requests without a seed. Without a compiler the
    # engine ends when a request asks for them.
    able = not compiles or shutil.which(os.environ.get("CXX", "g++")) is not None
    logprobs, temperatures = (1, (0.0, 1.0)) if able else (None, (0.0,))
    began = time.monotonic()
    alike = [[temperature] * min(n, most_sequences) for n in WARM_SEQUENCES for temperature in temperatures]
    for together in alike if compiles else [temperatures]:
        for temperature in together:
            await test.add(WARM_TOKENS, WARM_STEPS, logprobs, temperature)
        await test.end()
    await engine.call("reset_prefix_cache", [], {})
    log.info("its first steps took %.1f s", time.monotonic() - began)


async def measure_speed(
    engine: Measured,
    vocabulary: int,
    most_tokens: int,
    most_sequences: int,
    compiles: bool = True,
    budget_s: float = BUDGET_S,
) -> EngineSpeed:
    """Measure the speed of an engine that is warmed up. `most_tokens`: of a prompt that one step computes. All times
    are 0 if the measurement takes longer than `budget_s`. Raises EngineDead.
    """
    test = _SpeedTest(engine, vocabulary)
    began = time.monotonic()
    speed = EngineSpeed()
    try:
        async with asyncio.timeout(budget_s):
            fixed_s, per_token_s, alone_s = await _alone(test, most_tokens, 2 if compiles else 1)
            step_s, per_sequence_s = await _together(test, alone_s, min(SEQUENCES, most_sequences), most_tokens)
            speed = EngineSpeed(fixed_s, per_token_s, step_s, per_sequence_s)
    except TimeoutError:
        log.warning("measured nothing of the engine's speed in %.1f s: the first requests will tell", budget_s)
    finally:
        await engine.abort(sorted(test.running))
        await engine.call("reset_prefix_cache", [], {})
    log.info(
        "measured in %.1f s: a prompt takes %.1f ms and %.3g us a token, a step %.1f ms and %.3g us a sequence",
        *(time.monotonic() - began, speed.prefill_s * 1e3, speed.prefill_s_per_token * 1e6),
        *(speed.step_s * 1e3, speed.step_s_per_sequence * 1e6),
    )
    return speed


async def _alone(test: _SpeedTest, most_tokens: int, times: int) -> tuple[float, float, float]:
    """The fixed time of a prompt in seconds, seconds per token, and of a step of one sequence. `times`: of each length;
    the last one counts, since before it something may be compiled for this length."""
    short = long = min(SHORT_TOKENS, max(1, most_tokens // 2))
    for _ in range(times):
        short_s, step_s = await test.times_s(1, short, STEPS)
    long_s = short_s
    while long < most_tokens and (long == short or long_s * GROWTH < PROMPT_S):
        long = min(most_tokens, long * GROWTH)
        for _ in range(times):
            long_s, _ = await test.times_s(1, long, 1)
    if long == short or long_s <= short_s:
        return 0.0, long_s / long, step_s
    slope = (long_s - short_s) / (long - short)
    return max(0.0, short_s - slope * short), slope, step_s


async def _together(test: _SpeedTest, alone_s: float, sequences: int, most_tokens: int) -> tuple[float, float]:
    """Seconds of a step without sequences, and seconds that each sequence adds. `alone_s`: of a step of one."""
    if sequences == 1:
        return alone_s, 0.0
    tokens = max(1, min(DECODE_TOKENS, most_tokens // sequences))
    _, step_s = await test.times_s(sequences, tokens, STEPS)
    each_s = max(0.0, (step_s - alone_s) / (sequences - 1))
    return max(0.0, alone_s - each_s), each_s


class _SpeedTest:
    def __init__(self, engine: Measured, vocabulary: int) -> None:
        self._engine, self._vocabulary = engine, vocabulary
        self._random, self._numbers = random.Random(0), count()
        self.running: set[str] = set()

    async def times_s(self, sequences: int, prompt_tokens: int, steps: int) -> tuple[float, float]:
        """Of so many sequences together, seconds from giving the prompts to the engine to the first tokens, and of a
        step: the median gap between their tokens. 0 for what is not seen."""
        began, first_s = time.monotonic(), 0.0
        for _ in range(sequences):
            await self.add(prompt_tokens, steps)
        ends = []
        while self.running:
            step = await self._engine.next_step()
            if len(step.outputs) == sequences:
                first_s = first_s or time.monotonic() - began
                ends.append(step.timestamp)
            self._note(step)
        gaps = [after - before for before, after in pairwise(ends)]
        return first_s, median(gaps) if gaps else 0.0

    async def end(self) -> None:
        """Wait until nothing runs any more."""
        while self.running:
            self._note(await self._engine.next_step())

    async def add(self, tokens: int, output_tokens: int, logprobs: int | None = None, temperature: float = 0.0) -> None:
        key = f"pd-speed-{next(self._numbers)}"
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=output_tokens,
            ignore_eos=True,
            logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA,
        )
        request = EngineCoreRequest(
            request_id=key,
            prompt_token_ids=self._random.choices(range(self._vocabulary), k=tokens),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.monotonic(),  # as `codec.messages` has it
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.running.add(key)
        await self._engine.give(request)

    def _note(self, step: Any) -> None:
        self.running -= {output.request_id for output in step.outputs if output.finish_reason is not None}
