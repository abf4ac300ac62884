"""Two models on real engines behind one endpoint: each answers as its own engine without a fleet does, also after its
workers have ended because nobody asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_client import Answer
from support_fleet import DEMO_VOCABULARY, small_model, token_prompt, with_demo_tokenizer
from support_many_models import Models
from support_vllm import Driver, frames, tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 12
# Prefilled where they are decoded, and remotely.
PROMPTS = [token_prompt(length, seed=length) for length in (12, 30, 150, 300)]
# Models stay while they are compared, one after the other.
FILE = """\
routing: {remote_prefill_min_tokens: 64}
idle_after_s: 15
cold_start_s: 240
workers:
  engine_args:
    dtype: float32
    enforce_eager: true
    max_model_len: 1024
    block_size: 32
    kv_cache_memory_bytes: 134217728
models:
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "b", layers=3, heads=2, kv_heads=2, vocabulary=DEMO_VOCABULARY)
    return {"a": small_model(folder / "a"), "b": with_demo_tokenizer(folder / "b")}


@pytest.fixture(scope="module")
def truth(folders: dict[str, str]) -> dict[str, list[list[int]]]:
    """What one engine of each model without a fleet answers."""
    truth = {name: asyncio.run(plain(folder)) for name, folder in folders.items()}
    assert all(a != b for a, b in zip(truth["a"], truth["b"], strict=True)), "one could stand for the other"
    return truth


async def plain(model: str) -> list[list[int]]:
    driver, answers = await Driver.start(Path(model)), []
    for number, prompt in enumerate(PROMPTS):
        await driver.decode(str(number), frames(prompt, TOKENS))
        answers.append(await driver.done(str(number), 60))
    await driver.stop()
    return answers


@pytest.fixture(scope="module")
def fleet(
    folders: dict[str, str], truth: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Models]:
    """After `truth`: an engine at a time needs a core."""
    file = tmp_path_factory.mktemp("fleet") / "models.yaml"
    file.write_text(FILE + "".join(f"  {name}: {{model: {folder}}}\n" for name, folder in folders.items()))
    running = Models(str(file))
    try:
        yield running
    finally:
        running.end()


def tokens(answers: list[Answer]) -> list[list[int]]:
    assert [(a.status, a.error) for a in answers if not a.ok] == []
    return [answer.tokens for answer in answers]


async def test_each_model_answers_as_its_own_engine_does(fleet: Models, truth: dict[str, list[list[int]]]) -> None:
    for _ in range(2):  # from caches too
        for name, right in truth.items():
            assert tokens(await fleet.of(name).ask_all(PROMPTS, concurrency=4, max_tokens=TOKENS)) == right, name
    decided = {(line["decision"], line["decode_worker"].partition("-")[0]) for line in fleet.request_lines()}
    assert decided == {(how, name) for how in ("local", "remote") for name in truth}
    for name in truth:
        fleet.at(name).assert_no_leaks()


async def test_models_take_turns(fleet: Models, truth: dict[str, list[list[int]]]) -> None:
    for name in truth:
        await asyncio.to_thread(fleet.steer_one, name, "scale", "prefill=0", "decode=1")
    for turn, other in (("a", "b"), ("b", "a")):
        await fleet.soon(lambda: all(fleet.rests(name) for name in truth), "both rest", timeout_s=120)
        assert not fleet.shared_memory() & set(os.listdir("/dev/shm")), "their workers left no shared memory"
        answers = await fleet.of(turn).ask_all(PROMPTS, concurrency=4, max_tokens=TOKENS)
        assert tokens(answers) == truth[turn]
        assert fleet.rests(other), "only the one that is asked for comes back"
