"""Lends prefixes: pins blocks of this engine's prefix cache while they are sent to an engine that lacks them.

No request owns them and nothing is computed. Blocks are found by vLLM's own hashes of their tokens, so that a wrong
belief about this cache costs its asker a miss, never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

_LEFT_SHARE = 1 / 8  # of all blocks: so many stay free for the requests here, else nothing is lent


class Lending:
    """The prefixes that are being sent, by the key of their transfer."""

    def __init__(self) -> None:
        self.pool: BlockPool | None = None  # of the engine, once that has made it
        self.pinned: dict[str, list[KVCacheBlock]] = {}

    def pin(self, key: str, hashes: Sequence[BlockHash], first_kept: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The cached blocks of `hashes`, by KV cache group, of each from its `first_kept` on; kept until `unpin`.
        Empty, and nothing is kept, where one is not cached or memory is short."""
        pool = self.pool
        if pool is None or not hashes:
            return ()
        found: list[tuple[int, ...]] = []
        pinned: list[KVCacheBlock] = []
        for group, first in enumerate(first_kept):
            blocks = [pool.get_cached_block(block_hash, [group]) for block_hash in hashes[first:]]
            if None in blocks:
                return ()
            kept = [block for each in blocks if each is not None for block in each]
            found.append(tuple(block.block_id for block in kept))
            pinned += kept
        taken = sum(block.ref_cnt == 0 for block in pinned)
        if pool.get_num_free_blocks() - taken < _LEFT_SHARE * pool.num_gpu_blocks:
            return ()
        pool.touch(pinned)
        self.pinned[key] = pinned
        return tuple(found)

    def unpin(self, keys: Iterable[str]) -> set[str]:
        """Give back what was lent under these keys. Returns those that were."""
        lent = self.pinned.keys() & set(keys)
        for key in lent:
            assert self.pool is not None
            self.pool.free_blocks(reversed(self.pinned.pop(key)))  # the end of a prefix is evicted first
        return lent
