"""Which layers of a step's last chunks go out while its later layers are still being computed.

The engine's thread reports each layer whose KV is queued on the device. Nothing is sent from here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

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

    def report(self, layer_name: str, closing: Mapping[str, int], groups: Groups) -> dict[str, tuple[int, ...]]:
        """The layer's KV is written, or queued on the device: the regions that go out now, by the key of their prompt.

        `closing`: how many blocks each last chunk of this step has, by key. A layer that reports again, as a drafter's
        does in each of its passes, has nothing more for these prompts.
        """
        new = [region for region in self.regions.get(layer_name, ()) if region not in self._reported]
        if not new:
            return {}
        self._reported += new
        due: dict[str, tuple[int, ...]] = {}
        total = sum(map(len, self.regions.values()))
        for key, blocks in closing.items():
            if (stops := self._stops.get(key)) is None:
                stops = self._stops[key] = tuple(itertools.accumulate(groups(total, blocks)))
            sent = self._sent.get(key, 0)
            if any(sent < stop <= len(self._reported) for stop in stops):
                due[key] = tuple(self._reported[sent:])
                self._sent[key] = len(self._reported)
        return due

    def rest(self, key: str) -> tuple[int, ...] | None:
        """At the step's end: the regions of this last chunk that have not gone out; None for all of them."""
        if not (sent := self._sent.get(key, 0)):
            return None
        gone = set(self._reported[:sent])
        return tuple(region for regions in self.regions.values() for region in regions if region not in gone)

    def end(self) -> None:
        """The next step begins."""
        self._reported.clear()
        self._stops.clear()
        self._sent.clear()
