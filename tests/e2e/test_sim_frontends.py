"""Two frontends that share a port and the load; with `frontend.replicas: auto`, as many as there is work for."""

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
from support_sim import expected
from support_wait import until

from orchestrator.process.parent import local_pid
from orchestrator.store.client import connect
from orchestrator.store.registry import Registry

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = [token_prompt(20, seed=i) for i in range(40)]
# A frontend is to have fewer requests than of the product's own (`decisions/test_frontend_count.py`), and a quiet
# minute is short.
LIMITS = {"GROW_REQUESTS": 24, "SHRINK_REQUESTS": 12, "SHRINK_AFTER_S": 5.0}
CROWD = 30  # requests in flight: more than one frontend is to have


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    sets = ("frontend.replicas=auto", "frontend.max_replicas=2", "sim.step_base_ms=200", "workers.decode.replicas=3")
    limits = {f"orchestrator.launch.decisions.fleet_size.{name}": value for name, value in LIMITS.items()}
    with running_fleet("sim-2p2d.yaml", *sets, constants=limits) as running:
        yield running


async def line(fleet: RunningFleet, pattern: str) -> None:
    await asyncio.to_thread(fleet.wait_for_line, pattern, 180)


async def test_frontend_count_follows_load(fleet: RunningFleet) -> None:
    async with fleet.under_load(PROMPTS, concurrency=CROWD, max_tokens=60) as answers:
        await line(fleet, "frontends: 1 -> 2")
        await line(fleet, "frontend-1: ready")
    assert len(answers) >= CROWD and [(a.status, a.error) for a in answers if not a.ok] == []
    async with fleet.under_load(PROMPTS, concurrency=4, max_tokens=6) as answers:
        await line(fleet, "frontends: 2 -> 1")
        await line(fleet, r"frontend-\d: ended")
    assert answers and [(a.status, a.error) for a in answers if not a.ok] == []
    fleet.assert_no_leaks()


# ---- two frontends that share a port ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[RunningFleet]:
    with running_fleet("sim-2p2d.yaml", "frontend.replicas=2", "routing.remote_prefill_min_tokens=256") as running:
        yield running


def shown(fleet: RunningFleet, path: str) -> dict[str, Any]:
    """On a connection of its own, which any frontend may take; one that is stopped takes it and does not answer."""
    for _ in range(50):
        with contextlib.suppress(httpx.TimeoutException):
            return dict(httpx.get(f"{fleet.url}{path}", timeout=2).json())
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


async def offered(fleet: RunningFleet) -> list[int]:
    """Generated tokens that each frontend tells of."""
    async with await connect(fleet.redis_url(), 5) as redis:
        frontends = await Registry(redis, fleet.namespace).frontends()
        return [frontend.offered.generated_tokens for frontend in frontends.values()]


@pytest.mark.slow
async def test_hundreds_of_requests_go_through_4p4d_and_two_frontends(pair: RunningFleet) -> None:
    max_tokens = 8
    pair.cli("scale", "prefill=4", "decode=4")
    pair.until(lambda: pair.shape() == (4, 4), "4P4D")
    prompts = [token_prompt(20 + 173 * i % 1800, seed=i) for i in range(40)] * 10
    already, finished = pair.metric("pd_requests_total"), pair.metric("pd_requests_total", outcome="finished")
    # So many connections that the kernel spreads them over both frontends.
    streamed, whole = await asyncio.gather(
        pair.ask_all(prompts[::2], concurrency=32, max_tokens=max_tokens),
        pair.ask_all(prompts[1::2], concurrency=32, max_tokens=max_tokens, stream=False),
    )
    assert [a for a in streamed + whole if not a.ok or a.tokens != expected(a.prompt, max_tokens)] == []
    assert pair.metric("pd_requests_total", outcome="finished") - finished == len(prompts)
    assert pair.metric("pd_requests_total") - already == len(prompts)

    async def are_counted() -> bool:
        counted = await offered(pair)
        made = sum(line["output_tokens"] for line in pair.request_lines())
        return len(counted) == 2 and min(counted) > 0 and sum(counted) == made >= len(prompts) * max_tokens

    await until(are_counted, "both frontends tell how many tokens were generated")
    pair.assert_no_leaks()


async def line_of(fleet: RunningFleet, prompt: list[int]) -> dict[str, Any]:
    (answer,) = await fleet.ask_all([prompt], concurrency=1, max_tokens=4)
    assert answer.ok, answer.error
    lines = fleet.until(lambda: [x for x in fleet.request_lines() if x["id"] == answer.request_id], "its line")
    return dict(lines[0])


async def test_a_prompt_asked_again_is_decided_by_what_is_cached(pair: RunningFleet) -> None:
    prompt = token_prompt(1000, seed=1000)
    first = await line_of(pair, prompt)
    assert (first["decision"], first["reason"]) == ("remote", "long_prompt")
    assert "cached_tokens" not in first
    # Whichever frontend answers: both hear the workers' events.
    for _ in range(6):
        await asyncio.sleep(0.5)
        again = await line_of(pair, prompt)
        assert (again["decision"], again["reason"]) == ("local", "short_prompt"), again
        assert again["cached_tokens"] >= 900 and again["decode_worker"] == first["decode_worker"]
    assert pair.metric("pd_prefix_hit_tokens_total", side="local") > 0
    pid = next(w["pid"] for w in pair.workers("decode") if w["id"] == first["decode_worker"])
    shape = pair.shape()
    os.kill(pid, signal.SIGKILL)
    pair.until(lambda: pair.shape() == shape and pid not in {w["pid"] for w in pair.workers("decode")}, "it is back")
    await asyncio.sleep(1)  # the other frontend has noticed as well
    last = await line_of(pair, prompt)
    assert (last["decision"], last["reason"]) == ("remote", "long_prompt"), last  # its successor's cache is empty
    pair.assert_no_leaks()


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
