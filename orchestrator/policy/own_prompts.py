"""What a router knows of prefixes by its own prompts: which ones are being computed, and how soon they are used again.

A worker reports a block as stored when it is computed. Until then the next turn of a conversation, or another prompt of
a burst that shares its beginning, would be sent elsewhere and computed twice. The longer prompts wait, the more of them
would be, so that a fleet which has fallen behind would stay behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

# One key in so many tokens of a prompt is counted, because neighbouring blocks of a prompt have much the same age.
SAMPLED_TOKENS = 256
MAX_KEYS = 65_536  # the latest keys are remembered: 16 million tokens, about 10 MiB
# Bounds of the histogram's ages in seconds, a factor of sqrt(2) apart: from half a second to more than an hour.
AGES_S = tuple(2 ** (n / 2) / 2 for n in range(27))
NONE = (0.0,) * len(AGES_S)


class Reuse(msgspec.Struct, frozen=True):
    """Prompts that arrived, and how much of them had been used before.

    `saved[n]` counts tokens that were last used at least `AGES_S[n - 1]` and less than `AGES_S[n]` seconds before.
    `saved2[n]` is the amount by which a cache that holds these tokens lowers the sum of squared uncached tokens.
    """

    prompts: int = 0
    tokens: float = 0.0
    tokens2: float = 0.0  # squared prompt lengths, summed
    keyed: float = 0.0  # tokens in whole blocks; caches keep no others
    saved: tuple[float, ...] = NONE
    saved2: tuple[float, ...] = NONE

    def __add__(self, other: Reuse) -> Reuse:
        return Reuse(
            self.prompts + other.prompts,
            self.tokens + other.tokens,
            self.tokens2 + other.tokens2,
            self.keyed + other.keyed,
            tuple(map(float.__add__, self.saved, other.saved)),
            tuple(map(float.__add__, self.saved2, other.saved2)),
        )


class ReuseCounter:
    """Counts the prompts of one router, with the ages at which their prefixes are used again.

    A prefix key includes all blocks before it, so it was last used no earlier than the keys after it in a prompt.
    """

    def __init__(self) -> None:
        self._last_used: dict[int, float] = {}  # by key, least recently used first
        self._begin()

    def _begin(self) -> None:
        self._prompts, self._tokens, self._tokens2, self._keyed = 0, 0.0, 0.0, 0.0
        self._saved, self._saved2 = list(NONE), list(NONE)

    def arrived(self, prompt_tokens: int, keys: Sequence[int], key_tokens: int, now: float) -> int:
        """Count a prompt that has a key for each `key_tokens` tokens. `now`: seconds of any clock.

        Returns how many of its tokens arrived with another prompt less than `AGES_S[0]` seconds ago. They are being
        computed already, even if no cache reports them yet.
        """
        self._prompts += 1
        self._tokens += prompt_tokens
        self._tokens2 += prompt_tokens * prompt_tokens
        shared = 0
        if not keys:
            return shared
        self._keyed += len(keys) * key_tokens
        last_used, saved, saved2 = self._last_used, self._saved, self._saved2
        step = max(1, SAMPLED_TOKENS // key_tokens)
        part = step * key_tokens
        sampled = keys[step - 1 :: step]
        left = prompt_tokens - len(sampled) * part
        # The last key first, so that the ends of prompts are forgotten first.
        for key in reversed(sampled):
            left += part
            used_at = last_used.pop(key, None)
            last_used[key] = now
            if used_at is not None:
                age = int(4 * (now - used_at) ** 2).bit_length()
                if age == 0:
                    shared += part
                if age < len(saved):
                    saved[age] += part
                    saved2[age] += part * (2 * left - part)
        if len(last_used) > MAX_KEYS:
            # Delete many at once: each search for the oldest key walks over all entries deleted before.
            for key in list(islice(last_used, MAX_KEYS // 16)):
                del last_used[key]
        return shared

    def take(self) -> Reuse:
        """The counts since the last call."""
        taken = Reuse(self._prompts, self._tokens, self._tokens2, self._keyed, tuple(self._saved), tuple(self._saved2))
        self._begin()
        return taken


class ExpectedPrefixes:
    """The prompts that one router has sent. Keys are those of `PrefixIndex`."""

    def __init__(self, step: int) -> None:
        """One key in `step` is remembered, which bounds the work for a long prompt."""
        self._step = step
        # By key: the worker of the latest prompt, and the number of prompts.
        self._coming: dict[int, tuple[str, int]] = {}
        self._keys_of: dict[str, Sequence[int]] = {}

    def __len__(self) -> int:
        return len(self._keys_of)

    def sent(self, request_id: str, worker_id: str, keys: Sequence[int]) -> None:
        """A prompt with these keys was sent to a worker, which will compute it."""
        self.settled(request_id)
        sampled = keys[self._step - 1 :: self._step]
        if not sampled:
            return
        self._keys_of[request_id] = sampled
        coming = self._coming
        for key in sampled:
            known = coming.get(key)
            coming[key] = worker_id, known[1] + 1 if known is not None else 1

    def settled(self, request_id: str) -> None:
        """The prompt is computed, or will not be. Ignores unknown requests."""
        for key in self._keys_of.pop(request_id, ()):
            worker_id, prompts = self._coming[key]
            if prompts > 1:
                self._coming[key] = worker_id, prompts - 1
            else:
                del self._coming[key]

    def deepest(self, keys: Sequence[int]) -> tuple[str, int] | None:
        """The worker that will hold most leading blocks of a prompt, and their number."""
        if not self._coming:
            return None
        step, coming = self._step, self._coming
        # All keys before a known one are known, because a prompt is remembered from its first block on.
        low, high = 0, len(keys) // step
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle * step - 1] in coming:
                low = middle
            else:
                high = middle - 1
        return (coming[keys[low * step - 1]][0], low * step) if low else None
