"""Real engines whose KV is not a plain Llama's: windows, a recurrent state, latents, 8-bit KV, speculation.

For each the tokens after a remote prefill are those of one engine, and checksums of what was sent and came agree.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from support_models import MODELS, WINDOW_TOKENS, eagle_drafter, special_model
from support_vllm import BLOCK_SIZE, Driver, frames, tiny_model

from orchestrator.config.settings import KVConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "windows": {},
    "some-windows": {},
    "some-windows-in-one-group": {"disable_hybrid_kv_cache_manager": True},
    "recurrent": {"enable_prefix_caching": False},  # with it vLLM's kernel for CPUs ends the engine
    "recurrent-nemotron": {"enable_prefix_caching": False},
    # bfloat16 is what vLLM's kernel for CPUs takes. The steps are short, so that a prompt takes several.
    "recurrent-deltas": {"enable_prefix_caching": False, "dtype": "bfloat16", "max_num_batched_tokens": BLOCK_SIZE},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "ngram": {"speculative_config": NGRAM},
    "eagle": {"speculative_config": {"method": "eagle", "num_speculative_tokens": 2}},
    "eagle-of-other-heads": {"speculative_config": {"method": "eagle", "num_speculative_tokens": 2}},
    "mtp": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    "latent": {"dtype": "bfloat16"},  # the one that vLLM's kernel for CPUs takes
}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(length * 1000 + seed).choices(range(3, 500), k=length)


@pytest.mark.parametrize("kind", ARGUMENTS)
async def test_tokens_are_those_of_one_engine(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = kind.removesuffix("-in-one-group")
    model = special_model(tmp_path / name, name) if name in MODELS else tiny_model(tmp_path / "tiny")
    arguments = ARGUMENTS[kind]
    if kind == "latent" and not pytest.importorskip("torch").cpu._is_amx_tile_supported():
        pytest.skip("without AMX vLLM's kernels for prompts and for single tokens give different tokens")
    if kind == "recurrent-deltas" and not pytest.importorskip("torch").cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM's CPU kernels compute gated delta nets where there is AVX-512 with bfloat16")
    if kind.startswith("fp8") and not pytest.importorskip("torch").cpu._is_avx512_supported():
        pytest.skip("vLLM's CPU kernels keep FP8 KV where there is AVX-512 only")
    if kind == "ngram":  # compiled, each engine, which is forked from here, has 15 s to wait for it
        from vllm.v1.spec_decode import ngram_proposer

        for name in ("batch_propose_numba", "_find_longest_matched_ngram_and_propose_tokens"):
            monkeypatch.setattr(ngram_proposer, name, getattr(ngram_proposer, name).py_func)
    if kind.startswith("eagle"):
        drafter = eagle_drafter(tmp_path / "drafter", kv_heads=4 if kind == "eagle-of-other-heads" else 2)
        arguments = {"speculative_config": arguments["speculative_config"] | {"model": str(drafter)}}
    kv = KVConfig(verify=True)
    prefill = await Driver.start(model, name="prefill", kv=kv, **arguments)
    decode = await Driver.start(model, name="decode", kv=kv, **arguments)
    shared = prompt(3 * WINDOW_TOKENS)
    repetitive = prompt(20) * 5  # so that n-grams are found
    prompts = [prompt(5), prompt(32), prompt(WINDOW_TOKENS + 60), prompt(600), repetitive]
    prompts += [
        prompt(WINDOW_TOKENS + more) for more in (30, 31, 32, 33)
    ]  # its window begins at the end of a block, and at the next one
    prompts += [[*shared, *prompt(50, seed)] for seed in range(2)] + [prompt(600)]  # prefix hits, and a whole one
    for number, tokens in enumerate(prompts):
        if kind == "latent":
            # After a transfer decode computes the prompt's last token by itself, which rounds otherwise than with the
            # rest. So does one engine, asked again, whose prefix cache has whole blocks: all tokens but that one.
            tokens = tokens[: (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE + 1]
            await prefill.decode(f"before-{number}", frames(tokens, 1))
            await prefill.done(f"before-{number}", 60)
        if kind == "recurrent-deltas":
            # Decode computes the last token by itself here too. So does one engine whose steps end before that.
            tokens = [*tokens, *prompt((1 - len(tokens)) % BLOCK_SIZE)]
        body, key, alone = frames(tokens, 10), f"remote-{number}", f"alone-{number}"
        await decode.decode(key, body, prefill.source(key))
        await prefill.prefill(key, body)
        found = await decode.done(key, 60)
        await prefill.decode(alone, body)
        assert found == await prefill.done(alone, 60), f"{len(tokens)} tokens"
        stats = decode.stats[key]
        assert stats.num_external_cached_tokens + stats.num_local_cached_tokens >= len(tokens) - 1
        await prefill.idle()
        await decode.idle()
    totals = decode.engine.kv_totals
    assert totals["pd_verified"] >= len(prompts) - 1 and not totals["pd_corrupt"] + totals["pd_receives_failed"]
    if kind != "latent":  # its prompts are cached before
        assert prefill.engine.kv_totals["bytes_transferred_count"] > len(prompts), "long prompts go out by chunk"
    await prefill.stop()
    await decode.stop()
