"""A model whose workers end when nobody asks, and come back: simulated engines. Real ones: `test_real_models.py`."""

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


# No decode worker stands in for prefill workers that come back a moment later.
REFUSE = ("routing.fallback=refuse", "routing.remote_prefill_min_tokens=100")


@pytest.mark.parametrize(("more", "gaps"), [((), 8), (REFUSE, 2)], ids=["local", "refuse"])
async def test_a_simulated_model_rests_and_wakes_while_another_serves(more: tuple[str, ...], gaps: int) -> None:
    """Requests that come while its workers drain are answered too."""
    sets = ("frontend.replicas=2", "models.small.idle_after_s=2", LONG_STEPS)
    fleet = Models("sim-two-models.yaml", *sets, *more)
    small, large = fleet.of("small"), fleet.of("large")
    said = "idle: the next request brings its workers back"
    try:
        truth = [answer.tokens for answer in await large.ask_all(PROMPTS, concurrency=4)]
        async with large.under_load(PROMPTS, 2, max_tokens=16) as load:
            for _ in range(2):
                await fleet.soon(lambda: fleet.rests("small"), "it rests")
                await fleet.soon(lambda: said in fleet.cli("status").stdout, "the frontend that is asked has heard so")
                assert fleet.http.get("/ready").json()["models"] == {"small": True, "large": True}
                answers = await small.ask_all(PROMPTS, concurrency=8)
                assert no_error(answers) and [answer.tokens for answer in answers] == truth
            for gap in range(gaps):  # at any moment of its end, one is answered
                assert no_error(await small.ask_all(PROMPTS[:1], concurrency=1, max_tokens=1))
                await asyncio.sleep(1.8 + gap / 5)
        assert no_error(load)
        for model in ("small", "large"):
            fleet.at(model).assert_no_leaks()
    finally:
        fleet.end()
