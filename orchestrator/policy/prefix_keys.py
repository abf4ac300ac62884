"""Prefixes of prompts by the keys of their blocks: how a key is made, of a prompt or of an engine's events, and what a
router knows by its own prompts: which prefixes are being computed, and how soon they are used again.

A block's key is a chained hash: XXH3 (64 bits, unsigned) of its token ids, each a 32-bit little-endian unsigned
integer, with the key of the block before it as the seed; the first block's seed is the prompt's salt. The token ids of
an image are all the same, so its mark follows those of each block that has a part of it. All hosts of a fleet must
compute the same keys, or prefixes are never found. Different prompts with equal keys cost a cache miss, never a wrong
answer.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4
BEGINNING_TOKENS = 256
# One key in so many tokens of a prompt is counted, because neighbouring blocks of a prompt have much the same age.
SAMPLED_TOKENS = 256
MAX_KEYS = 65_536  # the latest keys are remembered: 16 million tokens, about 10 MiB
# Bounds of the histogram's ages in seconds, a factor of sqrt(2) apart: from half a second to more than an hour.
AGES_S = tuple(2 ** (n / 2) / 2 for n in range(27))
NONE = (0.0,) * len(AGES_S)


class Medium(NamedTuple):
    """An image, video or sound in a prompt. `identifier`: the engine's hash of its content."""

    identifier: str
    start: int  # its first token
    tokens: int


# What a block's key has of one medium: its identifier, and its first token relative to the block's.
Mark = tuple[str, int]
Marks = Mapping[int, Sequence[Mark]]  # by the number of the block


def salt_of(lora: str | None, cache_salt: str | None) -> int:
    """The seed of the first block, so that prompts share KV only with those of the same LoRA and cache salt. 0 without
    either.

    XXH3 of the LoRA's name and the salt in UTF-8, each after its length in bytes (32-bit little-endian).
    """
    if not lora and not cache_salt:
        return 0
    names = [(name or "").encode(errors="surrogatepass") for name in (lora, cache_salt)]
    return xxh3_64_intdigest(b"".join(len(name).to_bytes(4, "little") + name for name in names))


def prefix_keys(
    tokens: Sequence[int], block_size: int, salt: int = 0, media: Iterable[Medium] = (), max_blocks: int = 8192
) -> list[int]:
    """The keys of a prompt's full blocks, first block first, at most `max_blocks`. `salt`: see `salt_of`. `media`: in
    the order in which they begin."""
    full = min(len(tokens) // block_size, max_blocks)
    return _chain(tokens, full, block_size, salt, _marks(media, block_size, full))


def reusable_keys(tokens: Sequence[int], block_size: int, salt: int = 0, media: Iterable[Medium] = ()) -> list[int]:
    """Keys of the blocks that a prompt can take from a cache. Its last token is always computed, so a last block that
    ends with the prompt is left out."""
    keys = prefix_keys(tokens, block_size, salt, media)
    return keys[:-1] if len(keys) * block_size == len(tokens) else keys


def key_of_beginning(keys: Sequence[int], block_tokens: int) -> int | None:
    """The key of a prompt's first `BEGINNING_TOKENS`, or of as many as have keys; None without keys. Prompts with the
    same beginning have the same one."""
    return keys[min(len(keys), max(1, BEGINNING_TOKENS // block_tokens)) - 1] if keys else None


class EventTranslator:
    """Translates the block hashes of one worker's engine to our keys. Engines have secrets and formats of their own.

    vLLM's BlockStored has the engine's hashes, the parent's hash and the token ids, from which the keys are computed.
    Its BlockRemoved has only the engine's hashes, so the translator remembers the key of every cached block. Both come
    once per block, and equal blocks may be cached several times: a key is held until the last of them is removed. So it
    is with the copies in host memory, which are counted by themselves: what one medium loses, the other still has. A
    key is *hosted* while host memory alone has it.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._held: dict[object, list[int]] = {}  # engine hash -> [key, copies on the device, in host memory]

    def stored(
        self,
        engine_hashes: Sequence[object],
        parent: object | None,
        tokens: Sequence[int],
        salt: int = 0,
        marks: Marks | None = None,
    ) -> list[int]:
        """The keys that the device newly holds; none if the parent is not known. `salt` seeds blocks without one."""
        if parent is None:
            chain = salt
        elif (held := self._held.get(parent)) is not None:
            chain = held[0]
        else:
            return []
        keys: list[int] = []
        chained = _chain(tokens, len(engine_hashes), self.block_size, chain, marks or {})
        for engine_hash, key in zip(engine_hashes, chained, strict=True):
            held = self._held.setdefault(engine_hash, [key, 0, 0])
            held[1] += 1
            if held[1] == 1:
                keys.append(key)
        return keys

    def copied(self, engine_hashes: Iterable[object]) -> None:
        """They are in host memory too, from now on. An engine copies what its device has: others have no key."""
        for engine_hash in engine_hashes:
            if (held := self._held.get(engine_hash)) is not None:
                held[2] += 1

    def removed(self, engine_hashes: Iterable[object], *, from_host: bool = False) -> tuple[list[int], list[int]]:
        """The keys that are no longer held, and those that are hosted now."""
        keys: list[int] = []
        hosted: list[int] = []
        copies = 2 if from_host else 1
        for engine_hash in engine_hashes:
            if (held := self._held.get(engine_hash)) is not None and held[copies]:
                held[copies] -= 1
                if not held[1] and not held[2]:
                    del self._held[engine_hash]
                    keys.append(held[0])
                elif not held[1] and not from_host:
                    hosted.append(held[0])
        return keys, hosted

    def clear(self) -> None:
        self._held.clear()


def _marks(media: Iterable[Medium], block_size: int, blocks: int) -> Marks:
    marks: dict[int, list[Mark]] = defaultdict(list)
    for identifier, start, tokens in media:
        for block in range(max(0, start // block_size), min(blocks, -(-(start + tokens) // block_size))):
            marks[block].append((identifier, start - block * block_size))
    return marks


def _chain(tokens: Sequence[int], blocks: int, block_size: int, seed: int, marks: Marks) -> list[int]:
    count, width = blocks * block_size, block_size * TOKEN_BYTES
    packed = struct.pack(f"<{count}I", *tokens[:count])
    parts = [packed[start : start + width] for start in range(0, len(packed), width)]
    for block, found in marks.items():
        parts[block] += b"".join(map(_packed, found))
    return [seed := xxh3_64_intdigest(part, seed) for part in parts]


def _packed(mark: Mark) -> bytes:
    """The identifier in UTF-8 after its length in bytes, then the place; both numbers 32-bit little-endian."""
    identifier, place = mark[0].encode(errors="surrogatepass"), mark[1]
    return struct.pack("<I", len(identifier)) + identifier + struct.pack("<i", place)


# ---- what a router's own prompts tell ------------------------------------------------------------------------


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
    """The prompts that one router has sent, until they are computed.

    A worker reports a block as stored when it is computed. Until then the next turn of a conversation, or another
    prompt of a burst that shares its beginning, would be sent elsewhere and computed twice. The longer prompts wait,
    the more of them would be, so that a fleet which has fallen behind would stay behind.
    """

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
