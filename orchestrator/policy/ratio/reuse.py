"""How much of a prompt caches of any size would leave to compute: learned from when prefixes are used again.

A cache finds a block that is used again before it is evicted. How long a cache of some size keeps what nobody uses
follows from how fast it fills: in T seconds it takes in what prompts bring that was not used in the last T. (X. Hu et
al., "Kinetic modeling of data eviction in cache", USENIX ATC 2016; there T is the average eviction time.) So a count of
ages at reuse gives the hits of every size at once, and nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec

# One key in so many tokens of a prompt is looked at: blocks are small, and those of a prompt have much the same age.
SAMPLED_TOKENS = 256
MAX_KEYS = 65_536  # remembered, of the latest: 16 million tokens, about 10 MiB
# The ages, in seconds, that are told apart: sqrt(2) between two, from half a second to more than an hour.
AGES_S = tuple(2 ** (n / 2) / 2 for n in range(27))
NONE = (0.0,) * len(AGES_S)


class Reuse(msgspec.Struct, frozen=True):
    """Prompts that came, and what of them had been there before. `saved[n]` are tokens that were last used more than
    `AGES_S[n - 1]` before and at most `AGES_S[n]`; `saved2[n]` is by how much they lower the sum of squares."""

    prompts: int = 0
    tokens: float = 0.0
    tokens2: float = 0.0  # the sum of squares
    keyed: float = 0.0  # tokens of whole blocks, which caches keep
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
    """Counts the prompts of one router. A prefix key names all that is before it too, so that a key is never older than
    those after it in the same prompt."""

    def __init__(self) -> None:
        self._last_used: dict[int, float] = {}  # by key, in order
        self._begin()

    def _begin(self) -> None:
        self._prompts, self._tokens, self._tokens2, self._keyed = 0, 0.0, 0.0, 0.0
        self._saved, self._saved2 = list(NONE), list(NONE)

    def arrived(self, prompt_tokens: int, keys: Sequence[int], key_tokens: int, now: float) -> int:
        """A prompt, with a key for each `key_tokens` of it. `now`: seconds of any clock.

        Returns how many tokens of it came with another prompt at most `AGES_S[0]` ago: whatever is cached now, they are
        being computed.
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
        # The last first: what is forgotten first are then the ends of prompts.
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
            # Many at once: each search for the oldest walks over all entries that were deleted before.
            for key in list(islice(last_used, MAX_KEYS // 16)):
                del last_used[key]
        return shared

    def take(self) -> Reuse:
        """What came since it was last asked."""
        taken = Reuse(self._prompts, self._tokens, self._tokens2, self._keyed, tuple(self._saved), tuple(self._saved2))
        self._begin()
        return taken


class Curve(msgspec.Struct, frozen=True):
    """Of the mean prompt: the tokens that caches would leave to compute which keep a block for 0 s, and for each of
    `AGES_S`; the mean squares; and those of them that caches do not keep, as they fill no block."""

    uncached: tuple[float, ...]
    uncached2: tuple[float, ...]
    loose: float


def curve(counts: Iterable[Reuse]) -> Curve | None:
    """None where nothing came."""
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
    """What caches of so many tokens in all leave of a prompt, mean and mean square, and for how long they keep a block.

    Caches fill by what prompts bring that was not used for as long.
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
