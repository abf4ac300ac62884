"""Prompts as text, which every peer takes: smg reads no token ids."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer


class Texts:
    """Words that the demo model's tokenizer has one token for each, so that lengths are those asked for."""

    def __init__(self, model: str, seed: int) -> None:
        tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        words = [
            word for word in tokenizer.get_vocab() if word[0] == "\u0120" and word[1:].isalpha() and word[1:].isascii()
        ]
        self._words = [" " + word[1:] for word in sorted(words)]
        self._random = random.Random(seed)

    def make(self, tokens: int, keys: tuple[int, ...] = (), unit_tokens: int = 0, own: int = 0) -> str:
        """`tokens` words that no other prompt begins with."""
        return "".join(self._random.choices(self._words, k=tokens))
