"""Keys of KV blocks: chained hashes of a block's token ids and all tokens before it, from prompts and engine events.

A block's key is XXH3 (64 bits, unsigned) of its token ids, each a 32-bit little-endian unsigned integer, with the key
of the block before it as the seed; the first block's seed is the prompt's salt. The token ids of an image are all the
same, so its mark follows those of each block that has a part of it. All hosts of a fleet must compute the same keys, or
prefixes are never found. Different prompts with equal keys cost a cache miss, never a wrong answer.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4
BEGINNING_TOKENS = 256


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
