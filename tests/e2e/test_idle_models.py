"""Models whose workers end when nobody asks, and come back: simulated engines, and real ones that take turns."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support_client import FleetClient
from support_fleet import DEMO_VOCABULARY, RunningFleet, small_model, token_prompt, with_demo_tokenizer
from support_vllm import tiny_model

from orchestrator.launch.host.run_folder import RunFolder

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPTS = [token_prompt(20 + 173 * i % 1500, seed=i) for i in range(20)]
REAL = """\
routing: {remote_prefill_min_tokens: 64}
idle_after_s: 3
cold_start_s: 240
workers:
  prefill: {replicas: 0}
  engine_args:
    dtype: float32
    enforce_eager: true
    max_model_len: 1024
    block_size: 32
    kv_cache_memory_bytes: 134217728
models:
"""


def of(fleet: RunningFleet, model: str) -> FleetClient:
    client = FleetClient(fleet.url, fleet.namespace)
    client.model = model
    return client


def rests(fleet: RunningFleet, model: str) -> bool:
    """Whether it is idle, and none of its workers runs."""
    seen = fleet.http.get(f"/models/{model}/fleet").json()
    return seen["desired"]["set_by"] == "idle" and not seen["workers"] and not processes_of(fleet, model)


def processes_of(fleet: RunningFleet, model: str) -> list[str]:
    noted = json.loads((RunFolder(fleet.namespace).path / "processes.json").read_text())
    return [process["name"] for process in noted if process["name"].startswith(f"{model}-worker-")]


def no_error(answers: list[Any]) -> bool:
    wrong = [(a.status, a.error) for a in answers if not a.ok]
    assert wrong == []
    return bool(answers)


async def test_a_simulated_model_rests_and_wakes_while_another_serves() -> None:
    """Requests that come while its workers drain are answered too."""
    fleet = RunningFleet("sim-two-models.yaml", "ratio.mode=off", "frontend.replicas=2", "models.small.idle_after_s=2")
    small, large = of(fleet, "small"), of(fleet, "large")
    try:
        truth = [answer.tokens for answer in await large.ask_all(PROMPTS, concurrency=4)]
        async with large.under_load(PROMPTS, 2, max_tokens=16) as load:
            for _ in range(2):
                await fleet.soon(lambda: rests(fleet, "small"), "it rests")
                assert "idle: the next request brings its workers back" in fleet.cli("status").stdout
                assert fleet.http.get("/ready").json()["models"] == {"small": True, "large": True}
                answers = await small.ask_all(PROMPTS, concurrency=8)
                assert no_error(answers) and [answer.tokens for answer in answers] == truth
            for gap in range(8):  # at any moment of its end, one is answered
                assert no_error(await small.ask_all(PROMPTS[:1], concurrency=1, max_tokens=1))
                await asyncio.sleep(1.8 + gap / 5)
        assert no_error(load)
        for model in ("small", "large"):
            of_model = FleetClient(f"{fleet.url}/models/{model}", fleet.namespace)
            of_model.assert_no_leaks()
    finally:
        fleet.end()


@pytest.mark.slow
async def test_two_real_models_take_turns(tmp_path: Path) -> None:
    tiny_model(tmp_path / "b", layers=3, heads=2, kv_heads=2, vocabulary=DEMO_VOCABULARY)
    models = {"a": small_model(tmp_path / "a"), "b": with_demo_tokenizer(tmp_path / "b")}
    file = tmp_path / "models.yaml"
    file.write_text(REAL + "".join(f"  {name}: {{model: {folder}}}\n" for name, folder in models.items()))
    fleet = RunningFleet(str(file), "ratio.mode=off", start_timeout_s=400)
    prompt = [token_prompt(40, seed=1)]
    try:
        first = {name: (await of(fleet, name).ask_all(prompt, concurrency=1))[0].tokens for name in models}
        assert first["a"] != first["b"], "one could stand for the other"
        for turn in ("a", "b", "a"):
            await fleet.soon(lambda: all(rests(fleet, name) for name in models), "both rest", timeout_s=120)
            memory = json.loads((RunFolder(fleet.namespace).path / "shared_memory.json").read_text())
            assert not set(memory) & set(os.listdir("/dev/shm")), "their workers left no shared memory"
            answers = await of(fleet, turn).ask_all(prompt, concurrency=1)
            assert no_error(answers) and answers[0].tokens == first[turn]
            other = "b" if turn == "a" else "a"
            assert rests(fleet, other), "only the one that is asked for comes back"
    finally:
        fleet.end()
