"""Prefix hits over a whole fleet of simulated engines: real processes, sockets, Redis and vLLM front end."""

import asyncio
import os
import signal

import pytest
from support_fleet import RunningFleet, running_fleet, token_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


async def line_of(fleet: RunningFleet, prompt):
    (answer,) = await fleet.ask_all([prompt], concurrency=1, max_tokens=4)
    assert answer.ok, answer.error
    return fleet.until(lambda: [x for x in fleet.request_lines() if x["id"] == answer.request_id], "its line")[0]


async def test_a_prompt_asked_again_is_decided_by_what_is_cached():
    with running_fleet("sim-2p2d.yaml", "frontend.replicas=2", "routing.remote_prefill_min_tokens=256") as fleet:
        prompt = token_prompt(1000, 1)
        first = await line_of(fleet, prompt)
        assert (first["decision"], first["reason"]) == ("remote", "long_prompt")
        assert "cached_tokens" not in first
        # Whichever frontend answers: both hear the workers' events.
        for _ in range(6):
            await asyncio.sleep(0.5)
            again = await line_of(fleet, prompt)
            assert (again["decision"], again["reason"]) == ("local", "short_prompt"), again
            assert again["cached_tokens"] >= 900 and again["decode_worker"] == first["decode_worker"]
        assert fleet.metric("pd_prefix_hit_tokens_total", side="local") > 0
        pid = next(w["pid"] for w in fleet.workers("decode") if w["id"] == first["decode_worker"])
        os.kill(pid, signal.SIGKILL)
        fleet.until(lambda: fleet.shape() == (2, 2) and pid not in {w["pid"] for w in fleet.workers("decode")}, "2P2D")
        await asyncio.sleep(1)  # the other frontend has noticed as well
        last = await line_of(fleet, prompt)
        assert (last["decision"], last["reason"]) == ("remote", "long_prompt"), last  # its successor's cache is empty
        fleet.assert_no_leaks()
