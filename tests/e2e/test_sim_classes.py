"""Requests that can wait, before others that cannot (`slo.classes`), in a live 1P1D of simulated engines."""

import asyncio

import httpx
import pytest
from support_fleet import running_fleet, token_prompt
from support_wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

FLEET = (
    "workers.prefill.replicas=1",
    "workers.decode.replicas=1",
    "workers.engine_args.max_num_batched_tokens=8192",
    "routing.remote_prefill_min_tokens=1",
    "sim.prefill_us_per_token=1000",
    "slo.ttft_s=0.5",
    "slo.classes={'batch': {'ttft_s': 60.0, 'tpot_s': 60.0}}",
)
BATCH, LONG = 12, 1000  # prompts, and their tokens: a second each


@pytest.fixture
def fleet():
    with running_fleet("sim-2p2d.yaml", *FLEET) as running:
        yield running


async def test_a_short_prompt_does_not_wait_for_the_batch_before_it(fleet):
    """Two engine batches have room for all of the batch: what is claimed goes before everything that comes later."""
    ended = 0

    async def batch(client: httpx.AsyncClient, number: int) -> bool:
        nonlocal ended
        answer = await fleet.ask(client, token_prompt(LONG, seed=number), 1)
        ended += 1
        return answer.ok

    of_batch = httpx.AsyncClient(base_url=fleet.url, timeout=120, headers={"x-slo-class": "batch"})
    async with httpx.AsyncClient(base_url=fleet.url, timeout=120) as client, of_batch:
        asked = [asyncio.create_task(batch(of_batch, number)) for number in range(BATCH)]
        await until(lambda: ended)
        before = ended
        answer = await fleet.ask(client, token_prompt(50, seed=BATCH), 1)
        assert answer.ok
        assert ended - before <= 5, "the one that is computed, the next one, and time for this one to come"
        assert all(await asyncio.gather(*asked))
