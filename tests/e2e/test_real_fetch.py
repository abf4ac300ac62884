"""Prefixes fetched from other workers' caches, on real vLLM engines: turns are prefilled where their history is not.
Tokens are the same with and without fetches, also while holders are stopped and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics

import pytest
from support_fleet import RunningFleet, descendants, running_fleet, small_model, token_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

# The prefill worker has room for one conversation, so its cache has no history of another by the next turn.
SETTINGS = (
    "workers.engine_args.dtype=float32",
    "workers.engine_args.block_size=32",
    "workers.engine_args.kv_cache_memory_bytes=201326592",
    "workers.prefill.engine_args.kv_cache_memory_bytes=18874368",
    "workers.decode.replicas=2",
    "routing.remote_prefill_min_tokens=64",
    "routing.decode_choice=round_robin",
    "kv.verify=true",
    "kv.transfer_timeout_s=5",
)
CONVERSATIONS, TURNS, MAX_TOKENS, FIRST_TOKENS, MORE_TOKENS = 6, 4, 24, 2400, 120
Said = list[list[list[int]]]  # tokens, by turn and conversation


async def converse(fleet: RunningFleet, seed: int, turns: int = TURNS) -> tuple[Said, list[float]]:
    """All conversations in turns. Returns the answers, and the TTFTs (ms) from the second turn on."""
    said: Said = []
    requests: list[str] = []
    histories = [token_prompt(FIRST_TOKENS, seed=seed + number) for number in range(CONVERSATIONS)]
    async with fleet.client() as client:
        for turn in range(turns):
            said.append([])
            for number, history in enumerate(histories):
                answer = await fleet.ask(client, history, MAX_TOKENS)
                assert answer.ok and len(answer.tokens) == MAX_TOKENS, (turn, number, answer.error)
                said[-1].append(answer.tokens)
                history += answer.tokens + token_prompt(MORE_TOKENS, seed=1000 + 10 * turn + number)
                requests += [answer.request_id] if turn else []
    await fleet.soon(lambda: {line["id"] for line in fleet.request_lines()} >= set(requests), "all are logged")
    ttft_ms = {line["id"]: line["ttft_ms"] for line in fleet.request_lines()}
    return said, [ttft_ms[request] for request in requests]


def fetches(fleet: RunningFleet, outcome: str) -> float:
    return fleet.metric("pd_kv_fetches_total", outcome=outcome)


async def test_fetched_history_gives_the_same_answers_and_holders_may_fail(tmp_path, record_property):
    model = f"model={small_model(tmp_path / 'small')}"
    with running_fleet("demo-1p1d-cpu.yaml", *SETTINGS, model, "kv.fetch=off") as fleet:
        truth, computed_ms = await converse(fleet, 0)
        other_truth, _ = await converse(fleet, 100, turns=3)
        assert fetches(fleet, "fetched") == 0
        fleet.assert_no_leaks()
    with running_fleet("demo-1p1d-cpu.yaml", *SETTINGS, model, "kv.fetch=auto") as fleet:
        said, fetched_ms = await converse(fleet, 0)
        assert said == truth
        fleet.until(lambda: fetches(fleet, "fetched") >= (TURNS - 1) * CONVERSATIONS / 2, "most turns are fetched")
        tokens = fleet.metric("pd_kv_fetched_tokens_total")
        assert tokens > fetches(fleet, "fetched") * FIRST_TOKENS / 2
        assert fleet.metric("pd_kv_transfer_failures_total") == 0, "what arrived is what was sent"
        fleet.assert_no_leaks()
        medians = statistics.median(computed_ms), statistics.median(fetched_ms)
        record_property("ttft_p50_ms", medians)
        print(
            f"TTFT P50 from turn 2 on: {medians[0]:.0f} ms computed, {medians[1]:.0f} ms fetched, {tokens:.0f} tokens"
        )
        failing = asyncio.create_task(fail_holders(fleet))
        assert (await converse(fleet, 100, turns=3))[0] == other_truth
        await failing
        await fleet.soon(lambda: fleet.shape() == (1, 2), "the worker that was killed is back")
        fleet.assert_no_leaks()


async def fail_holders(fleet: RunningFleet) -> None:
    """A decode worker and its engine are stopped for a while, then the other one is killed, while turns go on."""
    stopped, killed = fleet.workers("decode")
    asked = fetches(fleet, "fetched")
    await fleet.soon(lambda: fetches(fleet, "fetched") > asked, "fetches go on")
    family = [stopped["pid"], *descendants(stopped["pid"])]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(3)
    for pid in family:
        os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(1)
    for pid in [*descendants(killed["pid"]), killed["pid"]]:
        os.kill(pid, signal.SIGKILL)
