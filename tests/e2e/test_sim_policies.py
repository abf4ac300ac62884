"""Policies at work in a fleet of simulated engines: priorities in the queue, and a ratio that follows the load."""

import asyncio
import functools

import pytest
from support_fleet import running_fleet, token_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BY_LENGTH = "routing.remote_prefill_min_tokens=256"  # else decode workers would take what waits


@pytest.fixture(scope="module")
def refusing():
    """A fleet without prefill workers, that must not prefill long prompts elsewhere. If it gets a worker, that is slow
    and claims one long prompt at a time: two of its batches."""
    sets = ["workers.prefill.replicas=0", "workers.decode.replicas=1", "sim.prefill_us_per_token=500"]
    sets += ["workers.engine_args.max_num_batched_tokens=512"]
    with running_fleet("sim-2p2d.yaml", BY_LENGTH, "routing.fallback=refuse", "ratio.mode=off", *sets) as fleet:
        yield fleet


@pytest.mark.parametrize("streams", [True, False])
async def test_a_long_prompt_is_refused_where_no_worker_prefills_and_it_must_not_go_elsewhere(streams, refusing):
    before = refusing.metric("pd_placements_total", decision="reject", reason="no_prefill_worker")
    async with refusing.client() as client:
        short = await refusing.ask(client, token_prompt(20, 1), max_tokens=4)
        assert short.ok, short.error
        body = {"model": refusing.model, "prompt": token_prompt(1000, 2), "max_tokens": 4, "stream": streams}
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1, answer.text
    error = answer.json()["error"]
    assert error["code"] == 503 and "no prefill worker is ready" in error["message"]
    assert refusing.metric("pd_placements_total", decision="reject", reason="no_prefill_worker") == before + 1
    refusing.assert_no_leaks()


@pytest.mark.parametrize("streams", [True, False])
async def test_a_prompt_that_waits_when_the_last_prefill_worker_leaves_is_refused(streams, refusing):
    refusing.cli("scale", "prefill=1", "decode=1")
    refusing.until(lambda: refusing.shape() == (1, 1), "1P1D")
    async with refusing.client() as client:
        body = {"model": refusing.model, "max_tokens": 4, "stream": streams}
        asking = [
            asyncio.create_task(client.post("/v1/completions", json={**body, "prompt": token_prompt(1000, seed)}))
            for seed in range(30)
        ]
        await refusing.soon(lambda: refusing.fleet()["queue"]["requests"] >= 5, "a queue")
        refusing.cli("scale", "prefill=0", "decode=1", "--force")
        answers = await asyncio.gather(*asking)
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused and {answer.status_code for answer in refused} == {503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert all("no prefill worker is ready" in answer.json()["error"]["message"] for answer in refused)
    refusing.until(lambda: refusing.shape() == (0, 1), "0P1D")
    refusing.assert_no_leaks()


async def test_priority_overtakes_in_queue(refusing):
    refusing.cli("scale", "prefill=1", "decode=1")
    refusing.until(lambda: refusing.shape() == (1, 1), "1P1D")
    queued = functools.partial(refusing.metric, "pd_placements_total", decision="remote")
    asked, before = dict[str, str](), queued()  # asked: the name of each, by id

    async def ask(client, name, seed, priority):
        answer = await refusing.ask(client, token_prompt(1000, seed), max_tokens=1, priority=priority)
        assert answer.ok, answer.error
        asked[answer.request_id] = name

    async with refusing.client() as client, asyncio.TaskGroup() as asking:
        sent = 0
        # Other prompts than those asked for before, which may be cached.
        for name, priority, seeds in [("normal", 0, 14), ("unimportant", 5, 1), ("important", -5, 2)]:
            for seed in range(100 + sent, 100 + sent + seeds):
                asking.create_task(ask(client, name, seed, priority))
            sent += seeds
            await refusing.soon(lambda: queued() == before + sent, f"all {name} ones in the queue")  # noqa: B023

    def ended():
        return [line for line in refusing.request_lines() if line["id"] in asked]

    refusing.until(lambda: len(ended()) == len(asked), "their log lines")
    # Claimed one at a time, and at once sent to decode: the order of claims, by one clock.
    at_ms = sorted((line["arrived_at"] * 1e3 + line["frontend_ms"] + line["sent_ms"], line["id"]) for line in ended())
    claimed = [asked[request_id] for _, request_id in at_ms]
    assert claimed[-1] == "unimportant", claimed
    assert "important" not in claimed[-4:], claimed
    refusing.assert_no_leaks()


@pytest.mark.parametrize(("size", "prefill", "decode", "frontends"), [(1, 3, 1, 2), (2, 1, 1, 1)])
async def test_the_ratio_follows_a_load_that_decodes_much_without_a_failed_request(size, prefill, decode, frontends):
    """Of workers, and of groups of two ranks."""
    total = prefill + decode
    sets = [
        f"workers.prefill.replicas={prefill}",
        f"workers.decode.replicas={decode}",
        "workers.engine_args.max_num_seqs=4",
    ]
    sets += [f"workers.engine_args.data_parallel_size={size}", f"frontend.replicas={frontends}"]
    # Clients that wait for answers offer no more than is served, so it must be late to be too much.
    quick = ["ratio.mode=auto", "slo.ttft_s=0.2", "slo.tpot_s=0.01"]
    with running_fleet("sim-2p2d.yaml", BY_LENGTH, *sets, *quick) as fleet:
        prompts = [token_prompt(30 + seed, seed) for seed in range(12)]
        async with fleet.under_load(prompts, concurrency=24, max_tokens=80) as answers:
            await fleet.soon(lambda: fleet.shape() == (0, total * size), "all decode by themselves", 120)
            # Under load still: without it the automatic ratio may think again. A frontend asks once a second what is
            # desired, and `status` asks whichever of the two answers.
            by_ratio = f"0 prefill, {total} decode, by ratio"
            await fleet.soon(lambda: by_ratio in fleet.cli("status").stdout, "status shows it")
            told = functools.partial(fleet.metric, "pd_desired_workers", role="decode")
            await fleet.soon(lambda: told() == total, "metrics show it")
        assert [answer.error for answer in answers if not answer.ok] == []
        assert f"{prefill}P{decode}D -> " in fleet.cli("events").stdout
        fleet.cli("scale", "prefill=1", f"decode={total - 1}")
        fleet.until(lambda: fleet.shape() == (size, (total - 1) * size), "an idle fleet stays as its operator wants it")
        fleet.assert_no_leaks()
