"""Tiny models of random float32 weights whose KV caches differ from a plain Llama's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
WINDOW_TOKENS = 96
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def _windows() -> Any:
    """Every layer attends to the last tokens only."""
    from transformers import MistralConfig

    return MistralConfig(**_COMMON, head_dim=32, num_hidden_layers=2, sliding_window=WINDOW_TOKENS)


def _some_windows() -> Any:
    """Layers with a window and layers without one: two KV cache groups."""
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3TextConfig(
        **_COMMON, head_dim=32, num_hidden_layers=4, sliding_window=WINDOW_TOKENS, layer_types=kinds
    )


def _recurrent() -> Any:
    """Mamba-2 layers and attention layers: prefill stops short of the prompt's end."""
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["mamba", "attention"] * 2,
        position_embedding_type="rope",
        num_local_experts=0,
        shared_intermediate_size=128,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=256,  # as long as an engine step: the CPU kernel takes one chunk per step
    )


MODELS = {"windows": _windows, "some-windows": _some_windows, "recurrent": _recurrent}


def special_model(folder: Path, kind: str) -> Path:
    """Written once per folder; a few MB."""
    import torch
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").exists():
        torch.manual_seed(7)
        config = MODELS[kind]()
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    return folder
