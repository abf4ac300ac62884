"""Remote prefill with LoRA adapters on real engines: the tokens are one engine's, and no adapter gets another's KV."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support_models import LORA_RANK, lora_adapter
from support_vllm import BLOCK_SIZE, Driver, frames, tiny_model

from orchestrator.config.settings import KVConfig
from orchestrator.policy.prefix_keys import prefix_keys, salt_of
from orchestrator.wire.adapters import adapter_number, unique_name
from workers.engine import AdapterUnavailable, InvalidEngineRequest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PROMPT = random.Random(1).choices(range(3, 500), k=5 * BLOCK_SIZE + 7)
TOKENS = 12


async def test_lora_is_used_on_both_ends_and_separates_caches(tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    model = tiny_model(tmp_path / "model")
    arguments = {"enable_lora": True, "max_loras": 2, "max_lora_rank": LORA_RANK}
    prefill = await Driver.start(model, name="prefill", kv=KVConfig(verify=True), **arguments)
    decode = await Driver.start(model, name="decode", kv=KVConfig(verify=True), **arguments)
    adapters = []
    for seed, name in enumerate(("first", "second")):
        path = str(lora_adapter(model, tmp_path / name, seed))
        content = await prefill.engine.call("fingerprint_lora", [name, path], {})
        adapters.append(LoRARequest(name, adapter_number(name, path, content), path))
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
        salted = prefix_keys(PROMPT, BLOCK_SIZE, salt_of(lora and unique_name(name, lora.lora_int_id), None))
        assert set(salted) <= prefill.prefix_keys and set(salted) <= decode.prefix_keys, name
        await prefill.decode(f"{name}-alone", body)
        assert await prefill.done(f"{name}-alone", 60) == answers[-1], name
    assert len({tuple(answer) for answer in answers}) == 3, "they say different things"
    await refused_adapters(decode, adapters, tmp_path)
    totals = decode.engine.kv_totals
    assert totals["pd_verified"] == 3 and not totals["pd_corrupt"] + totals["pd_receives_failed"]
    for driver in (prefill, decode):
        await driver.idle()
        await driver.stop()


async def refused_adapters(decode: Driver, adapters: list[Any], folder: Path) -> None:
    """What would end an engine, or be answered with other weights, ends one request."""
    from vllm.lora.request import LoRARequest

    first, second = adapters

    async def ask(name: str, number: int, path: str) -> None:
        await decode.decode("refused", frames(PROMPT, 4, lora=LoRARequest(name, number, path)))

    with pytest.raises(InvalidEngineRequest, match="number .*, which is that of LoRA adapter 'first'"):
        await ask("second", first.lora_int_id, second.lora_path)
    with pytest.raises(AdapterUnavailable, match="its files have changed"):
        await ask("second", 7, second.lora_path)  # as a frontend that counts would number it
    with pytest.raises(AdapterUnavailable, match="No adapter found for .*nowhere"):
        await ask("third", 7, str(folder / "nowhere"))
    too_large = lora_adapter(folder / "model", folder / "large", seed=9)
    described = json.loads((too_large / "adapter_config.json").read_text())
    (too_large / "adapter_config.json").write_text(json.dumps(described | {"r": 64}))
    content = await decode.engine.call("fingerprint_lora", ["large", str(too_large)], {})
    with pytest.raises(AdapterUnavailable, match="'large' at .* cannot be loaded: .*rank"):
        await ask("large", adapter_number("large", str(too_large), content), str(too_large))
