"""Which layers of a step's last chunks go out while its later layers are still being computed.

The engine's thread reports each layer whose KV is queued on the device. Nothing is sent from here.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence

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
    """The layers of one step, of which each goes out once. `regions`: NIXL's of each layer that may go out before the
    others, by the layer's name; empty where they cannot be told apart. `one_by_one`: without `group_sizes`.

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
