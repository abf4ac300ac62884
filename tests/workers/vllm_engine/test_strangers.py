"""Real engines whose peer is not what it was or should be: garbled, of another version, restarted, or too late."""

import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support_vllm import Driver, engine_pid, frames
from support_wait import until

from orchestrator.config.settings import KVConfig
from orchestrator.wire.addresses import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TIMEOUT_S = 2.0
BODY = frames(random.Random(5).choices(range(3, 500), k=600), 6)


async def start(model: Path, name: str, **args: object) -> Driver:
    kv = KVConfig(transfer_timeout_s=TIMEOUT_S, verify=True)
    return await Driver.start(model, name=name, kv=kv, enable_prefix_caching=False, **args)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decode(model: Path) -> AsyncIterator[Driver]:
    engine = await start(model, "decode")
    await engine.decode("right", BODY)
    await engine.done("right")
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def honest(model: Path) -> AsyncIterator[Driver]:
    engine = await start(model, "honest")
    yield engine
    await engine.stop()


async def ask(prefill: Driver, decode: Driver, key: str) -> None:
    await prefill.prefill(key, BODY)
    await decode.decode(key, BODY, prefill.source(key))


async def right(decode: Driver, *keys: str) -> bool:
    return all([await decode.done(key) == decode.tokens["right"] for key in keys])


async def test_garbled_messages_fail_only_their_transfer(
    model: Path, decode: Driver, honest: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from connectors.push import wire

    pack = wire.pack

    def garbled(message: wire.Message) -> bytes:
        return pack(message)[:-2] if isinstance(message, wire.Landed | wire.Gone) else pack(message)

    monkeypatch.setattr(wire, "pack", garbled)  # inherited by the engine process, which is forked
    babbler = await start(model, "babbler")
    monkeypatch.undo()
    await ask(babbler, decode, "garbled")
    began = time.monotonic()
    await ask(honest, decode, "clear")
    assert await right(decode, "clear") and "garbled" not in decode.finished
    assert decode.stats["clear"].num_external_cached_tokens == 600
    assert await right(decode, "garbled") and time.monotonic() - began > TIMEOUT_S * 0.5
    assert decode.engine.kv_totals["pd_bad_messages"] > 0
    for engine in (decode, honest, babbler):
        await engine.idle()
    await babbler.stop()


async def test_decode_waits_for_long_prefill(model: Path, decode: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from connectors.push.worker import PushWorker

    on_computed = PushWorker.on_computed

    def slowly(self: PushWorker, metadata: object) -> None:
        if metadata.computed:  # type: ignore[attr-defined]
            time.sleep(TIMEOUT_S / 5)
        on_computed(self, metadata)  # type: ignore[arg-type]

    monkeypatch.setattr(PushWorker, "on_computed", slowly)  # inherited by the engine process, which is forked
    slow = await start(model, "slow", max_num_batched_tokens=64)
    monkeypatch.undo()
    began = time.monotonic()
    await ask(slow, decode, "long")
    assert await right(decode, "long") and time.monotonic() - began > 1.5 * TIMEOUT_S
    assert decode.stats["long"].num_external_cached_tokens == 600
    await slow.idle()
    await decode.idle()
    await slow.stop()


async def test_a_peer_of_another_version_is_refused_in_both_directions(
    model: Path, decode: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from connectors.push import connections, wire

    monkeypatch.setattr(wire, "PREFIX", b"PDKV%d:" % (wire.VERSION + 1))
    monkeypatch.setattr(connections.Connections, "_TRANSFER_MODE", f"pd-push-{wire.VERSION + 1}")
    newer = await start(model, "newer")
    monkeypatch.undo()
    failed = {engine: engine.engine.kv_totals["pd_receives_failed"] for engine in (decode, newer)}
    await ask(newer, decode, "from-newer")
    await ask(decode, newer, "to-newer")
    assert await right(decode, "from-newer")
    assert await newer.done("to-newer") == decode.tokens["right"]
    for engine, before in failed.items():
        await until(lambda e=engine, n=before: e.engine.kv_totals["pd_receives_failed"] == n + 1, what="its count")
        await engine.idle()
    await newer.stop()


async def test_an_engine_that_restarted_at_the_same_address_is_another_one(model: Path, decode: Driver) -> None:
    port = next(free_ports("127.0.0.1"))
    first = await start(model, "first", kv_port=port)
    await ask(first, decode, "by-the-first")
    assert await right(decode, "by-the-first")
    os.kill(engine_pid(first), signal.SIGKILL)
    await until(lambda: first.error is not None, what="its death")
    second = await start(model, "second", kv_port=port)
    received = decode.engine.kv_totals["pd_verified"]
    # Nobody has told decode: it asks at the address it knows for an engine that is no longer there.
    await decode.decode("late", BODY, first.source("late"))
    await ask(second, decode, "by-the-second")
    assert await right(decode, "by-the-second", "late")
    assert decode.stats["by-the-second"].num_external_cached_tokens == 600
    await until(lambda: decode.engine.kv_totals["pd_verified"] == received + 1, what="one more verified transfer")
    for engine in (decode, second):
        await engine.idle()
    await first.stop()
    await second.stop()


async def test_expired_kv_is_recomputed(decode: Driver, honest: Driver) -> None:
    await honest.prefill("expired", BODY)
    await honest.done("expired")
    await honest.idle()  # nobody has asked: released
    failed = decode.engine.kv_totals["pd_receives_failed"]
    await decode.decode("expired", BODY, honest.source("expired"))
    assert await right(decode, "expired")
    await until(lambda: decode.engine.kv_totals["pd_receives_failed"] == failed + 1, what="the count of it")
    await decode.idle()
