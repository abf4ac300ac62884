"""Two models on real engines behind one endpoint: each answers as its own engine without a fleet does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support_client import FleetClient
from support_fleet import DEMO_VOCABULARY, RunningFleet, small_model, token_prompt, with_demo_tokenizer
from support_vllm import Driver, tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 12
# Prefilled where they are decoded, and remotely.
PROMPTS = [token_prompt(length, seed=length) for length in (12, 30, 150, 300)]
FILE = """\
routing: {remote_prefill_min_tokens: 64}
workers:
  engine_args:
    dtype: float32
    enforce_eager: true
    max_model_len: 1024
    block_size: 32
    kv_cache_memory_bytes: 134217728
models:
"""


async def plain(model: str) -> list[list[int]]:
    """What one engine without a fleet answers."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    driver, answers = await Driver.start(Path(model)), []
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        await driver.engine.give(EngineCoreRequest(str(number), prompt, None, params, None, 0.0, None, None, None))
        answers.append(await driver.done(str(number), 60))
    await driver.stop()
    return answers


def test_each_model_answers_as_its_own_engine_does(tmp_path: Path) -> None:
    tiny_model(tmp_path / "b", layers=3, heads=2, kv_heads=2, vocabulary=DEMO_VOCABULARY)
    models = {"a": small_model(tmp_path / "a"), "b": with_demo_tokenizer(tmp_path / "b")}
    truth = {name: asyncio.run(plain(folder)) for name, folder in models.items()}
    assert all(a != b for a, b in zip(truth["a"], truth["b"], strict=True)), "one could stand for the other"
    file = tmp_path / "models.yaml"
    file.write_text(FILE + "".join(f"  {name}: {{model: {folder}}}\n" for name, folder in models.items()))
    fleet = RunningFleet(str(file), "ratio.mode=off", start_timeout_s=400)  # four engines load at once
    try:
        for _ in range(2):  # from caches too
            for name, right in truth.items():
                asked = FleetClient(fleet.url, fleet.namespace)
                asked.model = name
                answers = asyncio.run(asked.ask_all(PROMPTS, concurrency=4, max_tokens=TOKENS))
                assert [(a.status, a.error) for a in answers if not a.ok] == []
                assert [answer.tokens for answer in answers] == right, name
        decided = {(line["decision"], line["decode_worker"].partition("-")[0]) for line in fleet.request_lines()}
        assert decided == {(how, name) for how in ("local", "remote") for name in models}
        for name in models:
            FleetClient(f"{fleet.url}/models/{name}", fleet.namespace).assert_no_leaks()
    finally:
        fleet.end()
