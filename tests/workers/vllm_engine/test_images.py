"""Prompts with images, prefilled by one engine and decoded by another that gets no pixels, on real engines.

The tokens are those of one engine. Where the decode engine needs pixels after all, it gives the request back.
"""

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support_images import PLACEHOLDER, Requests, picture, vision_model
from support_vllm import BLOCK_SIZE, Driver
from support_wait import until

from orchestrator.config.settings import KVConfig
from orchestrator.policy.prefix_keys import reusable_keys

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
PIXELS = 100_000  # bytes; a picture has more, and all that is left without it fewer


def words(length: int, seed: int = 0) -> list[int]:
    return random.Random(length * 1000 + seed).choices(range(3, 490), k=length)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: Any) -> AsyncIterator[tuple[Driver, Driver, Requests]]:
    model = vision_model(tmp_path_factory.mktemp("vision"))
    kv = KVConfig(verify=True)
    prefill = await Driver.start(model, name="prefill", kv=kv, skip_tokenizer_init=False, max_model_len=1024)
    decode = await Driver.start(
        model, name="decode", kv=kv, skip_tokenizer_init=False, kv_cache_memory_bytes=2 << 20, max_model_len=1024
    )
    yield prefill, decode, Requests(model)
    await prefill.stop()
    await decode.stop()


def size(frames: list[bytes]) -> int:
    return sum(map(len, frames))


RED, BLUE, LARGE = picture(1), picture(2), picture(3, 280, 280)
PROMPTS: dict[str, tuple[Any, ...]] = {
    "no image": (words(40),),
    "one image": (words(10), RED, words(20)),
    "the same place, another image": (words(10), BLUE, words(20)),
    "several images": (words(5), RED, words(30), BLUE, words(7), LARGE, words(50)),
    "the same image three times": (words(5), RED, words(30, 1), RED, RED, words(3)),
    "several steps": (words(230), LARGE, words(200), RED, words(40)),
    "an image first": (BLUE, words(33)),
}


@pytest.mark.parametrize("kind", PROMPTS)
async def test_tokens_are_those_of_one_engine(engines: Any, kind: str) -> None:
    prefill, decode, requests = engines
    parsed = requests.read(*PROMPTS[kind], max_tokens=10)
    images = sum(not isinstance(part, list) for part in PROMPTS[kind])
    assert size(parsed.frames) > images * PIXELS
    with_kv = parsed.frames_with_kv or parsed.frames
    assert size(with_kv) < PIXELS
    await decode.decode(f"{kind}-remote", with_kv, prefill.source(f"{kind}-remote"))
    await prefill.prefill(f"{kind}-remote", parsed.frames)
    found = await decode.done(f"{kind}-remote")
    await prefill.decode(f"{kind}-alone", parsed.frames)
    assert found == await prefill.done(f"{kind}-alone")
    stats = decode.stats[f"{kind}-remote"]
    assert stats.num_external_cached_tokens + stats.num_local_cached_tokens >= parsed.info.prompt_tokens - 1
    await prefill.idle()
    await decode.idle()
    assert not decode.engine.kv_totals["pd_corrupt"] + decode.engine.kv_totals["pd_receives_failed"]


async def remote(engines: Any, key: str, parsed: Any) -> list[int]:
    prefill, decode, _ = engines
    await decode.decode(key, parsed.frames_with_kv, prefill.source(key))
    await prefill.prefill(key, parsed.frames)
    return await decode.done(key)


async def alone(engines: Any, key: str, parsed: Any) -> list[int]:
    await engines[0].decode(key, parsed.frames)
    return await engines[0].done(key)


async def test_what_an_image_shows_counts(engines: Any) -> None:
    """Else equal tokens would say nothing of images."""
    answers = [await alone(engines, f"shows-{n}", engines[2].read(words(10), it)) for n, it in enumerate((RED, BLUE))]
    assert answers[0] != answers[1]


