"""What of a chunk of computed blocks goes out, and where to: which of its layers while its later layers are still being
computed, and which of its blocks into which block of decode. No NIXL, no memory, nothing is sent from here.

With decode context parallelism a rank of decode has a part of each prompt only. vLLM deals the tokens out in turns of
`cp_kv_cache_interleave_size`, which is the block size here, so that whole blocks go to one rank: block p of the prompt
to rank p modulo their number, as its part of decode's block p divided by their number.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from connectors.push.actions import NO_BLOCK, Chunk, Post

_MOST_GROUPS = 8
_GROUP_S, _HALF_S = 0.001, 0.0005  # a WRITE that takes less costs more to post than it hides
_MIN_BYTES = 4 << 20  # a smaller WRITE takes about as long as it takes to see that it has ended
_KEEP_BYTES = 512 << 20
_PRIOR_BYTES_PER_S, _PRIOR_BYTES = 10e9, 64 << 20


def group_sizes(layers: int, size_bytes: int, bytes_per_s: float) -> list[int]:
    """How many of the layers of a last chunk of this size go out together, one group after the other.

    Decode waits for the last group, if the link keeps up with the engine. So one is an eighth of the layers, or more
    if that takes less than a millisecond, and the last one is halved while a half takes half a millisecond.
    """
    layer_s = size_bytes / bytes_per_s / layers
    if layer_s <= 0:
        return [layers]
    most = max(math.ceil(layers / _MOST_GROUPS), math.ceil(_GROUP_S / layer_s))
    left, sizes = layers, []
    while left > most:
        sizes.append(most)
        left -= most
    while (half := left // 2) * layer_s >= _HALF_S:
        sizes.append(left - half)
        left = half
    return [*sizes, left]


class LinkRate:
    """What the latest WRITEs of this worker say of its links, weighted by their sizes."""

    def __init__(self) -> None:
        self._bytes, self._seconds = float(_PRIOR_BYTES), _PRIOR_BYTES / _PRIOR_BYTES_PER_S
        self.bytes_per_s = _PRIOR_BYTES_PER_S

    def observe(self, size_bytes: float, seconds: float) -> None:
        if size_bytes < _MIN_BYTES or seconds <= 0:
            return
        keep = _KEEP_BYTES / (_KEEP_BYTES + size_bytes)
        self._bytes, self._seconds = keep * self._bytes + size_bytes, keep * self._seconds + seconds
        self.bytes_per_s = self._bytes / self._seconds


class StepLayers:
    """The layers of one step, of which each goes out once. The engine's thread reports each whose KV is queued on the
    device. `regions`: NIXL's of each layer that may go out before the others, by the layer's name; empty where they
    cannot be told apart. `one_by_one`: without `group_sizes`.

    Only the model's own forward pass sends layers early. A drafter's passes follow, and each writes its layers again.
    """

    def __init__(self, one_by_one: bool = False) -> None:
        self.link = LinkRate()
        self._one_by_one, self._block_bytes = one_by_one, 0
        self.regions: dict[str, tuple[int, ...]] = {}
        self._built: dict[str, int] = {}  # the place of each layer: a drafter is built after the model
        self._first = sys.maxsize  # the place of the earliest layer that has ever reported: it is the model's
        self._forward: object = None  # the pass in which it has in this step
        self._reported: list[int] = []  # regions, in the order in which the engine's hooks came
        self._stops: dict[str, tuple[int, ...]] = {}  # by key, after how many regions a group of its chunk goes out
        self._sent: dict[str, int] = {}  # by key, how many of the reported regions have gone out

    def know(self, region_names: Sequence[str], layer_names: Iterable[str], block_bytes: int) -> None:
        """`region_names`: the layer of each region; where layers share one, no hook tells when it is complete.
        `layer_names`: in the order in which they were built. `block_bytes`: of a block in all regions."""
        self._block_bytes = block_bytes
        if set(region_names) == set(layer_names):
            self._built = {name: place for place, name in enumerate(layer_names)}
            for region, name in enumerate(region_names):
                self.regions[name] = (*self.regions.get(name, ()), region)

    def report(self, layer_name: str, closing: Mapping[str, int], forward: object) -> dict[str, tuple[int, ...]]:
        """The layer's KV is written, or queued on the device: the regions that go out now, by the key of their prompt.

        `closing`: how many blocks each last chunk of this step has, by key. `forward`: the pass that wrote it.
        """
        if (place := self._built.get(layer_name, sys.maxsize)) <= self._first:
            self._first, self._forward = place, forward
        if forward is not self._forward:
            return {}
        new = [region for region in self.regions.get(layer_name, ()) if region not in self._reported]
        if not new:
            return {}
        self._reported += new
        due: dict[str, tuple[int, ...]] = {}
        total = sum(map(len, self.regions.values()))
        for key, blocks in closing.items():
            if (stops := self._stops.get(key)) is None:
                stops = self._stops[key] = tuple(itertools.accumulate(self._sizes(total, blocks)))
            sent = self._sent.get(key, 0)
            if any(sent < stop <= len(self._reported) for stop in stops):
                due[key] = tuple(self._reported[sent:])
                self._sent[key] = len(self._reported)
        return due

    def _sizes(self, regions: int, blocks: int) -> list[int]:
        if self._one_by_one:
            return [1] * regions
        return group_sizes(regions, blocks * self._block_bytes, self.link.bytes_per_s)

    def rest(self, key: str) -> tuple[int, ...] | None:
        """At the step's end: the regions of this last chunk that have not gone out; None for all of them."""
        if not (sent := self._sent.get(key, 0)):
            return None
        gone = set(self._reported[:sent])
        return tuple(region for regions in self.regions.values() for region in regions if region not in gone)

    def end(self) -> None:
        """The next step begins."""
        self._forward = None
        self._reported.clear()
        self._stops.clear()
        self._sent.clear()


# ---- into which block of decode ------------------------------------------------------------------------------------


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
