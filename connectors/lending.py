"""Lends prefixes: pins blocks of this engine's prefix cache while they are sent to an engine that lacks them.

No request owns them and nothing is computed. Blocks are found by vLLM's own hashes of their tokens, so that a wrong
belief about this cache costs its asker a miss, never a wrong answer. What only the host tier has is loaded first, into
blocks of the device that are given back once it was sent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

    from connectors.host.tier import HostTier

# Of all blocks: so many stay free for the requests here, else nothing is lent; and while the host tier loads more than
# so many, for whomever, it loads none to lend.
_LEFT_SHARE = 1 / 8
_LOAD_S = 2.0  # what is not loaded by then is not sent: who asked for it has given up (`policy/decode_choice.py`)
_UNWANTED = None, math.inf  # nothing is told of it


class Lending:
    """The prefixes that are being sent, by the key of their transfer."""

    def __init__(self) -> None:
        self.pool: BlockPool | None = None  # of the engine, once that has made it
        self.tier: HostTier | None = None
        self.pinned: dict[str, list[KVCacheBlock]] = {}
        # Of them, those that the tier still loads: what is told of each then, and until when.
        self.loading: dict[str, tuple[Any, float]] = {}

    def pin(self, key: str, hashes: Sequence[BlockHash], first_kept: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The device's blocks of `hashes`, by KV cache group, of each from its `first_kept` on; kept until `unpin`. The
        tier `loads` this key where it has not them all yet. Empty, and nothing is kept, where one is not cached or
        memory is short."""
        pool = self.pool
        if pool is None or not hashes:
            return ()
        wanted = [(group, block_hash) for group, first in enumerate(first_kept) for block_hash in hashes[first:]]
        found = [pool.get_cached_block(block_hash, [group]) for group, block_hash in wanted]
        lacking = [want for want, block in zip(wanted, found, strict=True) if block is None]
        limit = _LEFT_SHARE * pool.num_gpu_blocks
        held = self._in_host_memory(lacking, limit)
        if len(held) < len(lacking):
            return ()
        cached = [block for each in found if each is not None for block in each]
        taken = sum(block.ref_cnt == 0 for block in cached) + len(lacking)
        if pool.get_num_free_blocks() - taken < limit:
            return ()
        pool.touch(cached)
        new = pool.get_new_blocks(len(lacking))
        if self.tier is not None and new:
            self.tier.load(key, held, new)
        ahead = iter(new)
        blocks = self.pinned[key] = [each[0] if each is not None else next(ahead) for each in found]
        ids = [[] for _ in first_kept]  # type: list[list[int]]
        for (group, _), block in zip(wanted, blocks, strict=True):
            ids[group].append(block.block_id)
        return tuple(map(tuple, ids))

    def _in_host_memory(self, wanted: Sequence[tuple[int, BlockHash]], limit: float) -> list[KVCacheBlock]:
        if self.tier is None or not wanted or self.tier.loading_blocks > limit:
            return []
        return self.tier.held(wanted)

    def send_later(self, key: str, told: Any) -> bool:
        """Whether the tier loads it first; `loaded` returns `told` then."""
        if self.tier is None or not self.tier.loads(key):
            return False
        self.loading[key] = told, time.monotonic() + _LOAD_S
        return True

    def loaded(self, keys: Iterable[str]) -> list[Any]:
        """The tier has loaded these. Returns what is told of those that are wanted; the others are given back."""
        told = {key: self.loading.pop(key)[0] for key in keys}
        self.unpin(key for key, wanted in told.items() if wanted is None)
        return [wanted for wanted in told.values() if wanted is not None]

    def forget(self, keys: Iterable[str]) -> set[str]:
        """Nobody wants these any more. Returns those that are being loaded: they are given back after that."""
        unwanted = self.loading.keys() & set(keys)
        self.loading.update(dict.fromkeys(unwanted, _UNWANTED))
        return unwanted

    def forget_late(self) -> set[str]:
        """Those whose load has taken too long: they are forgotten."""
        now = time.monotonic()
        return self.forget([key for key, (_, late_at) in self.loading.items() if late_at <= now])

    def unpin(self, keys: Iterable[str]) -> set[str]:
        """Give back what was lent under these keys. Returns those that were."""
        lent = self.pinned.keys() & set(keys)
        for key in lent:
            assert self.pool is not None
            self.pool.free_blocks(reversed(self.pinned.pop(key)))  # the end of a prefix is evicted first
        return lent
