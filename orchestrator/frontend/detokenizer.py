"""vLLM's detokenizer, begun with the end of the prompt in place of all of it.

To tell what text a first token adds, the tokenizer decodes the prompt twice, once without the token and once with it:
a fifth of what 1,024 prompt tokens cost a frontend. How a token is decoded depends on a few tokens before it: on the
bytes of a character that spreads over several, on a space between words, and on whether it is the first.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import tokenizers
from transformers import TokenizersBackend
from vllm.v1.engine import EngineCoreRequest, detokenizer
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from orchestrator.config.settings import ConfigError

_LENGTHS = (8, 16, 32)  # tokens; at least 8, since a character has up to four bytes, each a token or a part of one
_BROKEN = "\N{REPLACEMENT CHARACTER}"


def end_of_prompt(tokenizer: tokenizers.Tokenizer, prompt: list[int], skip_special_tokens: bool) -> list[int]:
    """The last tokens of a prompt, after which every token is decoded as it is after the whole prompt.

    All of the prompt where no end of it is plain text: one that begins within a character or a row of bytes, or that
    has no text, so that the next token would be decoded as the first.
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
    """Of those that are decoded together, however many there are: one that is no character spoils all of them."""
    return (tokenizer.id_to_token(token) or "").startswith("<0x")


class FleetDetokenizer(FastIncrementalDetokenizer):
    def __init__(self, tokenizer: TokenizersBackend, request: EngineCoreRequest) -> None:
        super().__init__(tokenizer, request)
        prompt = request.prompt_token_ids or []
        end = end_of_prompt(self.tokenizer, prompt, self.skip_special_tokens)
        if len(end) < len(prompt):
            self.stream = tokenizers.decoders.DecodeStream(ids=end, skip_special_tokens=self.skip_special_tokens)


def use_backend(name: str) -> None:
    """What turns text into tokens, and back, in tokenizers that vLLM makes from now on (`frontend.tokenizer_backend`).

    Raises ConfigError where it is not installed."""
    if name != "fastokens":
        return
    if find_spec(name) is None:
        raise ConfigError("frontend.tokenizer_backend: fastokens is not installed here; `pip install fastokens`")
    os.environ["VLLM_USE_FASTOKENS"] = "1"


def install() -> None:
    """vLLM makes its detokenizer in a function that has no other seam."""
    detokenizer.FastIncrementalDetokenizer = FleetDetokenizer
