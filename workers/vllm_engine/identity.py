"""What an engine must have in common with the others of its fleet, read from its configuration.

`store.registry` compares it when a worker joins, so that a difference is reported there and not at the first transfer.
"""

from __future__ import annotations

from typing import Any

import msgspec
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import _get_speculative_compatibility_factors
from vllm.engine.arg_utils import AsyncEngineArgs

from orchestrator.types import EngineIdentity
from orchestrator.wire.messages import PROTOCOL_VERSION
from workers.vllm_engine.schema import vllm_schema

# Other settings that decide how KV is computed and laid out. vLLM's handshake does not compare `hf_overrides`; KV that
# a prefill worker computes without them is wrong on a decode worker with them.
_KV_SETTINGS = {
    "hf_overrides": "model_config",
    "disable_sliding_window": "model_config",
    "disable_hybrid_kv_cache_manager": "scheduler_config",
    "kv_cache_dtype_skip_layers": "cache_config",
    "mamba_cache_dtype": "cache_config",
    "mamba_ssm_cache_dtype": "cache_config",
    "mamba_cache_mode": "cache_config",
    "swa_bounded_replay": "cache_config",
}


def identity_of(model: str, config: VllmConfig, attention_backend: str) -> EngineIdentity:
    """`model`: the name in the fleet's configuration. `attention_backend`: the one that the ranks have chosen."""
    its = config.model_config
    drafts = _get_speculative_compatibility_factors(config)  # None if speculation has no KV of its own
    return EngineIdentity(
        model=model,
        dtype=str(its.dtype).removeprefix("torch."),
        kv_cache_dtype=str(config.cache_config.cache_dtype),
        block_size=config.cache_config.block_size,
        max_model_len=its.max_model_len,
        engine="vllm",
        engine_version=vllm.__version__,
        protocol=PROTOCOL_VERSION,
        messages=vllm_schema(),
        revision=getattr(its.hf_config, "_commit_hash", None) or its.revision or "",
        quantization=str(its.quantization or ""),
        attention_backend=attention_backend,
        speculation=msgspec.json.encode(drafts, enc_hook=str, order="sorted").decode() if drafts is not None else "",
        kv_settings=_kv_settings(config),
        kv_copies=_kv_copies(its, config.parallel_config.tensor_parallel_size),
    )


def _kv_settings(config: VllmConfig) -> str:
    """The settings that differ from vLLM's defaults, as JSON; empty if none does."""
    found = {name: getattr(getattr(config, section), name) for name, section in _KV_SETTINGS.items()}
    usual = {name: getattr(AsyncEngineArgs, name, None) for name in found}
    # None and empty values are equal, and so is false if vLLM's default is None.
    kept = {name: value for name, value in found.items() if (value or usual[name]) and value != usual[name]}
    return msgspec.json.encode(kept, enc_hook=str, order="sorted").decode() if kept else ""


def _kv_copies(model: Any, ranks: int) -> int:
    if model.use_mla:
        return 1  # every rank has all of the KV, and transfers allow for that
    return max(1, ranks // model.get_total_num_kv_heads())
