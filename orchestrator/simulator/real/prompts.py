"""Prompts of made-up token ids. They are cheap to make, and share as much of their beginnings as their keys say."""

from __future__ import annotations

import random
from typing import Protocol

_FIRST_ID = 100  # below it are a vocabulary's special tokens
_RING = 1 << 16  # ids that prompts are cut from
_MARK_IDS = 5  # at the start of a piece: they tell it from every other


class PromptSource(Protocol):
    def make(self, tokens: int, keys: tuple[int, ...] = (), unit_tokens: int = 0, own: int = 0) -> list[int] | str:
        """A prompt of that many tokens, as ids or as text."""


class Prompts:
    """`vocabulary` bounds the token ids. Equal seeds make equal prompts, different seeds different ones."""

    def __init__(self, vocabulary: int = 10_000, seed: int = 0) -> None:
        self._span = vocabulary - _FIRST_ID
        ring = random.Random(seed).choices(range(_FIRST_ID, vocabulary), k=_RING)
        self._ring = ring + ring
        self._seed = seed

    def make(self, tokens: int, keys: tuple[int, ...] = (), unit_tokens: int = 0, own: int = 0) -> list[int]:
        """`tokens` ids. Equal keys give equal units of `unit_tokens`; equal `own` give equal rests."""
        ids: list[int] = []
        for key in keys:
            ids += self._piece(unit_tokens, 2 * key)
        return ids + self._piece(tokens - len(ids), 2 * own + 1)

    def _piece(self, tokens: int, number: int) -> list[int]:
        """A number in digits of ids, then a cut of the ring that begins somewhere else for every number."""
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
