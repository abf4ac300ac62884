"""Tenants with shares (`limits.shares`) of a live 1P1D of simulated engines: one asks for ten times its own."""

import asyncio
import random
import statistics

import httpx
import pytest
from support_client import Answer
from support_fleet import RunningFleet, running_fleet, token_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TTFT_S = 2.0
ALONE_S, FLOODED_S = 15.0, 30.0
# A prompt of 2,000 tokens takes 0.4 s, so a prefill worker computes 2.5 a second: 0.8 for each of three tenants.
CALM = {"a": 0.4, "b": 0.4}
FLOOD = {"flood": 8.0}
FLEET = (
    "workers.prefill.replicas=1",
    "workers.decode.replicas=1",
    "sim.prefill_us_per_token=200",
    "sim.step_base_ms=20",
)
OBJECTIVES = (f"slo.ttft_s={TTFT_S}", "slo.tpot_s=0.1")


@pytest.fixture
def fleet():
    with running_fleet("sim-2p2d.yaml", *FLEET, *OBJECTIVES, "limits.shares={'*': 1}") as running:
        yield running


async def ask_for_a_while(fleet: RunningFleet, tenant: str, requests_per_s: float, seconds: float) -> list[Answer]:
    """Prompts of about 2,000 tokens at random times, whatever becomes of those before."""
    rng, loop = random.Random(f"{tenant} {seconds}"), asyncio.get_running_loop()
    limits, until = httpx.Limits(max_connections=None), loop.time() + seconds
    headers = {"x-tenant": tenant}
    async with httpx.AsyncClient(base_url=fleet.url, timeout=180, limits=limits, headers=headers) as client:
        asked = []
        while loop.time() < until:
            prompt = token_prompt(rng.randint(1500, 2500), seed=rng.randint(0, 10**6))
            asked.append(asyncio.create_task(fleet.ask(client, prompt, rng.randint(20, 60))))
            await asyncio.sleep(rng.expovariate(requests_per_s))
        return await asyncio.gather(*asked)


async def answers(fleet: RunningFleet, rates: dict[str, float], seconds: float) -> dict[str, list[Answer]]:
    found = await asyncio.gather(*(ask_for_a_while(fleet, tenant, rate, seconds) for tenant, rate in rates.items()))
    return dict(zip(rates, found, strict=True))


def ttfts_s(fleet: RunningFleet, of: list[Answer]) -> list[float]:
    ids = {answer.request_id for answer in of}

    def lines() -> list[dict]:
        found = [line for line in fleet.request_lines() if line["id"] in ids]
        return found if len(found) == len(ids) else []

    return [line["ttft_ms"] / 1e3 for line in fleet.until(lines, "every answer has its line")]


async def test_a_tenant_that_floods_delays_nobody_and_is_refused_what_the_others_need(fleet):
    alone = await answers(fleet, CALM, ALONE_S)
    flooded = await answers(fleet, CALM | FLOOD, FLOODED_S)
    for tenant in CALM:
        assert [answer.error for answer in alone[tenant] + flooded[tenant] if not answer.ok] == []
    before = ttfts_s(fleet, [answer for tenant in CALM for answer in alone[tenant]])
    beside = ttfts_s(fleet, [answer for tenant in CALM for answer in flooded[tenant]])
    served = [answer for answer in flooded["flood"] if answer.ok]
    refused = [answer for answer in flooded["flood"] if not answer.ok]
    in_time = sum(ttft_s <= TTFT_S for ttft_s in beside)
    print(f"TTFT P50 {statistics.median(before):.2f} s alone, {statistics.median(beside):.2f} s beside the flood")
    print(f"in time {in_time} of {len(beside)}; the flood: {len(served)} answered, {len(refused)} refused")
    # The flood's own share raises it by about a fifth; without shares it is many times as long.
    assert statistics.median(beside) <= 1.6 * statistics.median(before)
    assert in_time >= len(beside) - 1, "one a pause of the machine may delay"
    assert {(answer.status, answer.retry_after_s > 0) for answer in refused} == {(429, True)}
    assert len(served) >= 0.8 * FLOODED_S * sum(CALM.values()), "the flood has its share, which is that of both others"
