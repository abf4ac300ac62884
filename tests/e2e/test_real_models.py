"""Two models on real engines, a dense one and one with experts, behind one endpoint of two frontends: each answers as
its own engine without a fleet does, also after its workers have ended because nobody asked."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support_client import Answer
from support_fleet import DEMO_VOCABULARY, small_model, token_prompt, with_demo_tokenizer
from support_many_models import Models
from support_models import special_model
from support_vllm import Driver, frames

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 12
# Prefilled where they are decoded, and remotely.
PROMPTS = [token_prompt(length, seed=length) for length in (12, 30, 150, 300)]
CHATS = ["Why is the sky blue?", "Name three rivers. " * 20]
REQUESTS = 400
# Models stay while they are compared, one after the other.
FILE = """\
frontend: {replicas: 2, max_replicas: 2}
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
    experts = special_model(folder / "b", "experts", DEMO_VOCABULARY)
    return {"a": small_model(folder / "a"), "b": with_demo_tokenizer(experts)}


def chat_prompts(folder: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = [[{"role": "user", "content": text}] for text in CHATS]
    return [tokenizer.apply_chat_template(it, add_generation_prompt=True, return_dict=False) for it in said]


@pytest.fixture(scope="module")
def truth(folders: dict[str, str]) -> dict[str, list[list[int]]]:
    """What one engine of each model without a fleet answers, to the prompts and then to the chats."""
    truth = {name: asyncio.run(plain(folder)) for name, folder in folders.items()}
    assert all(a != b for a, b in zip(truth["a"], truth["b"], strict=True)), "one could stand for the other"
    return truth


async def plain(model: str) -> list[list[int]]:
    driver = await Driver.start(Path(model))
    answers = [await driver.alone(frames(prompt, TOKENS)) for prompt in PROMPTS + chat_prompts(model)]
    await driver.stop()
    return answers


@pytest.fixture(scope="module")
def fleet(
    folders: dict[str, str], truth: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Models]:
    """After `truth`: an engine at a time needs a core."""
    file = tmp_path_factory.mktemp("fleet") / "models.yaml"
    file.write_text(FILE + "".join(f"  {name}: {{model: {folder}}}\n" for name, folder in folders.items()))
    with Models(str(file)) as running:
        yield running


def tokens(answers: list[Answer]) -> list[list[int]]:
    assert [(a.status, a.error) for a in answers if not a.ok] == []
    return [answer.tokens for answer in answers]


async def posted(client: httpx.AsyncClient, path: str, **body: object) -> list[int]:
    """The tokens of an answer that is not streamed."""
    asked = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
    answer = await client.post(f"/v1/{path}", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


async def test_each_model_answers_as_its_own_engine_does(fleet: Models, truth: dict[str, list[list[int]]]) -> None:
    gate, wrong, of = asyncio.Semaphore(12), [], {name: fleet.of(name) for name in truth}

    async def one(client: httpx.AsyncClient, number: int) -> None:
        name, kind, turn = list(truth)[number % 2], number // 2 % 4, number // 8
        at = len(PROMPTS) + turn % len(CHATS) if kind == 2 else turn % len(PROMPTS)
        async with gate:
            if kind == 0:
                (found,) = tokens([await of[name].ask(client, PROMPTS[at], TOKENS)])
            elif kind == 1:
                found = await posted(client, "completions", model=name, prompt=PROMPTS[at])
            elif kind == 2:
                messages = [{"role": "user", "content": CHATS[at - len(PROMPTS)]}]
                found = await posted(client, "chat/completions", model=name, messages=messages)
            else:
                refused = await client.post("/v1/embeddings", json={"model": name, "input": "x"})
                assert 400 <= refused.status_code < 500, "neither makes embeddings"
                return
            if found != truth[name][at]:
                wrong.append((name, kind, at, found))

    async with fleet.client() as client:
        await asyncio.gather(*(one(client, number) for number in range(REQUESTS)))
    assert wrong == []
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
        asked_at = time.monotonic()
        answers = await fleet.of(turn).ask_all(PROMPTS, concurrency=4, max_tokens=TOKENS)
        print(f"{turn} came back and answered within {time.monotonic() - asked_at:.1f} s")
        assert tokens(answers) == truth[turn][: len(PROMPTS)]
        assert fleet.rests(other), "only the one that is asked for comes back"
