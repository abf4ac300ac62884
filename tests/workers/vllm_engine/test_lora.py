"""Remote prefill with LoRA adapters on real engines: the tokens are one engine's, and no adapter gets another's KV."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from support_models import LORA_RANK, lora_adapter
from support_vllm import BLOCK_SIZE, Driver, frames, tiny_model

from orchestrator.config.settings import KVConfig
from orchestrator.policy.prefix_keys import prefix_keys, salt_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PROMPT = random.Random(1).choices(range(3, 500), k=5 * BLOCK_SIZE + 7)
TOKENS = 12


async def test_lora_is_used_on_both_ends_and_separates_caches(tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    model = tiny_model(tmp_path / "model")
    adapters = [
        LoRARequest(name, number, str(lora_adapter(model, tmp_path / name, seed=number)))
        for number, name in enumerate(("first", "second"), start=1)
    ]
    arguments = {"enable_lora": True, "max_loras": 2, "max_lora_rank": LORA_RANK}
    prefill = await Driver.start(model, name="prefill", kv=KVConfig(verify=True), **arguments)
    decode = await Driver.start(model, name="decode", kv=KVConfig(verify=True), **arguments)
    # One is loaded where it decodes, the other where it is prefilled: requests bring the path of what is missing.
    for driver, adapter in zip((decode, prefill), adapters, strict=True):
        loaded = msgspec.msgpack.decode(msgspec.msgpack.encode(adapter))
        assert await driver.engine.call("add_lora", [loaded], {})
    answers = []
    for lora in (None, *adapters):
        body, name = frames(PROMPT, TOKENS, lora=lora), lora.lora_name if lora else "none"
        await decode.decode(f"{name}-remote", body, prefill.source(f"{name}-remote"))
        await prefill.prefill(f"{name}-remote", body)
        answers.append(await decode.done(f"{name}-remote", 60))
        assert decode.stats[f"{name}-remote"].num_external_cached_tokens >= len(PROMPT) - 1, name
        salted = prefix_keys(PROMPT, BLOCK_SIZE, salt_of(lora and lora.lora_name, None))
        assert set(salted) <= prefill.prefix_keys and set(salted) <= decode.prefix_keys, name
        await prefill.decode(f"{name}-alone", body)
        assert await prefill.done(f"{name}-alone", 60) == answers[-1], name
    assert len({tuple(answer) for answer in answers}) == 3, "they say different things"
    totals = decode.engine.kv_totals
    assert totals["pd_verified"] == 3 and not totals["pd_corrupt"] + totals["pd_receives_failed"]
    for driver in (prefill, decode):
        await driver.idle()
        await driver.stop()
