"""Models whose workers end when nobody asks, and come back: simulated engines. Real ones: `test_real_models.py`."""

import asyncio
from typing import Any

import pytest
from support_client import LONG_STEPS
from support_fleet import token_prompt
from support_many_models import Models

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPTS = [token_prompt(20 + 173 * i % 1500, seed=i) for i in range(20)]


def no_error(answers: list[Any]) -> bool:
    wrong = [(a.status, a.error) for a in answers if not a.ok]
    assert wrong == []
    return bool(answers)


SAID = "idle: the next request brings its workers back"
# Of `strict` no decode worker stands in for prefill workers that come back a moment later.
STRICT = "models.strict={model: demo, idle_after_s: 2, routing: {fallback: refuse, remote_prefill_min_tokens: 100}}"
MODELS = ("small", "large", "strict")


async def rests_and_wakes(fleet: Models, name: str, truth: list[list[int]], gaps: int) -> None:
    """Requests that come while its workers drain are answered too."""
    model = fleet.of(name)
    for _ in range(2):
        await fleet.soon(lambda: fleet.rests(name), f"{name} rests")
        await fleet.soon(lambda: SAID in fleet.steer_one(name, "status").stdout, "the one that is asked has heard so")
        assert fleet.http.get("/ready").json()["models"] == dict.fromkeys(MODELS, True)
        answers = await model.ask_all(PROMPTS, concurrency=8)
        assert no_error(answers) and [answer.tokens for answer in answers] == truth
    for gap in range(gaps):  # at any moment of its end, one is answered
        assert no_error(await model.ask_all(PROMPTS[:1], concurrency=1, max_tokens=1))
        await asyncio.sleep(1.8 + gap / 5)


async def test_simulated_models_rest_and_wake_while_another_serves() -> None:
    fleet = Models("sim-two-models.yaml", "frontend.replicas=2", "models.small.idle_after_s=2", STRICT, LONG_STEPS)
    large = fleet.of("large")
    try:
        truth = [answer.tokens for answer in await large.ask_all(PROMPTS, concurrency=4)]
        async with large.under_load(PROMPTS, 2, max_tokens=16) as load:
            await asyncio.gather(rests_and_wakes(fleet, "small", truth, 8), rests_and_wakes(fleet, "strict", truth, 2))
        assert no_error(load)
        for model in MODELS:
            fleet.at(model).assert_no_leaks()
    finally:
        fleet.end()
