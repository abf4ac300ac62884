"""Names for KV blocks and everything before them: chained hashes of token ids, from prompts and from engine events.

Python's own tuple hash: fast, equal within one process, and a collision costs a cache miss only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def prefix_keys(tokens: Sequence[int], block_size: int, salt: int = 0, max_blocks: int = 8192) -> list[int]:
    """The chained keys of a prompt's full blocks, first block first, at most `max_blocks`.

    `salt` separates what must not share KV (a LoRA, a cache salt). Valid within one process only.
    """
    keys: list[int] = []
    chain = salt
    full = min(len(tokens) // block_size, max_blocks)
    for start in range(0, full * block_size, block_size):
        chain = hash((chain, *tokens[start : start + block_size]))
        keys.append(chain)
    return keys


class EventTranslator:
    """One worker's engine block hashes as our keys: engines hash with secrets and formats of their own.

    vLLM's BlockStored gives engine hashes, the parent's hash and the token ids, which is all a chain needs; its
    BlockRemoved gives engine hashes only, hence the memory, which is as large as the worker's cache.
    """

    def __init__(self, block_size: int, salt: int = 0) -> None:
        self.block_size = block_size
        self._salt = salt
        self._key_of: dict[object, int] = {}

    def stored(self, engine_hashes: Sequence[object], parent: object | None, tokens: Sequence[int]) -> list[int]:
        """Keys of newly stored blocks; empty when the parent is unknown (its event was lost)."""
        if parent is None:
            chain = self._salt
        elif parent in self._key_of:
            chain = self._key_of[parent]
        else:
            return []
        keys: list[int] = []
        for index, engine_hash in enumerate(engine_hashes):
            start = index * self.block_size
            chain = hash((chain, *tokens[start : start + self.block_size]))
            self._key_of[engine_hash] = chain
            keys.append(chain)
        return keys

    def removed(self, engine_hashes: Iterable[object]) -> list[int]:
        known = (self._key_of.pop(engine_hash, None) for engine_hash in engine_hashes)
        return [key for key in known if key is not None]

    def clear(self) -> None:
        self._key_of.clear()
