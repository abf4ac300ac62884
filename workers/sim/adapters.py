"""The simulated engine's LoRA adapters: as in vLLM, a step has at most `max_loras` of them and waits for those that
are not on the device. They change no answer."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.config.simulated import Simulated
from workers.engine import AdapterUse

LOAD_S = 0.1  # to load an adapter, at `sim.speed` 1


class SimAdapters:
    """Without `max_loras`, adapters cost nothing. 0 is no adapter."""

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
