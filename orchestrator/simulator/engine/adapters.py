"""An engine's LoRA adapters: a step runs at most as many as there are slots, and waits for those it loads."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from orchestrator.simulator.engine.stay import Stay


class RunningStays(dict[Stay, None]):
    """The running stays, in order of admission, and the adapters on the device. The one that was used longest ago makes
    room for another, as in vLLM. Without slots, adapters cost nothing."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots, self.loads = slots, 0
        self._busy: Counter[int] = Counter()  # running stays by adapter
        self._device: OrderedDict[int, None] = OrderedDict()  # used last, last

    def fits(self, stay: Stay) -> bool:
        """Whether its adapter has a slot, or could have one: others wait, and let stays behind them go first."""
        adapter = stay.adapter if self.slots else 0
        return not adapter or adapter in self._busy or len(self._busy) < self.slots

    def join(self, stay: Stay) -> None:
        """Add a stay. Its adapter is loaded unless it is there."""
        self[stay] = None
        adapter = stay.adapter if self.slots else 0
        if not adapter:
            return
        self._busy[adapter] += 1
        if adapter not in self._device:
            self.loads += 1
            if len(self._device) >= self.slots:
                victim = next((known for known in self._device if known not in self._busy), None)
                if victim is not None:
                    del self._device[victim]
        self._device[adapter] = None
        self._device.move_to_end(adapter)

    def __delitem__(self, stay: Stay) -> None:
        super().__delitem__(stay)
        adapter = stay.adapter if self.slots else 0
        if adapter:
            self._device.move_to_end(adapter)
            self._busy[adapter] -= 1
            if not self._busy[adapter]:
                del self._busy[adapter]

    def clear(self) -> None:
        super().clear()
        self._busy.clear()
        self._device.clear()

    def requests(self, waiting: Iterable[Stay]) -> dict[int, int]:
        """What a worker reports: requests by adapter, idle ones first."""
        if not self.slots:
            return {}
        found = dict.fromkeys((known for known in self._device if known not in self._busy), 0) | self._busy
        for stay in waiting:
            if adapter := stay.adapter:
                found[adapter] = found.pop(adapter, 0) + 1
        return found