@pytest.mark.parametrize(("after", "pixels"), [("its middle", True), ("its end", True), ("the mark of its end", False)])
async def test_a_prompt_ends_at_an_image(engines: Any, after: str, pixels: bool) -> None:
    """Decode computes a prompt's last token by itself, and so what is at that place."""
    cut = {"its middle": 10 + 1 + 50, "its end": 10 + 1 + 100, "the mark of its end": None}[after]
    parsed = engines[2].read(words(10, 1), LARGE, cut=cut)
    last = engines[2].request(words(10, 1), LARGE, cut=cut).prompt_token_ids[-1]
    assert (last == PLACEHOLDER) is pixels
    assert (size(parsed.frames_with_kv) > PIXELS) is pixels
    assert await remote(engines, f"at-{cut}", parsed) == await alone(engines, f"at-{cut}-alone", parsed)


async def given_back(decode: Driver, key: str) -> bool:
    await decode.done(key)
    return str(decode.finished[key].name) == "ERROR"


@pytest.mark.parametrize("why", ["its engine is dead", "nobody is there"])
async def test_kv_that_does_not_come_gives_the_request_back(engines: Any, why: str) -> None:
    import msgspec

    prefill, decode, requests = engines
    parsed = requests.read(words(9, 2), picture(len(why)), words(9, 3))
    nobody = msgspec.structs.replace(prefill.info.kv, engine_id=why, port=1)
    gone = msgspec.structs.replace(prefill.source(why), endpoint=nobody)
    if why == "its engine is dead":
        await decode.engine.fail_peer(why)
    await decode.decode(why, parsed.frames_with_kv, gone)
    assert await given_back(decode, why) and decode.tokens[why] == []
    await decode.decode(f"{why}, again", parsed.frames)
    expected = await alone(engines, f"{why}, alone", parsed)
    assert await decode.done(f"{why}, again") == expected
    await decode.decode(f"{why}, known", parsed.frames_with_kv, gone)
    assert await decode.done(f"{why}, known") == expected, "its own encoding of the image will do"
    await decode.idle()


async def test_a_preempted_request_is_given_back_and_continues(engines: Any) -> None:
    prefill, decode, requests = engines
    parsed = requests.read(words(50, 4), picture(5), words(9, 4), picture(6), words(70, 4), max_tokens=300)
    await decode.decode("preempted", parsed.frames_with_kv, prefill.source("preempted"))
    await prefill.prefill("preempted", parsed.frames)
    await until(lambda: len(decode.tokens.get("preempted", ())) > 3, "its first tokens")
    await decode.engine.call("reset_prefix_cache", [True], {})
    assert await given_back(decode, "preempted")
    so_far = decode.tokens["preempted"]
    await decode.decode("continued", parsed.frames, resume_tokens=so_far)
    assert so_far + await decode.done("continued") == await alone(engines, "undisturbed", parsed)
    await decode.idle()


async def test_an_image_is_found_in_the_cache_and_another_is_not(engines: Any) -> None:
    """The keys of a prompt are those that engines report, and mean what engines reuse."""
    prefill, _, requests = engines
    rng, hits = random.Random(0), 0
    beginnings = [(words(20, 50), first, words(40, 51), second) for first in (RED, BLUE) for second in (RED, LARGE)]
    for number in range(24):
        tokens = words(rng.randrange(1, 80), number)
        parsed = requests.read(*rng.choice(beginnings), tokens, max_tokens=1)
        believed = 0
        for key in parsed.prefix_keys:
            if key not in prefill.prefix_keys:
                break
            believed += BLOCK_SIZE
        await alone(engines, f"cached-{number}", parsed)
        assert prefill.stats[f"cached-{number}"].num_cached_tokens == believed, number
        assert set(parsed.prefix_keys) <= prefill.prefix_keys
        hits += believed > 0
    assert hits >= 12
    plain = reusable_keys(requests.request(words(20, 50), RED, words(40, 51)).prompt_token_ids, BLOCK_SIZE)
    assert not prefill.prefix_keys & set(plain), "keys of blocks with an image have its mark"
