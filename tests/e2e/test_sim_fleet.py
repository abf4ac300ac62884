"""A fleet of simulated engines under load and faults: real processes, sockets, Redis and vLLM front end."""

import asyncio
import os
import signal

import pytest
from support_client import LONG_STEPS, nobody_fails
from support_fleet import RunningFleet, running_fleet, token_prompt

from orchestrator.policy.placement import MAX_WAITING

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = [token_prompt(20 + 173 * i % 1800, seed=i) for i in range(40)]


@pytest.fixture(scope="module")
def fleet():
    # Without prefix hits, so that prompts asked again are prefilled remotely again.
    sets = ("routing.remote_prefill_min_tokens=100", "workers.engine_args.enable_prefix_caching=false", LONG_STEPS)
    with running_fleet("sim-2p2d.yaml", *sets) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_leaks(request):
    yield
    if "fleet" in request.fixturenames:
        fleet: RunningFleet = request.getfixturevalue("fleet")
        fleet.until(lambda: fleet.shape() == (2, 2), "the fleet is 2P2D again")
        fleet.assert_no_leaks()


async def test_local_and_remote_are_taken_and_explained(fleet):
    assert all(answer.ok for answer in await fleet.ask_all([token_prompt(20, 1)], concurrency=1))
    assert fleet.metric("pd_placements_total", decision="local", reason="short_prompt") >= 1
    remote = fleet.until_remote(1000)
    assert fleet.metric("pd_placements_total", decision="remote", reason=remote["reason"]) >= 1
    assert remote["reason"] == "long_prompt"
    fleet.until(lambda: fleet.metric("pd_kv_transfer_bytes_total") > 0, "a load report tells of the bytes")
    assert remote["prefill_worker"] in {worker["id"] for worker in fleet.workers("prefill")}
    assert {"queued_ms", "claim_ms", "prefill_ms", "exposed_ms", "decode_ms", "ttft_ms"} <= remote.keys()


async def test_killing_every_prefill_worker_moves_the_queue_to_local_at_once(fleet):
    before = fleet.metric("pd_placements_total", reason="no_prefill_worker")
    async with nobody_fails([fleet], PROMPTS, concurrency=16, max_tokens=30):
        await asyncio.sleep(0.5)
        for victim in fleet.workers("prefill"):
            os.kill(victim["pid"], signal.SIGKILL)
        await fleet.soon(lambda: fleet.metric("pd_placements_total", reason="no_prefill_worker") > before, "local")
        await fleet.soon(lambda: fleet.shape() == (2, 2), "the fleet is 2P2D again")
    assert fleet.metric("pd_retries_total", why="claim_timeout") == 0


async def test_plain_streams_go_on_elsewhere_with_the_same_text(fleet):
    """They pass vLLM's server by (`frontend/plain/streaming.py`); streams with token ids, all others here, do not."""
    prompts = PROMPTS[:16]
    truth = await fleet.ask_all(prompts, concurrency=8, max_tokens=100)
    victim = fleet.workers("decode")[0]
    retries = fleet.metric("pd_retries_total", why="decode_worker_lost")
    asking = asyncio.create_task(fleet.ask_all(prompts, 8, 100, return_token_ids=None))
    await fleet.soon(
        lambda: any(w["id"] == victim["id"] and w["running"] for w in fleet.workers("decode")), "the victim decodes"
    )
    os.kill(victim["pid"], signal.SIGKILL)
    answers = await asking
    assert [a.error for a in answers if not a.ok] == []
    assert [a.tokens for a in answers] == [[]] * len(prompts)
    assert [a.text for a in answers] == [a.text for a in truth]
    assert all(a.usage["completion_tokens"] == 100 for a in answers)
    assert fleet.metric("pd_retries_total", why="decode_worker_lost") > retries


async def test_killing_every_decode_worker_fails_nobody(fleet):
    async with nobody_fails([fleet], PROMPTS, concurrency=8, max_tokens=30):
        await asyncio.sleep(0.5)
        for victim in fleet.workers("decode"):
            os.kill(victim["pid"], signal.SIGKILL)
        await asyncio.to_thread(fleet.wait_for_line, r"worker-\d+ becomes a decode worker", 30)
        await fleet.soon(lambda: fleet.shape() == (2, 2), "the fleet is 2P2D again")


async def test_scaling_both_ways_under_load_fails_nobody(fleet):
    async with nobody_fails([fleet], PROMPTS, concurrency=8, max_tokens=60):
        for prefill, decode in ((1, 3), (3, 1), (2, 2)):
            fleet.cli("scale", f"prefill={prefill}", f"decode={decode}")
            await fleet.soon(lambda p=prefill, d=decode: fleet.shape() == (p, d), f"{prefill}P{decode}D")


async def test_restarting_every_worker_under_load_fails_nobody(fleet):
    before = fleet.pids()
    async with nobody_fails([fleet], PROMPTS, concurrency=8, max_tokens=60):
        decode = [worker["id"] for worker in fleet.workers("decode")]
        done = await asyncio.to_thread(fleet.cli, "restart", "--role", "decode")
        assert all(f"{worker}: restarted" in done.stdout for worker in decode), done.stdout
        assert "2 workers restarted" in done.stdout
        await asyncio.to_thread(fleet.cli, "restart", "--role", "prefill", "--max-unavailable", "2")
        await fleet.soon(lambda: fleet.shape() == (2, 2), "2P2D")
    after = fleet.pids()
    assert after.keys() == before.keys() and not set(before.values()) & set(after.values())


