"""vLLM's detokenizer, started with the last tokens of the prompt instead of all of them.

To find the text that the first token adds, the tokenizer decodes the prompt twice, without the token and with it. That
is a fifth of what a prompt of 1,024 tokens costs a frontend. How a token is decoded depends on a few tokens before it
only: on the bytes of a character that spans several tokens, on a space between words, and on whether it is the first.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import tokenizers
from transformers import TokenizersBackend
from vllm.v1.engine import EngineCoreRequest, detokenizer
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from orchestrator.config.settings import ConfigError

_LENGTHS = (8, 16, 32)  # tokens; at least 8, since a character has up to four bytes, and each may be a token
_BROKEN = "\N{REPLACEMENT CHARACTER}"


def end_of_prompt(tokenizer: tokenizers.Tokenizer, prompt: list[int], skip_special_tokens: bool) -> list[int]:
    """The last tokens of a prompt such that tokens after them are decoded as after the whole prompt.

    The whole prompt if the last 8, 16 and 32 tokens each begin within a character, are byte tokens only, or have no
    text. (After tokens without text the next token would be decoded as the first one.)
    """
    for length in _LENGTHS:
        if length >= len(prompt):
            break
        end = prompt[-length:]
        text = tokenizer.decode(end, skip_special_tokens=skip_special_tokens)
        if text and _BROKEN not in text and not all(_is_byte(tokenizer, token) for token in end):
            return end
    return prompt


def _is_byte(tokenizer: tokenizers.Tokenizer, token: int) -> bool:
    """Whether it is a byte token. A run of them is decoded as a whole, and one invalid byte makes all unreadable."""
    return (tokenizer.id_to_token(token) or "").startswith("<0x")


class FleetDetokenizer(FastIncrementalDetokenizer):
    def __init__(self, tokenizer: TokenizersBackend, request: EngineCoreRequest) -> None:
        super().__init__(tokenizer, request)
        prompt = request.prompt_token_ids or []
        end = end_of_prompt(self.tokenizer, prompt, self.skip_special_tokens)
        if len(end) < len(prompt):
            self.stream = tokenizers.decoders.DecodeStream(ids=end, skip_special_tokens=self.skip_special_tokens)


def use_backend(name: str) -> None:
    """Set the library of the tokenizers that vLLM makes from now on (`frontend.tokenizer_backend`).

    Raises ConfigError if it is not installed."""
    if name != "fastokens":
        return
    if find_spec(name) is None:
        raise ConfigError("frontend.tokenizer_backend: fastokens is not installed here; `pip install fastokens`")
    os.environ["VLLM_USE_FASTOKENS"] = "1"


def install() -> None:
    """Make vLLM use `FleetDetokenizer`. It has no setting for this, so its own class is replaced."""
    detokenizer.FastIncrementalDetokenizer = FleetDetokenizer
