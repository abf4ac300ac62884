"""What the simulated engine answers: tokens instead of a model's."""

from __future__ import annotations

import zlib
from array import array

_EOS_AFTER_MIN, _EOS_AFTER_SPREAD = 64, 192


class TokenStream:
    """The tokens that follow a prompt: a pure function of the prompt and the position, so that a request that was
    retried, moved or prefilled elsewhere can be checked token by token. They are taken from the prompt's own tokens,
    which are valid in any vocabulary."""

    def __init__(self, prompt: list[int], eos_token_id: int | None = None) -> None:
        self._prompt = prompt
        self._eos = eos_token_id
        self._hash = zlib.crc32(array("q", prompt).tobytes())
        # The position at which the text ends, if the request has an end-of-sequence token.
        self.eos_at = _EOS_AFTER_MIN + self._hash % _EOS_AFTER_SPREAD

    def token(self, position: int) -> int:
        """Token number `position` after the prompt, from 0. Never the end-of-sequence token."""
        mixed = (self._hash + (position + 1) * 2654435761) & 0xFFFFFFFF
        token = self._prompt[(mixed ^ (mixed >> 15)) % len(self._prompt)]
        return token if token != self._eos else abs(token - 1)
