"""What vLLM's outputs and statistics tell a worker and its clients, where a transfer makes them say something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreOutput

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
        host_hit_tokens=int(totals["pd_host_hit_tokens"]),
        host_blocks=int(totals["pd_host_blocks"]),
        host_loaded_bytes=int(totals["pd_host_loaded_bytes"]),
        host_load_s=totals["pd_host_load_seconds"],
        link_bytes_per_s=link_bytes_per_s,
    )


def correct(output: EngineCoreOutput, block_tokens: int) -> None:
    """Change what vLLM says of a request with remote prefill. `block_tokens`: of a cached block; 0 without a cache.

    vLLM counts KV that came from the prefill worker as cached. To clients it is computed, and cached here; the router,
    which also gets the prefill worker's counts, corrects this by the prefix hits there. The token that was sampled
    after a prompt that was truncated for its prefill stands for one of the prompt's.
    """
    stats = output.prefill_stats
    if stats is not None and stats.num_external_cached_tokens:
        stats.num_cached_tokens = stats.num_local_cached_tokens
        if block_tokens:
            whole_blocks = stats.num_prompt_tokens // block_tokens * block_tokens
            stats.num_cache_creation_tokens = max(0, whole_blocks - stats.num_local_cached_tokens)
    if (output.kv_transfer_params or {}).get("prompt_truncated"):
        output.new_token_ids = []


def why_refused(output: EngineCoreOutput) -> str:
    """Why no engine can run this request; empty for other errors, and for every error of vLLM 0.32."""
    error = getattr(output, "error", None)
    return str(error.message) if error is not None and error.code == "validation_error" else ""
