"""Real engines that one of them was told of are connected before the first request, and so need no handshake for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support_relay import Relay
from support_vllm import Driver, frames
from support_wait import until

from orchestrator.wire.addresses import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

HERE, SEEN_AT = "127.0.0.1", "127.0.0.2"  # where engines answer handshakes, and where relays count those
PROMPT = list(range(3, 103))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model: Path) -> AsyncIterator[list[tuple[Driver, Relay]]]:
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


async def test_first_request_of_engines_that_met_makes_no_handshake(pair: list[tuple[Driver, Relay]]) -> None:
    """One is told of the other, as when its role has changed, and tells that one."""
    (prefill, to_prefill), (decode, to_decode) = pair
    await prefill.engine.meet(decode.info.kv)
    await until(lambda: to_decode.accepted == 1 and to_prefill.accepted == 1, "handshakes of both")
    await prefill.prefill("first#1", frames(PROMPT))
    await decode.decode("first#1", frames(PROMPT), prefill.source("first#1"))
    assert len(await decode.done("first#1")) == 8
    assert decode.stats["first#1"].num_external_cached_tokens == len(PROMPT)
    assert (to_decode.accepted, to_prefill.accepted) == (1, 1)
    for driver in (prefill, decode):
        await driver.idle()
