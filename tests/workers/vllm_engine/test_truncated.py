"""Real engines of a model whose prefill stops short of the prompt's end, as those with a recurrent state do."""

import random
from pathlib import Path

import pytest
from support_vllm import Driver, frames

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

BACKOFF_TOKENS = 3


async def test_decode_computes_rest_of_truncated_prompt(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

    # Inherited by the engine processes, which are forked. A tiny Llama stands for a hybrid: the protocol is the same.
    monkeypatch.setattr(NixlBaseConnectorScheduler, "_prefill_backoff", lambda self: BACKOFF_TOKENS)
    prefill = await Driver.start(model, name="prefill")
    decode = await Driver.start(model, name="decode", enable_prefix_caching=False)
    assert not prefill.info.lends and not decode.info.lends, "a prompt's KV goes whole"
    for length in (2, BACKOFF_TOKENS + 32, 700):
        body = frames(random.Random(length).choices(range(3, 500), k=length), 6)
        await decode.decode(f"alone-{length}", body)
        right = await decode.done(f"alone-{length}")
        key = f"remote-{length}"
        await decode.decode(key, body, prefill.source(key))
        await prefill.prefill(key, body)
        assert await decode.done(key) == right
        truncated = length > BACKOFF_TOKENS
        assert await prefill.done(key) == ([] if truncated else right[:1])
        assert decode.stats[key].num_external_cached_tokens == (length - BACKOFF_TOKENS if truncated else length)
        await prefill.idle()
        await decode.idle()
    await prefill.stop()
    await decode.stop()
