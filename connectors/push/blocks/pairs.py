"""Which block here goes into which block of decode. Pure functions of block ids; no NIXL, no memory.

With decode context parallelism a rank of decode has a part of each prompt only. vLLM deals the tokens out in turns of
`cp_kv_cache_interleave_size`, which is the block size here, so that whole blocks go to one rank: block p of the prompt
to rank p modulo their number, as its part of decode's block p divided by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from connectors.push.actions import NO_BLOCK, Chunk, Post


class LayoutError(ValueError):
    """The two ends' blocks do not line up."""


class Shard(NamedTuple):
    """What a rank of decode has of each prompt: one of `size` blocks."""

    rank: int = 0
    size: int = 1

    def skipped(self, total_blocks: int, reserved: Sequence[int]) -> int:
        """How many of decode's blocks for a prompt of so many blocks are in its prefix cache, or outside of a window.
        Raises LayoutError."""
        theirs = -(-total_blocks // self.size)
        if len(reserved) > theirs:
            raise LayoutError(f"decode reserved {len(reserved)} blocks for a prompt of {theirs}")
        return theirs - len(reserved)

    def held(self, total_blocks: int, reserved: Sequence[int]) -> list[int]:
        """Of the reserved blocks those in which this rank has KV: the last one may have too little for all ranks."""
        if self.size == 1:
            return list(reserved)
        skip = self.skipped(total_blocks, reserved)
        count = max(0, -(-(total_blocks - self.rank) // self.size) - skip)
        return list(reserved[:count])


WHOLE = Shard()


def pair_blocks(
    chunks: Sequence[Chunk], total_blocks: int, remote: Sequence[int], group: int = 0, shard: Shard = WHOLE
) -> tuple[list[int], list[int]]:
    """Local and remote block ids of what a rank of decode still needs of this KV cache group of `chunks`.

    `remote` is for the last `len(remote)` of decode's blocks for the prompt: it has the earlier ones in its prefix
    cache, or they are outside of the group's window. NO_BLOCK stands for others that it has. Raises LayoutError.
    """
    skip = shard.skipped(total_blocks, remote)
    mine: list[int] = []
    theirs: list[int] = []
    for chunk in chunks:
        blocks = chunk.blocks[group]
        if chunk.start + len(blocks) > total_blocks:
            raise LayoutError(f"blocks {chunk.start}..{chunk.start + len(blocks)} of a prompt of {total_blocks}")
        first = chunk.start + (shard.rank - chunk.start) % shard.size
        first = max(first, skip * shard.size + shard.rank)
        found = blocks[first - chunk.start :: shard.size]
        at = first // shard.size - skip
        mine.extend(found)
        theirs.extend(remote[at : at + len(found)])
    if NO_BLOCK in mine or NO_BLOCK in theirs:
        kept = [(own, other) for own, other in zip(mine, theirs, strict=True) if NO_BLOCK not in (own, other)]
        return [own for own, _ in kept], [other for _, other in kept]
    return mine, theirs


def upwards(mine: Sequence[int], theirs: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same pairs by local block. NIXL copies neighbours as one where both ids go up, and vLLM's pool hands the
    blocks of an ended request out again from the last one."""
    pairs = sorted(zip(mine, theirs, strict=True))
    return [own for own, _ in pairs], [other for _, other in pairs]


def is_whole(post: Post) -> bool:
    """All that decode needs, in blocks that positions in the prompt do not describe."""
    return any(chunk.whole for chunk in post.chunks)


def pairs_of(post: Post, shard: Shard = WHOLE) -> list[tuple[list[int], list[int]]]:
    """(local, remote) logical block ids that `post` writes to a rank, by KV cache group. Raises LayoutError."""
    if not is_whole(post):
        groups = enumerate(post.order.blocks)
        return [pair_blocks(post.chunks, post.total_blocks, reserved, group, shard) for group, reserved in groups]
    (chunk,) = post.chunks
    return [
        (list(mine[len(mine) - len(theirs) :]), list(theirs))
        for mine, theirs in zip(chunk.blocks, post.order.blocks, strict=True)
    ]
