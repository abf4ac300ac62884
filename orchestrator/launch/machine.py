"""Which CPU cores and which GPUs each worker gets. Arithmetic only; `find_*` at the end look at the machine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.settings import ConfigError

# vLLM's default for gpu_memory_utilization is near 1: without a number of its own, a worker has its GPUs to itself.
_WHOLE_GPU = 1.0


class CoreShares:
    """Hands out equal runs of neighbouring cores, one run per worker.

    A worker's compute threads wait for each other at every layer, so two workers on one core slow each other down
    by far more than half. On larger machines some cores stay free for the frontends, which are not pinned.
    """

    def __init__(self, cores: Sequence[int], workers: int, frontends: int, ranks: int = 1) -> None:
        spare = min(frontends, len(cores) // 8)
        size = max(ranks, (len(cores) - spare) // max(1, workers))
        self._runs = [list(cores[at : at + size]) for at in range(0, len(cores) - size + 1, size)]
        self._held: dict[str, list[int]] = {}

    def take(self, owner: str) -> list[int]:
        """The run that fewest share; empty (not pinned) when there are too few cores for its ranks."""
        if owner not in self._held:
            holders = list(self._held.values())
            self._held[owner] = min(self._runs, key=holders.count, default=[])
        return self._held[owner]

    def give_back(self, owner: str) -> None:
        self._held.pop(owner, None)


class GpuShares:
    """Hands out whole GPUs, or shares of them where gpu_memory_utilization says that a worker takes only a part."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._free = dict.fromkeys(gpus, _WHOLE_GPU)
        self._held: dict[str, tuple[list[str], float]] = {}

    def take(self, owner: str, ranks: int, utilization: float | None = None) -> list[str]:
        """As many distinct GPUs as `ranks`, the emptiest first. Raises ConfigError when they do not suffice."""
        if owner in self._held:
            return self._held[owner][0]
        share = utilization or _WHOLE_GPU
        fitting = [gpu for gpu, free in self._free.items() if free >= share - 1e-9]
        if len(fitting) < ranks:
            raise ConfigError(
                f"{owner}: needs {ranks} GPU(s) with {share:.0%} of the memory free, this machine has {len(fitting)} "
                f"left of {len(self._free)}; lower replicas or tensor_parallel_size, or set gpu_memory_utilization "
                "so that workers share GPUs"
            )
        # Emptiest first, then in the machine's order: neighbours are connected best.
        chosen = sorted(fitting, key=lambda gpu: -self._free[gpu])[:ranks]
        for gpu in chosen:
            self._free[gpu] -= share
        self._held[owner] = (chosen, share)
        return chosen

    def give_back(self, owner: str) -> None:
        gpus, share = self._held.pop(owner, ([], 0.0))
        for gpu in gpus:
            self._free[gpu] += share


def find_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def find_gpus(devices: Path = Path("/dev")) -> list[str]:
    """NVIDIA GPUs by the names CUDA_VISIBLE_DEVICES takes; that variable, when set, is the list to share out."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in re.split(r"\s*,\s*", visible.strip()) if gpu and gpu != "-1"]
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return [str(number) for number in sorted(int(match[1]) for match in found if match)]
