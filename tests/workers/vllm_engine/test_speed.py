"""What an engine measures of itself when it starts: the right coefficients, in bounded time, and nothing is left."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_vllm import Driver, frames

from orchestrator.types import EngineSpeed
from workers.engine import EngineStep
from workers.vllm_engine import speed
from workers.vllm_engine.speed import measure_speed, warm_up

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio]

STEP_S, TOKEN_S, SEQUENCE_S = 0.008, 0.00004, 0.00005


class Engine:
    """Computes all prompts that wait in one step, with the times above, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slower: float = 1.0) -> None:
        self.now, self._slower = 100.0, slower
        self.together: list[int] = []  # sequences of each step
        self.sampled: list[tuple[float, int | None]] = []  # temperature and log-probabilities of each request
        self.prompts: list[int] = []  # tokens of each
        self.left: dict[str, int] = {}  # tokens out that are left
        self._uncomputed: dict[str, int] = {}
        self.calls: list[Any] = []
        monkeypatch.setattr(speed, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now))

    async def give(self, request: Any) -> None:
        self._uncomputed[request.request_id] = len(request.prompt_token_ids)
        self.prompts.append(len(request.prompt_token_ids))
        self.left[request.request_id] = request.sampling_params.max_tokens
        self.sampled.append((request.sampling_params.temperature, request.sampling_params.logprobs))
        assert request.sampling_params.seed is None, "a seed's sampling is not what vLLM compiles"

    async def next_step(self) -> EngineStep:
        if not self.left:
            await asyncio.Event().wait()
        self.together.append(len(self.left))
        tokens, self._uncomputed = sum(self._uncomputed.values()), {}
        self.now += self._slower * (STEP_S + tokens * TOKEN_S + len(self.left) * SEQUENCE_S * (tokens == 0))
        self.left = {key: left - 1 for key, left in self.left.items()}
        outputs = [
            SimpleNamespace(request_id=key, finish_reason=None if n else "length") for key, n in self.left.items()
        ]
        self.left = {key: left for key, left in self.left.items() if left}
        return EngineStep(outputs, None, self.now)

    async def abort(self, keys: list[str]) -> None:
        self.calls.append(("abort", keys))
        for key in keys:
            self.left.pop(key, None)

    async def call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self.calls.append((method, args, kwargs))


@pytest.mark.parametrize("compiles", [True, False])
async def test_measurement_finds_prompt_and_step_time(monkeypatch, compiles: bool) -> None:
    engine = Engine(monkeypatch)
    found = await measure_speed(engine, 500, 8192, 256, compiles)
    assert (found.prefill_s, found.prefill_s_per_token) == pytest.approx((STEP_S, TOKEN_S))
    assert (found.step_s, found.step_s_per_sequence) == pytest.approx((STEP_S, SEQUENCE_S))
    assert engine.calls == [("abort", []), ("reset_prefix_cache", [], {})]
    prompts = engine.prompts[: -speed.SEQUENCES]
    again = prompts[1::2] if compiles else prompts
    assert len({*prompts}) == len(again) > 2 and sorted({*prompts}) == again, "each once, or each twice"


async def test_slow_engine_measures_shorter_prompts(monkeypatch) -> None:
    engine = Engine(monkeypatch, slower=40.0)  # a prompt of 8,192 tokens would take 13 s
    found = await measure_speed(engine, 500, 8192, 256)
    assert found.prefill_s_per_token == pytest.approx(40 * TOKEN_S)
    assert engine.now - 100.0 < 15.0


async def test_an_engine_of_one_sequence_and_few_tokens(monkeypatch) -> None:
    found = await measure_speed(Engine(monkeypatch), 500, 40, 1)
    assert found.step_s == pytest.approx(STEP_S + SEQUENCE_S) and found.step_s_per_sequence == 0
    assert found.prefill_s_per_token > 0


async def test_slow_engine_reports_no_speed(monkeypatch) -> None:
    engine = Engine(monkeypatch)

    async def never() -> EngineStep:
        await asyncio.Event().wait()
        raise AssertionError

    engine.next_step = never  # type: ignore[method-assign]
    assert await measure_speed(engine, 500, 8192, 256, budget_s=0.05) == EngineSpeed()
    assert engine.calls[0] == ("abort", ["pd-speed-0"]), "nothing goes on"


@pytest.mark.parametrize(("most", "together"), [(256, [1, 2, 3]), (2, [1, 2, 2])])
async def test_first_steps_are_taken_alone_and_together(monkeypatch, most: int, together: list[int]) -> None:
    """Greedy and sampled, two steps of each: vLLM compiles the sampling of requests without a seed on a CPU."""
    monkeypatch.setattr(speed.shutil, "which", lambda program: f"/usr/bin/{program}")
    engine = Engine(monkeypatch)
    await warm_up(engine, 500, most)
    assert engine.together == [sequences for sequences in together for _ in range(4)] and not engine.left
    assert set(engine.sampled) == {(0.0, 1), (1.0, 1)}
    assert engine.calls == [("reset_prefix_cache", [], {})]


async def test_where_nothing_is_compiled_one_request_of_each_kind_will_do(monkeypatch) -> None:
    monkeypatch.setattr(speed.shutil, "which", lambda program: None)
    engine = Engine(monkeypatch)
    await warm_up(engine, 500, 256, compiles=False)
    assert engine.together == [2] * 2 and engine.sampled == [(0.0, 1), (1.0, 1)]


async def test_where_nothing_is_compiled_few_steps_are_taken(monkeypatch) -> None:
    """Each takes as long as the whole model is read from memory, and the engines of a host take turns at that."""
    engine = Engine(monkeypatch, slower=10.0)
    await warm_up(engine, 500, 256, compiles=False)
    await measure_speed(engine, 500, 8192, 256, compiles=False)
    assert len(engine.together) == speed.WARM_STEPS + 2 * speed.STEPS + len({*engine.prompts} - {4, 16})


async def test_without_a_compiler_nothing_is_asked_that_needs_one(monkeypatch) -> None:
    monkeypatch.setattr(speed.shutil, "which", lambda program: None)
    engine = Engine(monkeypatch)
    await warm_up(engine, 500, 256)
    assert set(engine.sampled) == {(0.0, None)}


async def test_ready_engine_is_warmed_up_and_has_compiled_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = tmp_path / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    engine = await Driver.start(model, warm=True)
    try:
        assert (await engine.engine.load()).step_ms > 0
        await engine.idle()
        assert not engine.prefix_keys and not engine.tokens, "nothing of it stays, and nobody hears of it"
        await engine.decode("first", frames(list(range(3, 103)), 8, logprobs=3))
        assert len(await engine.done("first")) == 8
        assert not list(compiled.rglob("*.*")), "`enforce_eager` is the default on a CPU"
    finally:
        await engine.stop()


async def test_a_real_engine_measures_itself_and_keeps_nothing(model: Path) -> None:
    engine = await Driver.start(model, profile=True)
    try:
        found = engine.info.speed
        assert found.prefill_s_per_token > 0 and found.step_s > 0 and found.prefill_s >= 0
        await engine.idle()
        await engine.decode("after", frames(list(range(3, 103)), 8))
        assert len(await engine.done("after")) == 8
        assert len(engine.prefix_keys) == 3, "what it measured with is not cached"
    finally:
        await engine.stop()
