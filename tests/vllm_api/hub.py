"""A Hugging Face cache that holds what vLLM's tests ask for by name: a small model and adapters, of random weights.

The tests look at the server, not at what a model knows, so one model answers to all names, with the demo model's
tokenizer and chat template. Four unused special tokens are called as Qwen3 calls them: its parsers ask for them.
"""

import json
import os
import shutil
from pathlib import Path

from support_models import lora_adapter
from support_vllm import tiny_model

from orchestrator.config.model import cache_root, resolve_model

_FORMAT = 4  # increase it when something else is written
_REVISION = "0" * 40
NAMES = (
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "facebook/opt-125m",
    "openai-community/gpt2",
)
_RENAMED = {
    "<file_sep>": "<think>",
    "<filename>": "</think>",
    "<gh_stars>": "<tool_call>",
    "<issue_start>": "</tool_call>",
}
_ADAPTERS = (
    "Jackmin108/Qwen3-0.6B-Meow-LoRA",
    "Jackmin108/Qwen3-0.6B-Woof-LoRA",
    "charent/self_cognition_Alice",
    "jekunz/smollm-135m-lora-fineweb-faroese",
    "peft-internal-testing/opt-125m-dummy-lora",
    "typeof/zephyr-7b-beta-lora",
)
_POSITIONS = 32_768
_VOCABULARY = 49_152  # the demo model's
# How often the model's likeliest token is one that ends an answer, or a string in JSON: random weights would never end.
_ENDS = {"<|im_end|>": 0.02, '"': 0.15, '"}': 0.1}
_SPREAD = 3.0  # standard deviation of the other tokens' logits


def hub() -> Path:
    """The folder for HF_HUB_CACHE; made once. Raises ConfigError where the demo model's tokenizer is not at hand."""
    folder = cache_root() / f"vllm-api-hub-{_FORMAT}"
    if folder.is_dir():
        return folder
    building = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    model = _make_model(building / "model")
    for name in NAMES:
        snapshot = _snapshot(building, name)
        for file in model.iterdir():
            (snapshot / file.name).hardlink_to(file)
    for seed, name in enumerate(_ADAPTERS):
        lora_adapter(model, _snapshot(building, name), seed)
    building.rename(folder)
    return folder


def _make_model(folder: Path) -> Path:
    """Random weights, of which the first dimension is the same for all tokens and positions: it adds to some logits."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer, LlamaForCausalLM

    tiny_model(folder, layers=4, heads=4, kv_heads=4, vocabulary=_VOCABULARY, positions=_POSITIONS)
    demo = Path(resolve_model("demo"))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, folder / name)
    tokens = (demo / "tokenizer.json").read_text()
    for old, new in _RENAMED.items():
        tokens = tokens.replace(json.dumps(old), json.dumps(new))
    (folder / "tokenizer.json").write_text(tokens)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0  # nothing is added to the first dimension
    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    head = tensors["lm_head.weight"]
    head[:, 0] = 0
    save_file(tensors, folder / "model.safetensors")
    prompts = torch.randint(20, _VOCABULARY, (8, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        outputs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).model(prompts)
        hidden = outputs.last_hidden_state.flatten(0, 1)
        head *= _SPREAD / (hidden @ head.T).std()
        likeliest = (hidden @ head.T).max(dim=-1).values
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for text, share in _ENDS.items():
            (token,) = tokenizer.encode(text, add_special_tokens=False)
            head[token] = 0
            head[token, 0] = torch.quantile(likeliest / hidden[:, 0], share)
    save_file(tensors, folder / "model.safetensors")
    return folder


def adapter(name: str) -> Path:
    return hub() / f"models--{name.replace('/', '--')}" / "snapshots" / _REVISION


def _snapshot(cache: Path, name: str) -> Path:
    """A repository's folder, as huggingface_hub lays out its cache."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(_REVISION)
    snapshot = repository / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    return snapshot
