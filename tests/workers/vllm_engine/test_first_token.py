"""Prefill's one token on a real engine: under all that determines it, it is the token that decode begins with. The
first request of such a pair needs no handshake where one of them was told of the other."""

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support_relay import Relay
from support_vllm import Driver, frames
from support_wait import until

from orchestrator.wire.addresses import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 500), k=length)


HERE, SEEN_AT = "127.0.0.1", "127.0.0.2"  # where engines answer handshakes, and where relays count those


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(model: Path) -> AsyncIterator[list[tuple[Driver, Relay]]]:
    ports = free_ports(HERE)
    async with contextlib.AsyncExitStack() as ending:
        pair = []
        for name in ("prefill", "decode"):
            relay = Relay(HERE, port := next(ports))
            await ending.enter_async_context(relay.listening(SEEN_AT, port))
            driver = await Driver.start(model, name=name, kv_port=port, kv_advertise=SEEN_AT)
            ending.push_async_callback(driver.stop)
            pair.append((driver, relay))
        yield pair


@pytest.fixture(scope="module")
def pair(seen: list[tuple[Driver, Relay]]) -> tuple[Driver, Driver]:
    (prefill, _), (decode, _) = seen
    return prefill, decode


async def test_first_request_of_engines_that_met_makes_no_handshake(seen: list[tuple[Driver, Relay]]) -> None:
    """The first test of this pair. One is told of the other, as when its role has changed, and tells that one."""
    (prefill, to_prefill), (decode, to_decode) = seen
    await prefill.engine.meet(decode.info.kv)
    await until(lambda: to_decode.accepted == 1 and to_prefill.accepted == 1, "handshakes of both")
    early, answer = await both((prefill, decode), "first#1", frames(prompt(100)))
    assert early == answer[:1] and len(answer) == 8
    assert decode.stats["first#1"].num_external_cached_tokens == 100
    assert (to_decode.accepted, to_prefill.accepted) == (1, 1)


async def both(pair: tuple[Driver, Driver], key: str, body: list[bytes]) -> tuple[list[int], list[int]]:
    prefill, decode = pair
    await decode.decode(key, body, prefill.source(key))
    await prefill.prefill(key, body)
    early, answer = await prefill.done(key), await decode.done(key)
    await prefill.idle()
    await decode.idle()
    return early, answer


GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 1234}


@pytest.mark.parametrize("length", [40, 1500], ids=["one step", "many steps"])
@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("greedy", GREEDY),
        ("seeded", SEEDED),
        ("nucleus", SEEDED | {"top_p": 0.8, "top_k": 50, "min_p": 0.001}),
        ("penalties", SEEDED | {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}),
        ("bias", GREEDY | {"logit_bias": {77: 100.0}}),
        ("allowed", SEEDED | {"allowed_token_ids": [9, 10, 11, 12]}),
        ("logprobs", SEEDED | {"logprobs": 3}),
    ],
)
async def test_prefill_token_equals_decode_token(pair, name: str, length: int, sampling: dict[str, Any]) -> None:
    early, answer = await both(pair, f"{name}-{length}", frames(prompt(length), 5, **sampling))
    assert early == answer[:1] and len(answer) == 5
    assert str(pair[0].finished[f"{name}-{length}"]) == "length"


async def test_seeded_prompts_sample_same_token_in_batch(pair) -> None:
    """vLLM's engine would end: a step that samples for one request rewinds the generators of those still in chunks."""
    _, decode = pair
    bodies = {f"seeded-{seed}": frames(prompt(1100 + seed), 12, temperature=1.0, seed=seed) for seed in range(6)}
    for key, body in bodies.items():
        await decode.decode(f"together-{key}", body)
    together = {key: await decode.done(f"together-{key}") for key in bodies}
    assert await decode.engine.call("reset_prefix_cache", [], {})
    for key, body in bodies.items():
        await decode.decode(f"alone-{key}", body)
        assert await decode.done(f"alone-{key}") == together[key]
    await decode.idle()


async def test_forbidden_tokens_are_forbidden_in_prefill(pair) -> None:
    _, (would, *_) = await both(pair, "free", frames(prompt(100), 5))
    bad = frames(prompt(100), 5, bad_words=["x"], _bad_words_token_ids=[[would]])
    early, answer = await both(pair, "bad-words", bad)
    assert early == answer[:1] != [would]
    stop = {"stop_token_ids": [would], "min_tokens": 3}
    early, answer = await both(pair, "min-tokens", frames(prompt(100), 5, **stop))
    assert early == answer[:1] != [would]


async def test_final_prefill_token_is_marked_and_kv_is_pushed(pair) -> None:
    _, decode = pair
    _, (would, *_) = await both(pair, "goes-on", frames(prompt(200), 5))
    for driver in pair:
        assert await driver.engine.call("reset_prefix_cache", [], {})
    early, answer = await both(pair, "stops", frames(prompt(200), 5, stop_token_ids=[would]))
    assert early == answer == [would]
    assert {str(driver.finished["stops"]) for driver in pair} == {"stop"}
    assert decode.stats["stops"].num_external_cached_tokens == 200
    assert not decode.engine.kv_totals["pd_receives_failed"]
