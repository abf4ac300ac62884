"""Names for KV blocks and everything before them: chained hashes of token ids, from prompts and from engine events.

Python's own tuple hash of integers: no seed goes into it, so that every 64-bit CPython from 3.8 on gives the same, on
any host; one that did not would lose hits only, and a collision costs a cache miss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence


def salt_of(lora: str | None, cache_salt: str | None) -> int:
    """What keys begin with for prompts that share KV only with those of the same LoRA and cache salt. 0 for neither."""
    if not lora and not cache_salt:
        return 0
    digest = hashlib.blake2b(repr((lora or "", cache_salt or "")).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def prefix_keys(tokens: Sequence[int], block_size: int, salt: int = 0, max_blocks: int = 8192) -> list[int]:
    """The chained keys of a prompt's full blocks, first block first, at most `max_blocks`. `salt`: see `salt_of`."""
    keys: list[int] = []
    chain = salt
    full = min(len(tokens) // block_size, max_blocks)
    for start in range(0, full * block_size, block_size):
        chain = hash((chain, *tokens[start : start + block_size]))
        keys.append(chain)
    return keys


def reusable_keys(tokens: Sequence[int], block_size: int, salt: int = 0) -> list[int]:
    """Keys of the blocks that a prompt can take from a cache: its last token is always computed."""
    keys = prefix_keys(tokens, block_size, salt)
    return keys[:-1] if len(keys) * block_size == len(tokens) else keys


class EventTranslator:
    """One worker's engine block hashes as our keys: engines hash with secrets and formats of their own.

    vLLM's BlockStored gives engine hashes, the parent's hash and the token ids, which is all a chain needs; its
    BlockRemoved gives engine hashes only, hence the memory, which is as large as the worker's cache. Both come once for
    each block, and equal blocks may be cached several times: a key is held until the last of them has gone.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._held: dict[object, list[int]] = {}  # engine hash -> [key, copies]

    def stored(
        self, engine_hashes: Sequence[object], parent: object | None, tokens: Sequence[int], salt: int = 0
    ) -> list[int]:
        """Keys that are held now and were not before; empty when the parent is unknown. `salt` is for first blocks."""
        if parent is None:
            chain = salt
        elif (held := self._held.get(parent)) is not None:
            chain = held[0]
        else:
            return []
        keys: list[int] = []
        for index, engine_hash in enumerate(engine_hashes):
            start = index * self.block_size
            chain = hash((chain, *tokens[start : start + self.block_size]))
            if (held := self._held.get(engine_hash)) is not None:
                held[1] += 1
            else:
                self._held[engine_hash] = [chain, 1]
                keys.append(chain)
        return keys

    def removed(self, engine_hashes: Iterable[object]) -> list[int]:
        """Keys that are not held any more."""
        keys: list[int] = []
        for engine_hash in engine_hashes:
            if (held := self._held.get(engine_hash)) is not None:
                held[1] -= 1
                if not held[1]:
                    del self._held[engine_hash]
                    keys.append(held[0])
        return keys

    def clear(self) -> None:
        self._held.clear()
