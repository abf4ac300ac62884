"""What vLLM's outputs and statistics tell a worker and its clients, where a transfer makes them say something else."""

from __future__ import annotations

from typing import Any

import msgspec

from workers.engine import EngineStep, PrefixDelta
from workers.vllm_engine.plugin import PREFIX_STATS, TOKENS_LEFT_STATS


def take_plugin_stats(step: EngineStep, connector_stats: dict[str, Any]) -> None:
    if (delta := connector_stats.pop(PREFIX_STATS, None)) is not None:
        step.prefix = msgspec.convert(delta, PrefixDelta)
    step.tokens_left = connector_stats.pop(TOKENS_LEFT_STATS, {})


def count_transfer_as_computed(stats: Any, block_tokens: int) -> None:
    """vLLM counts KV that came from the prefill worker as cached. Report it to clients as computed and cached here. The
    router, which also gets the prefill worker's counts, corrects this by the prefix hits there."""
    if stats is not None and stats.num_external_cached_tokens:
        stats.num_cached_tokens = stats.num_local_cached_tokens
        if block_tokens:
            whole_blocks = stats.num_prompt_tokens // block_tokens * block_tokens
            stats.num_cache_creation_tokens = max(0, whole_blocks - stats.num_local_cached_tokens)


def drop_guessed_token(output: Any) -> None:
    """Remove the token sampled after a prompt that was truncated for its prefill: it stands for one of the prompt."""
    if (output.kv_transfer_params or {}).get("prompt_truncated"):
        output.new_token_ids = []
