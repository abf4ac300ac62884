"""A tiny vision model of random weights, and its requests as vLLM's server makes them of tokens and pictures."""

from pathlib import Path
from typing import Any

from support_models import COMMON

PLACEHOLDER = 500  # the token that stands for a part of a picture
_START, _END = 502, 503
_PATCH, _MERGED = 14, 2


def vision_model(folder: Path) -> Path:
    """A PaddleOCR-VL, which has M-RoPE as Qwen2-VL has, and a processor that needs no torchvision: float32, a few MB,
    with a tokenizer for which a word is a token (t3, t4, ...). Written once per folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PaddleOCRVLConfig,
        PaddleOCRVLForConditionalGeneration,
        PaddleOCRVLImageProcessorPil,
        PreTrainedTokenizerFast,
    )

    if (folder / "preprocessor_config.json").exists():
        return folder
    torch.manual_seed(7)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = PaddleOCRVLConfig(
        text_config=COMMON | {"head_dim": 32, "num_hidden_layers": 2, "rope_parameters": rope},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 4 * _PATCH,
            "patch_size": _PATCH,
        },
        image_token_id=PLACEHOLDER,
        vision_start_token_id=_START,
        vision_end_token_id=_END,
        tie_word_embeddings=False,
    )
    PaddleOCRVLForConditionalGeneration(config).float().save_pretrained(folder)
    special = {0: "<pad>", 1: "<s>", 2: "</s>", PLACEHOLDER: "<|IMAGE_PLACEHOLDER|>"}
    special |= {_START: "<|IMAGE_START|>", _END: "<|IMAGE_END|>"}
    words = {special.get(token, f"t{token}"): token for token in range(COMMON["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image_token": special[PLACEHOLDER]},
        chat_template=_CHAT,
    ).save_pretrained(folder)
    sizes = {"shortest_edge": 28 * 28, "longest_edge": 448 * 448}
    PaddleOCRVLImageProcessorPil(size=sizes, patch_size=_PATCH, merge_size=_MERGED).save_pretrained(folder)
    return folder


_CHAT = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }} {% else %}"
    "<|IMAGE_START|> <|IMAGE_PLACEHOLDER|> <|IMAGE_END|> {% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def picture(seed: int, width: int = 168, height: int = 112) -> Any:
    """Of as many tokens as it has squares of 28 pixels."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8))


class Requests:
    """vLLM's own input processing. Make it after engines were started, which are forked from this process."""

    def __init__(self, model: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        from orchestrator.frontend.vllm_codec import VllmCodec

        arguments = AsyncEngineArgs(model=str(model), dtype="float32", max_model_len=2048, mm_processor_cache_gb=0)
        self.config = arguments.create_engine_config()
        self._renderer = renderer_from_config(self.config)
        self._processor = InputProcessor(self.config, self._renderer)
        self.codec = VllmCodec.of(self.config)

    def request(self, *parts: list[int] | Any, max_tokens: int = 8, cut: int | None = None, **sampling: Any) -> Any:
        """`parts`: tokens and pictures in turns. `cut`: how many tokens of the prompt are left."""
        from vllm.sampling_params import SamplingParams

        tokens: list[int] = []
        for part in parts:
            tokens += part if isinstance(part, list) else [_START, PLACEHOLDER, _END]
        pictures = [part for part in parts if not isinstance(part, list)]
        prompt = {"prompt_token_ids": tokens} | ({"multi_modal_data": {"image": pictures}} if pictures else {})
        (rendered,) = self._renderer.render_cmpl([prompt])
        params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | sampling)
        made = self._processor.process_inputs("r", rendered, params, ("generate",))
        made.external_req_id, made.request_id = None, "r"
        made.prompt_token_ids = made.prompt_token_ids[:cut]
        return made

    def read(self, *parts: list[int] | Any, block_tokens: int = 32, **more: Any) -> Any:
        """What the router gets of it."""
        return self.codec.read(self.request(*parts, **more), block_tokens)