async def test_redis_killed_under_load_comes_back_empty_and_fails_nobody(fleet):
    async with nobody_fails([fleet], PROMPTS, concurrency=6, max_tokens=30):
        await asyncio.sleep(0.5)
        before = fleet.metric("pd_placements_total", decision="remote")
        os.kill(fleet.redis_pid(), signal.SIGKILL)
        await fleet.soon(lambda: fleet.metric("pd_placements_total", decision="remote") > before + 20, "remote again")


async def test_bad_requests_get_vllms_4xx_and_disturb_nobody(fleet):
    async with fleet.client() as client:
        body = {"model": fleet.model, "prompt": [5] * 10, "max_tokens": 4}
        cases = [
            ({**body, "model": "no-such-model"}, 404),
            ({**body, "temperature": "hot"}, 400),
            ({**body, "prompt": [5] * 40_000}, 400),
            ({**body, "n": 0}, 400),
        ]
        for case, status in cases:
            response = await client.post("/v1/completions", json=case)
            assert response.status_code == status, (status, response.text)
            assert response.json()["error"]["message"] and response.headers["x-request-id"]
        malformed = await client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        assert malformed.status_code == 400 and "error" in malformed.json()
        given = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
        assert given.status_code == 200 and given.headers["x-request-id"] == "mine-1"


async def test_role_and_drain_under_load_fail_nobody(fleet):
    async with nobody_fails([fleet], PROMPTS, concurrency=8, max_tokens=60):
        mover = fleet.workers("decode")[0]
        fleet.cli("role", mover["id"], "prefill")

        def moved():
            return any(w["id"] == mover["id"] and w["pid"] == mover["pid"] for w in fleet.workers("prefill"))

        await fleet.soon(moved, "the worker changed role in place")
        fleet.cli("role", mover["id"], "decode")
        drained = fleet.workers("prefill")[0]
        fleet.cli("drain", drained["id"])
        await fleet.soon(lambda: drained["pid"] not in {w["pid"] for w in fleet.fleet()["workers"]}, "drained")
        fleet.cli("scale", "prefill=2", "decode=2")
        await fleet.soon(lambda: fleet.shape() == (2, 2), "2P2D")


async def test_redis_stopped_under_load_means_local_until_it_is_back(fleet):
    redis_pid, before = fleet.redis_pid(), fleet.metric("pd_placements_total", reason="queue_unavailable")
    async with nobody_fails([fleet], PROMPTS, concurrency=6, max_tokens=30):
        await asyncio.sleep(0.5)
        os.kill(redis_pid, signal.SIGSTOP)
        try:
            await fleet.soon(lambda: fleet.metric("pd_placements_total", reason="queue_unavailable") > before, "local")
        finally:
            os.kill(redis_pid, signal.SIGCONT)
        remote = fleet.metric("pd_placements_total", decision="remote")
        await fleet.soon(lambda: fleet.metric("pd_placements_total", decision="remote") > remote + 5, "remote again")


async def test_a_full_fleet_answers_429_with_retry_after_and_forgets_nobody():
    with running_fleet(
        "sim-2p2d.yaml",
        "workers.prefill.replicas=0",
        "workers.decode.replicas=1",
        "workers.engine_args.num_gpu_blocks_override=80",
        "workers.engine_args.max_model_len=1024",
    ) as fleet:
        prompts = [token_prompt(900, seed=i) for i in range(MAX_WAITING + 50)]  # one at a time fits into its memory
        answers = await fleet.ask_all(prompts, concurrency=len(prompts), max_tokens=5)
        refused = [answer for answer in answers if answer.status == 429]
        assert refused and any(answer.ok for answer in answers)
        assert all(answer.ok or answer.status == 429 for answer in answers)
        assert all("try again" in answer.error and answer.retry_after_s >= 1 for answer in refused)
        assert fleet.metric("pd_requests_total", outcome="finished") == sum(answer.ok for answer in answers)
        fleet.assert_no_leaks()


async def test_the_launcher_takes_workers_away_when_idle_and_adds_them_while_objectives_are_missed():
    with running_fleet(
        "sim-2p2d.yaml",
        "workers.prefill.replicas=2",
        "workers.decode.replicas=1",
        "scale={min_workers: 2, max_workers: 3, grow_after_s: 2}",
        "slo.ttft_s=0.0001",
        LONG_STEPS,
    ) as fleet:
        fleet.until(lambda: fleet.shape() == (1, 1), "a worker less, since nothing is late")
        fleet.wait_for_line(r"scale: 2P1D -> 1P1D: 100\.0% of 0 requests were on time", 10)
        async with fleet.under_load(PROMPTS, concurrency=8, max_tokens=10) as answers:
            await fleet.soon(lambda: fleet.shape() == (2, 1), "a third worker")
            said = await asyncio.to_thread(fleet.wait_for_line, r"scale: 1P1D -> 2P1D: (\d+) first tokens and", 10)
            assert int(said.group(1)) >= 20
        assert [(a.status, a.error) for a in answers if not a.ok] == []
