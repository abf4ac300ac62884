"""Tiny models of random float32 weights whose KV caches differ from a plain Llama's."""

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
WINDOW_TOKENS = 96
LORA_RANK = 8
COMMON = {
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

    return MistralConfig(**COMMON, head_dim=32, num_hidden_layers=2, sliding_window=WINDOW_TOKENS)


def _some_windows() -> Any:
    """Layers with a window and layers without one: two KV cache groups."""
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3TextConfig(**COMMON, head_dim=32, num_hidden_layers=4, sliding_window=WINDOW_TOKENS, layer_types=kinds)


def _recurrent() -> Any:
    """Mamba-2 layers and attention layers: prefill stops short of the prompt's end."""
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **COMMON,
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


def _recurrent_or_else() -> Any:
    """Nemotron-H: a layer is a Mamba-2 mixer, attention or an MLP, nothing of two."""
    from transformers import NemotronHConfig

    return NemotronHConfig(
        **COMMON,
        head_dim=32,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=256,
    )


def _recurrent_deltas() -> Any:
    """Qwen3-Next: layers with a gated delta net and attention layers, experts in all; heads of the size that vLLM's
    kernel for CPUs has."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **COMMON,
        head_dim=32,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )


def _latent() -> Any:
    """Latent attention (MLA) in all layers; the sizes of a latent are those that vLLM's kernel for CPUs has."""
    from transformers import DeepseekV2Config

    few_heads = COMMON | {"num_key_value_heads": COMMON["num_attention_heads"]}
    return DeepseekV2Config(
        **few_heads,
        num_hidden_layers=3,
        first_k_dense_replace=3,  # no experts
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )


def _guessing() -> Any:
    """A Qwen2, to which `_add_guessing_layer` adds a layer for multi-token prediction (MTP)."""
    from transformers import Qwen2Config

    return Qwen2Config(**COMMON, num_hidden_layers=2)


def _experts() -> Any:
    """Every layer has experts, two for each token."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **COMMON, head_dim=32, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64
    )


MODELS = {
    "experts": _experts,
    "windows": _windows,
    "some-windows": _some_windows,
    "recurrent": _recurrent,
    "recurrent-nemotron": _recurrent_or_else,
    "recurrent-deltas": _recurrent_deltas,
    "latent": _latent,
    "mtp": _guessing,
}


def special_model(folder: Path, kind: str, vocabulary: int = VOCABULARY) -> Path:
    """Written once per folder; a few MB, but for a large vocabulary."""
    import torch
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").exists():
        torch.manual_seed(7)
        config = MODELS[kind]()
        config.vocab_size = vocabulary
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
        if kind == "mtp":
            _add_guessing_layer(folder)
    return folder


def _add_guessing_layer(folder: Path) -> None:
    """MiMo's layout: a layer of the model's own kind, after a projection of embedding and hidden state together."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    first, guess = "model.layers.0.", "model.mtp_layers.0."
    layer = {guess + name.removeprefix(first): t.clone() for name, t in tensors.items() if name.startswith(first)}
    hidden = tensors["model.norm.weight"].shape[0]
    layer[f"{guess}input_proj.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        layer[f"{guess}{norm}.weight"] = torch.ones(hidden)
    save_file(tensors | layer, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


def eagle_drafter(folder: Path, kv_heads: int = 2) -> Path:
    """An EAGLE head of random weights for `support_vllm.tiny_model`: a layer of its own, which keeps KV of its own. The
    model has 2 `kv_heads`."""
    import torch
    from safetensors.torch import load_file, save_file
    from support_vllm import tiny_model

    tiny_model(folder, layers=1, kv_heads=kv_heads)
    tensors = load_file(folder / "model.safetensors")
    layer = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if ".layers." in name}
    del layer["layers.0.input_layernorm.weight"]
    hidden = layer["layers.0.post_attention_layernorm.weight"].shape[0]
    # It passes on what the model has computed, so it guesses that the last token comes again: now and then it is right.
    layer["fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layer[f"layers.0.{name}.weight"] *= 0.1
    save_file(layer, folder / "model.safetensors")
    return folder


def lora_adapter(model: Path, folder: Path, seed: int) -> Path:
    """A LoRA adapter in PEFT's format, of random weights, that changes what a Llama says."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for projection, out in (("q_proj", hidden), ("v_proj", inner)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(LORA_RANK, hidden, generator=generator) * 0.05
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, LORA_RANK, generator=generator) * 0.05
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": LORA_RANK,
        "lora_alpha": 2 * LORA_RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
