"""Copies of a tokenizer that share its vocabulary.

Transformers copies a tokenizer when it has read it, and vLLM for each thread that may need it, since truncation and
padding are set on it (vllm/tokenizers/hf.py, 0.32.0). A deep copy is written and read as JSON: for 49,152 tokens 0.15 s
and 11 to 22 MB. With each copy, deep or not, vLLM lists the vocabulary anew: 0.08 s and 5 MB. What a thread sets is a
copy's own here too, and no thread changes the vocabulary.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer
from transformers import TokenizersBackend, tokenization_utils_tokenizers
from vllm.renderers import hf as renderer
from vllm.tokenizers import hf


def with_same_vocabulary(tokenizer: Tokenizer) -> Tokenizer:
    made = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(made, part, value)
    if tokenizer.truncation is not None:
        made.enable_truncation(**tokenizer.truncation)
    if tokenizer.padding is not None:
        made.enable_padding(**tokenizer.padding)
    made.add_tokens([token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())])
    return made


def _can_share(of: Any) -> bool:
    """Not where another library has made it, or where tokens were added since vLLM has listed the vocabulary."""
    if not isinstance(of, TokenizersBackend) or type(of._tokenizer) is not Tokenizer:
        return False
    return len(of) == of._tokenizer.get_vocab_size()


def shallow_copy(of: Any) -> Any:
    """As copy.copy."""
    return _made(of, of.__dict__) if _can_share(of) else copy.copy(of)


def deep_copy(of: Any) -> Any:
    """As copy.deepcopy."""
    if type(of) is Tokenizer:
        return with_same_vocabulary(of)
    if not _can_share(of):
        return copy.deepcopy(of)
    return _made(of, copy.deepcopy(of.__dict__, {id(of._tokenizer): with_same_vocabulary(of._tokenizer)}))


def _made(of: Any, attributes: dict[str, Any]) -> Any:
    made = object.__new__(type(of))
    made.__dict__.update(attributes)
    return made


def install() -> None:
    """Make both copy so. They have no setting for this, so what they copy by is replaced."""
    for module in (hf, renderer, tokenization_utils_tokenizers):
        setattr(module, "copy", SimpleNamespace(copy=shallow_copy, deepcopy=deep_copy))  # noqa: B010 - for mypy
