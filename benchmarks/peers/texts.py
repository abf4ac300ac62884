"""Prompts as text, which every peer accepts: smg does not accept token ids."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer


class Texts:
    """Prompts of words that are one token each for the demo model's tokenizer, so that they have the length wanted."""

    def __init__(self, model: str, seed: int) -> None:
        tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        words = [
            word for word in tokenizer.get_vocab() if word[0] == "\u0120" and word[1:].isalpha() and word[1:].isascii()
        ]
        self._words = [" " + word[1:] for word in sorted(words)]
        self._random = random.Random(seed)

    def make(self, tokens: int, keys: tuple[int, ...] = (), unit_tokens: int = 0, own: int = 0) -> str:
        """A prompt of `tokens` random words, so that prompts share no prefix."""
        return "".join(self._random.choices(self._words, k=tokens))
