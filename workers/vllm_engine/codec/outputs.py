"""What vLLM's outputs and statistics tell a worker and its clients, where a transfer makes them say something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from orchestrator.types import KVCounters
from workers.engine import EngineStep, PrefixDelta
from workers.vllm_engine.plugin import PREFIX_STATS, TOKENS_LEFT_STATS


def take_plugin_stats(step: EngineStep, connector_stats: dict[str, Any]) -> None:
    if (delta := connector_stats.pop(PREFIX_STATS, None)) is not None:
        step.prefix = msgspec.convert(delta, PrefixDelta)
    step.tokens_left = connector_stats.pop(TOKENS_LEFT_STATS, {})


def kv_counters(totals: Mapping[str, Any], link_bytes_per_s: float) -> KVCounters:
    """`totals`: sums and counts of what the connector has reported, by its names."""
    return KVCounters(
        bytes_sent=int(totals["bytes_transferred"]),
        descriptors=int(totals["num_descriptors"]),
        transfers=totals["pd_stream_seconds_count"],
        transfer_s=totals["pd_stream_seconds"],
        failures=totals["pd_streams_failed_count"] + totals["pd_receives_failed_count"],
        bad_messages=totals["pd_bad_messages_count"],
        withdrawing_blocks=int(totals["pd_withdrawing_blocks"]),
        link_bytes_per_s=link_bytes_per_s,
    )


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
