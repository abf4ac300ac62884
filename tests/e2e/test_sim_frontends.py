"""`frontend.replicas: auto`: another frontend while there is much to do, and one fewer after a quiet minute."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support_fleet import RunningFleet, running_fleet, token_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = [token_prompt(20, seed=i) for i in range(40)]
CROWD = 640  # requests in flight: more than one frontend is to have


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    sets = ("frontend.replicas=auto", "frontend.max_replicas=2", "sim.speed=0.05", "workers.decode.replicas=3")
    with running_fleet("sim-2p2d.yaml", *sets) as running:
        yield running


async def line(fleet: RunningFleet, pattern: str) -> None:
    await asyncio.to_thread(fleet.wait_for_line, pattern, 180)


async def test_frontend_count_follows_load(fleet: RunningFleet) -> None:
    async with fleet.under_load(PROMPTS, concurrency=CROWD, max_tokens=60) as answers:
        await line(fleet, "frontends: 1 -> 2")
        await line(fleet, "frontend-1: ready")
    assert len(answers) >= CROWD and [(a.status, a.error) for a in answers if not a.ok] == []
    async with fleet.under_load(PROMPTS, concurrency=4, max_tokens=60) as answers:
        await line(fleet, "frontends: 2 -> 1")
        await line(fleet, r"frontend-\d: ended")
    assert answers and [(a.status, a.error) for a in answers if not a.ok] == []
    fleet.assert_no_leaks()
