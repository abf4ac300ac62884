"""Which layers of a step's last chunks go out while its later layers are still being computed.

The engine's thread reports each layer whose KV is queued on the device. Nothing is sent from here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from connectors.push.metadata import Computed

Groups = Callable[[int, int], Sequence[int]]  # (regions, blocks of a chunk) -> how many regions go out together


class StepLayers:
    """The layers of one step, of which each goes out once. `regions`: NIXL's of each layer that may go out before the
    others, by the layer's name; empty where they cannot be told apart."""

    def __init__(self) -> None:
        self.regions: dict[str, tuple[int, ...]] = {}
        self._reported: list[int] = []  # regions, in the order in which the engine's hooks came
        self._stops: dict[str, tuple[int, ...]] = {}  # by key, after how many regions a group of its chunk goes out
        self._sent: dict[str, int] = {}  # by key, how many of the reported regions have gone out

    def know(self, region_names: Sequence[str], layer_names: Iterable[str]) -> None:
        """`region_names`: the layer of each region. Where layers share a region, no hook tells when it is complete."""
        if set(region_names) == set(layer_names):
            for region, name in enumerate(region_names):
                self.regions[name] = (*self.regions.get(name, ()), region)

    def report(self, layer_name: str, closing: Sequence[Computed], groups: Groups) -> list[tuple[Computed, list[int]]]:
        """The layer's KV is written, or queued on the device: the last chunks of which regions go out now, and which.

        A layer that reports again, as a drafter's does in each of its passes, has nothing more for this prompt.
        """
        new = [region for region in self.regions.get(layer_name, ()) if region not in self._reported]
        if not new:
            return []
        self._reported += new
        due = []
        total = sum(map(len, self.regions.values()))
        for computed in closing:
            if (stops := self._stops.get(computed.key)) is None:
                sizes = groups(total, len(computed.blocks[0]))
                stops = self._stops[computed.key] = tuple(itertools.accumulate(sizes))
            sent = self._sent.get(computed.key, 0)
            if any(sent < stop <= len(self._reported) for stop in stops):
                due.append((computed, self._reported[sent:]))
                self._sent[computed.key] = len(self._reported)
        return due

    def rest(self, key: str) -> list[int] | None:
        """At the step's end: the regions of this last chunk that have not gone out; None for all of them."""
        if not (sent := self._sent.get(key, 0)):
            return None
        gone = set(self._reported[:sent])
        return [region for regions in self.regions.values() for region in regions if region not in gone]

    def end(self) -> None:
        """The next step begins."""
        self._reported.clear()
        self._stops.clear()
        self._sent.clear()
