"""Prompts of random token ids. They are cheap to make, and prompts with the same keys begin with the same tokens."""

from __future__ import annotations

import random
from typing import Protocol

_FIRST_ID, _VOCABULARY = 100, 10_000  # lower ids may be special tokens
_RING = 1 << 16  # length of the ring of random ids that prompts are cut from
_MARK_IDS = 5  # ids at the start of a piece that differ from those of every other piece


class PromptSource(Protocol):
    def make(self, tokens: int, keys: tuple[int, ...] = (), unit_tokens: int = 0, own: int = 0) -> list[int] | str:
        """A prompt of `tokens` tokens, as ids or as text; the other arguments are those of `Prompts.make`."""


class Prompts:
    """Makes prompts of token ids below 10,000. Equal seeds make equal prompts, different seeds different ones."""

    def __init__(self, seed: int = 0) -> None:
        self._span = _VOCABULARY - _FIRST_ID
        ring = random.Random(seed).choices(range(_FIRST_ID, _VOCABULARY), k=_RING)
        self._ring = ring + ring
        self._seed = seed

    def make(self, tokens: int, keys: tuple[int, ...] = (), unit_tokens: int = 0, own: int = 0) -> list[int]:
        """A prompt of `tokens` ids: a unit of `unit_tokens` for each key, then a rest. Equal keys give equal units, and
        equal numbers `own` give equal rests."""
        ids: list[int] = []
        for key in keys:
            ids += self._piece(unit_tokens, 2 * key)
        return ids + self._piece(tokens - len(ids), 2 * own + 1)

    def _piece(self, tokens: int, number: int) -> list[int]:
        """A piece of a prompt: the digits of `number` as ids, then a cut of the ring whose start depends on it."""
        number += self._seed << 40
        digits = []
        left = number
        for _ in range(min(tokens, _MARK_IDS)):
            left, digit = divmod(left, self._span)
            digits.append(_FIRST_ID + digit)
        at, ids = number * 7919 % _RING, digits
        while len(ids) < tokens:
            ids = ids + self._ring[at : at + min(_RING, tokens - len(ids))]
        return ids
