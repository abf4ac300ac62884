"""What a simulated engine has cached: the prompt blocks that it has written, by key, and LoRA adapters. No I/O.

As vLLM, it drops the least recently used first. Adapters change no answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from orchestrator.config.simulated import Simulated
from workers.engine import AdapterUse, PrefixChanges

LOAD_S = 0.1  # to load an adapter, at `sim.speed` 1


class SimPrefixCache:
    """Blocks of prompts, not of answers, as many as the engine has. Requests that share some reserve their own."""

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


class SimAdapters:
    """A step has at most `max_loras` of them, and waits for those that are not on the device. Without `max_loras`,
    adapters cost nothing. 0 is no adapter."""

    def __init__(self, config: Simulated) -> None:
        self.slots, self._load_s = config.max_loras, LOAD_S / config.speed
        self.use = AdapterUse(self.slots)
        self._device: dict[int, None] = {}  # used last, last

    def fits(self, adapter: int, running: Iterable[int]) -> bool:
        """Whether a request with this adapter may run beside those with the adapters `running`."""
        if not (adapter and self.slots):
            return True
        busy = set(running) - {0}
        return adapter in busy or len(busy) < self.slots

    def load_s(self, batch: Iterable[int]) -> float:
        """Load what a step with these adapters lacks. Returns the seconds that it takes."""
        if not self.slots:
            return 0.0
        wanted, lacking = dict.fromkeys(adapter for adapter in batch if adapter), 0
        for adapter in wanted:
            if adapter not in self._device:
                lacking += 1
                self.use.loaded(adapter, self._load_s)
            self._device.pop(adapter, None)
            self._device[adapter] = None
        for adapter in list(self._device)[: max(0, len(self._device) - self.slots)]:
            del self._device[adapter]
        return lacking * self._load_s
