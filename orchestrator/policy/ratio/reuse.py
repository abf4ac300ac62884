"""The uncached tokens of prompts for a cache of any size, learned from the times after which prefixes are used again.

A cache finds a block that is used again before it is evicted. How long it keeps an unused block follows from its size:
in T seconds it takes in the blocks that prompts bring and that were not used in the last T seconds. (X. Hu et al.,
"Kinetic modeling of data eviction in cache", USENIX ATC 2016; there T is the average eviction time.) So one histogram
of ages at reuse gives the hits for every cache size, and nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class Curve(msgspec.Struct, frozen=True):
    """Uncached tokens of the mean prompt, by how long caches keep an unused block: 0 s, then each of `AGES_S`.

    `uncached2` has the means of their squares. `loose` are the tokens of the mean prompt that fill no block, which
    caches never keep.
    """

    uncached: tuple[float, ...]
    uncached2: tuple[float, ...]
    loose: float


def curve(counts: Iterable[Reuse]) -> Curve | None:
    """The curve of all counts together; None if no prompt arrived."""
    total = sum(counts, Reuse())
    count = total.prompts
    if not count:
        return None
    left, left2 = total.tokens, total.tokens2
    uncached, uncached2 = [left / count], [left2 / count]
    for saved, saved2 in zip(total.saved, total.saved2, strict=True):
        left, left2 = left - saved, left2 - saved2
        uncached.append(left / count)
        uncached2.append(left2 / count)
    return Curve(tuple(uncached), tuple(uncached2), (total.tokens - total.keyed) / count)


def uncached(of: Curve, cache_tokens: float, prompts_per_s: float) -> tuple[float, float, float]:
    """For caches of `cache_tokens` in all: mean uncached tokens of a prompt, their mean square, and the seconds for
    which the caches keep an unused block.

    The caches fill by the blocks that were not used within that time; the walk ends at the age at which they are full.
    """
    filled, before_s = 0.0, 0.0
    for n, age_s in enumerate(AGES_S):
        u0, u1 = of.uncached[n], of.uncached[n + 1]
        more = prompts_per_s * (age_s - before_s) * ((u0 + u1) / 2 - of.loose)
        if filled + more >= cache_tokens:
            share = (cache_tokens - filled) / more if more > 0 else 1.0
            return (
                u0 + share * (u1 - u0),
                of.uncached2[n] + share * (of.uncached2[n + 1] - of.uncached2[n]),
                before_s + share * (age_s - before_s),
            )
        filled, before_s = filled + more, age_s
    return of.uncached[-1], of.uncached2[-1], AGES_S[-1]
