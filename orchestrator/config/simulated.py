"""What one simulated engine is: the section `sim`, and the engine arguments of vLLM that it honours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from orchestrator.config.explain import explain
from orchestrator.config.settings import ConfigError, SimConfig
from orchestrator.config.values import Count, Positive

# A variable, for tests: a prompt with this token id crashes the engine that computes it.
CRASH_TOKEN = "PD_SIM_CRASH_TOKEN"
_OF_VLLM = {"blocks": "num_gpu_blocks_override", "prefix_caching": "enable_prefix_caching"}


class Simulated(SimConfig, frozen=True, kw_only=True, rename=_OF_VLLM):
    """Without `max_loras`, LoRA adapters cost nothing."""

    blocks: Positive = 4096
    block_size: Positive = 16  # tokens
    max_model_len: Positive = 32_768  # tokens
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 2048
    prefix_caching: bool = True
    max_loras: Count = 0
    kv_bytes_per_token: Positive = 131_072
    crash_token: int | None = None


_OURS = {*SimConfig.__struct_fields__, "kv_bytes_per_token", "crash_token"}
HONOURED = frozenset(Simulated.__struct_encode_fields__) - _OURS  # of vLLM's engine arguments


def simulated(sim: SimConfig, arguments: Mapping[str, Any]) -> Simulated:
    """Raises ConfigError, also where the longest sequence does not fit in the blocks."""
    known: dict[str, Any] = {name: value for name, value in arguments.items() if name in HONOURED and value is not None}
    known |= msgspec.to_builtins(sim)
    if (token := os.environ.get(CRASH_TOKEN)) is not None:
        if not token.isdecimal():
            raise ConfigError(f"{CRASH_TOKEN}: expected the id of a token, got {token!r}")
        known["crash_token"] = int(token)
    try:
        found = msgspec.convert(known, Simulated)
    except msgspec.ValidationError as error:
        raise ConfigError(f"workers.engine_args.{explain(str(error), known, Simulated)}") from None
    capacity = found.blocks * found.block_size
    if found.max_model_len > capacity:
        raise ConfigError(
            f"workers.engine_args.max_model_len: expected at most {capacity} (num_gpu_blocks_override x block_size), "
            f"got {found.max_model_len}"
        )
    return found
