"""`frontend.replicas: auto`: another frontend while there is much to do, and one fewer after a quiet minute."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support_fleet import RunningFleet, running_fleet, token_prompt

from orchestrator.process.parent import local_pid
from orchestrator.store.client import connect
from orchestrator.store.registry import Registry

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


# ---- two frontends that share a port: any of them shows both ------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[RunningFleet]:
    with running_fleet("sim-2p2d.yaml", "frontend.replicas=2") as running:
        yield running


def shown(fleet: RunningFleet, path: str) -> dict[str, Any]:
    """On a connection of its own, which any frontend may take; one that is stopped takes it and does not answer."""
    for _ in range(20):
        with contextlib.suppress(httpx.TimeoutException):
            return dict(httpx.get(f"{fleet.url}{path}", timeout=5).json())
    raise AssertionError(f"{path}: no answer")


async def test_any_frontend_shows_the_requests_of_both(pair: RunningFleet) -> None:
    assert all(answer.ok for answer in await pair.ask_all(PROMPTS, concurrency=10, max_tokens=4))
    ids = {line["id"] for line in shown(pair, "/requests?latest=1000")["requests"]}
    assert len(ids) == len(PROMPTS)
    for _ in range(8):
        assert {line["id"] for line in shown(pair, "/requests?latest=1000")["requests"]} == ids
        assert shown(pair, f"/requests/{max(ids)}")["requests"]
    await pair.soon(lambda: len(top(pair)["slowest"]) == 12, "slowest")
    assert (top(pair)["frontends"], top(pair)["silent_frontends"]) == (2, [])


def top(fleet: RunningFleet) -> dict[str, Any]:
    return dict(json.loads(fleet.cli("top", "--json").stdout))


async def test_a_stopped_frontend_is_named_and_holds_nobody_up(pair: RunningFleet) -> None:
    redis = await connect(pair.redis_url(), 5)
    stopped, _ = (await Registry(redis, pair.namespace).frontends()).values()
    await redis.aclose()
    pid = local_pid(stopped.process)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    said = await asyncio.to_thread(shown, pair, "/requests?latest=5")
    assert len(said["requests"]) == 5
    assert said["silent_frontends"] == [stopped.id]
    await pair.soon(lambda: shown(pair, "/requests/nobody")["error"].endswith("is not among the latest"), "it is gone")
