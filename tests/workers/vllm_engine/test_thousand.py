"""A thousand requests through two real engines, a tenth aborted and a twentieth hit by the death of their prefill."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from support_vllm import Driver, engine_pid, frames
from support_wait import until

from orchestrator.config.settings import KVConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS, AT_ONCE = 1000, 10
KILLS = 6  # of the prefill engine, each while a wave of ten is prefilled or transferred
ABORTED = REQUESTS // 10  # half of them on decode, half on prefill
LENGTHS = range(40, 400, 13)
TOKENS = 4


def body(length: int) -> list[bytes]:
    return frames(random.Random(length).choices(range(3, 500), k=length), TOKENS)


async def start(model: Path, name: str) -> Driver:
    """Without prefix caching: every prompt is computed, and all of its KV transferred."""
    kv = KVConfig(transfer_timeout_s=5.0, verify=True)
    return await Driver.start(model, name=name, kv=kv, enable_prefix_caching=False)


async def reference(model: Path) -> dict[int, list[int]]:
    engine = await start(model, "reference")
    for length in LENGTHS:
        await engine.decode(f"{length}", body(length))
    answers = {length: await engine.done(f"{length}") for length in LENGTHS}
    await engine.stop()
    return answers


class Soak:
    """One decode engine throughout, and prefill engines one after another."""

    def __init__(self, model: Path, decode: Driver, prefill: Driver, right: dict[int, list[int]]) -> None:
        self.model, self.decode, self.prefill, self.right = model, decode, prefill, right
        self.chance = random.Random(17)
        spacing = REQUESTS // KILLS
        self.fatal = {(spacing * i + spacing // 2) // AT_ONCE * AT_ONCE for i in range(KILLS)}  # first numbers of waves
        survivors = [n for n in range(REQUESTS) if n // AT_ONCE * AT_ONCE not in self.fatal]
        aborted = [f"r{number}" for number in self.chance.sample(survivors, ABORTED)]
        self.aborted_on_decode, self.aborted_on_prefill = set(aborted[::2]), set(aborted[1::2])
        self.hit: set[str] = set()
        self.finished = self.kills = 0

    async def wave(self, first: int) -> None:
        keys = {f"r{number}": self.chance.choice(LENGTHS) for number in range(first, first + AT_ONCE)}
        for key, length in keys.items():
            steps = [
                self.prefill.prefill(key, body(length)),
                self.decode.decode(key, body(length), self.prefill.source(key)),
            ]
            for step in steps if self.chance.random() < 0.5 else reversed(steps):
                await step
        if first in self.fatal:
            await self._kill(keys)
        else:
            aborted = keys.keys() & (self.aborted_on_decode | self.aborted_on_prefill)
            await asyncio.gather(*(self._abort(key) for key in sorted(aborted)))
        for key, length in keys.items():
            if key not in self.aborted_on_decode:
                assert await self.decode.done(key) == self.right[length], key
                self.finished += 1

    async def _abort(self, key: str) -> None:
        on_decode = key in self.aborted_on_decode
        both = on_decode and self.chance.random() < 0.5
        await asyncio.sleep(self.chance.random() * 0.05)
        if on_decode:
            await self.decode.engine.abort([key])
        if both or not on_decode:
            await self.prefill.engine.abort([key])

    async def _kill(self, keys: dict[str, int]) -> None:
        await asyncio.sleep(self.chance.random() * 0.02)
        doomed = self.prefill
        self.hit |= keys.keys() - self.decode.tokens.keys()
        os.kill(engine_pid(doomed), signal.SIGKILL)
        self.kills += 1
        await until(lambda: doomed.error is not None, what="the engine's death")
        await self.decode.engine.fail_peer(doomed.info.kv.engine_id)
        assert not doomed.engine.kv_totals["pd_corrupt"]
        await doomed.stop()
        self.prefill = await start(self.model, f"prefill-{self.kills}")


async def test_no_wrong_token_no_leaked_block_and_equal_bytes(model: Path) -> None:
    right = await reference(model)
    soak = Soak(model, await start(model, "decode"), await start(model, "prefill-0"), right)
    for first in range(0, REQUESTS, AT_ONCE):
        await soak.wave(first)
    await soak.decode.idle()
    await soak.prefill.idle()
    counted = soak.decode.engine.kv_totals
    print(
        f"{REQUESTS} requests, {soak.finished} finished with the right tokens; "
        f"aborted: {len(soak.aborted_on_decode)} on decode, {len(soak.aborted_on_prefill)} on prefill; "
        f"{soak.kills} kills hit {len(soak.hit)}; "
        f"transfers verified: {counted['pd_verified']}, corrupt: {counted['pd_corrupt']}"
    )
    assert soak.finished == REQUESTS - ABORTED // 2
    assert soak.kills == KILLS and len(soak.hit) >= REQUESTS * 0.05
    assert not counted["pd_corrupt"] and not soak.prefill.engine.kv_totals["pd_corrupt"]
    assert counted["pd_verified"] > REQUESTS * 0.75
    await soak.prefill.stop()
    await soak.decode.stop()
