"""Which block here goes into which block of decode. Pure functions of block ids; no NIXL, no memory."""

from __future__ import annotations

from collections.abc import Sequence

from connectors.push.actions import NO_BLOCK, Chunk, Post


class LayoutError(ValueError):
    """The two ends' blocks do not line up."""


def pair_blocks(
    chunks: Sequence[Chunk], total_blocks: int, remote: Sequence[int], group: int = 0
) -> tuple[list[int], list[int]]:
    """Local and remote block ids of what decode still needs of this KV cache group of `chunks`.

    `remote` is for the last `len(remote)` blocks of the prompt: the decode engine has the earlier ones in its prefix
    cache, or they are outside of the group's window. Raises LayoutError.
    """
    skip = total_blocks - len(remote)
    if skip < 0:
        raise LayoutError(f"decode reserved {len(remote)} blocks for a prompt of {total_blocks}")
    mine: list[int] = []
    theirs: list[int] = []
    for chunk in chunks:
        blocks = chunk.blocks[group]
        first = max(0, skip - chunk.start)
        end = chunk.start + len(blocks) - skip
        if end > len(remote):
            raise LayoutError(f"blocks {chunk.start}..{chunk.start + len(blocks)} of a prompt of {total_blocks}")
        if first < len(blocks):
            mine.extend(blocks[first:])
            theirs.extend(remote[chunk.start + first - skip : end])
    if NO_BLOCK in mine:
        kept = [(own, other) for own, other in zip(mine, theirs, strict=True) if own != NO_BLOCK]
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


def pairs_of(post: Post) -> list[tuple[list[int], list[int]]]:
    """(local, remote) logical block ids that `post` writes, by KV cache group. Raises LayoutError."""
    if not is_whole(post):
        groups = enumerate(post.order.blocks)
        return [pair_blocks(post.chunks, post.total_blocks, reserved, group) for group, reserved in groups]
    (chunk,) = post.chunks
    return [
        (list(mine[len(mine) - len(theirs) :]), list(theirs))
        for mine, theirs in zip(chunk.blocks, post.order.blocks, strict=True)
    ]
