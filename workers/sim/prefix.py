"""The simulated engine's prefix cache: the prompt blocks that it has written, by key. Pure: no clock, no I/O.

It holds as many keys as the engine has blocks, and drops the least recently used first, as vLLM does when it reuses
freed blocks. It holds prompts, not answers. Requests that share a prefix still reserve blocks of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from workers.engine import PrefixChanges


class SimPrefixCache:
    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._keys: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.changes = PrefixChanges()

    def __len__(self) -> int:
        return len(self._keys)

    def hit_blocks(self, keys: Sequence[int]) -> int:
        """The number of leading blocks that are cached. They count as used now."""
        count = 0
        while count < len(keys) and keys[count] in self._keys:
            count += 1
        # The first block becomes the most recently used one, so that a prefix is evicted from its end.
        for key in reversed(keys[:count]):
            self._keys.move_to_end(key)
        return count

    def store(self, keys: Sequence[int]) -> None:
        """Add blocks that have been written."""
        new = [key for key in keys if key not in self._keys]
        self._keys.update(dict.fromkeys(new))
        removed = [self._keys.popitem(last=False)[0] for _ in range(len(self._keys) - self._blocks)]
        if new:
            self.changes.stored(new)
            self.changes.removed(removed)

    def clear(self) -> None:
        self._keys.clear()
        self.changes.cleared()
