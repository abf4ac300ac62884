"""The few workers worth considering out of a thousand, kept in order as loads change.

`KVBlocks` ranks a worker by a part that no request changes (its standing) and a part that is the same for workers
with equal pools. So the best by standing of each pool size, plus the workers with a prefix hit, contain its
choice; the very same policies then run on those few. A policy without a standing needs all candidates.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from itertools import count

import msgspec

from orchestrator.policy.decode_choice import Candidate


class Shortlist:
    """Lazy heaps, one per pool-size class: an update is one push, a stale entry is dropped when it surfaces.

    Pools within about 6% of each other share a class, and are compared as if equal until the policy sees them.
    """

    def __init__(self, standing: Callable[[Candidate], float], per_class: int = 4) -> None:
        self._standing = standing
        self._per_class = per_class
        self._current: dict[str, tuple[int, Candidate]] = {}  # by worker: (version, candidate)
        self._heaps: dict[int, list[tuple[float, int, str]]] = {}
        self._versions = count()

    def __len__(self) -> int:
        return len(self._current)

    def update(self, candidate: Candidate) -> None:
        """A new worker, or one whose load changed."""
        version = next(self._versions)
        self._current[candidate.worker_id] = (version, candidate)
        pool_class = _size_class(candidate.blocks_total)
        heap = self._heaps.setdefault(pool_class, [])
        heapq.heappush(heap, (-self._standing(candidate), version, candidate.worker_id))
        if len(heap) > 4 * len(self._current) + 64:
            self._heaps[pool_class] = heap = [entry for entry in heap if self._is_current(entry)]
            heapq.heapify(heap)

    def remove(self, worker_id: str) -> None:
        self._current.pop(worker_id, None)

    def get(self, worker_id: str) -> Candidate | None:
        entry = self._current.get(worker_id)
        return entry[1] if entry else None

    def pick(self, cached_tokens: Mapping[str, int] | None = None) -> list[Candidate]:
        """The best of each class, and every worker in `cached_tokens` with its hit filled in."""
        hits = cached_tokens or {}
        picked = {
            worker_id: msgspec.structs.replace(known[1], cached_tokens=tokens)
            for worker_id, tokens in hits.items()
            if (known := self._current.get(worker_id))
        }
        for pool_class, heap in list(self._heaps.items()):
            best: list[tuple[float, int, str]] = []
            while heap and len(best) < self._per_class:
                entry = heapq.heappop(heap)
                if self._is_current(entry):
                    best.append(entry)
            for entry in best:
                heapq.heappush(heap, entry)
                picked.setdefault(entry[2], self._current[entry[2]][1])
            if not best:
                del self._heaps[pool_class]
        return list(picked.values())

    def _is_current(self, entry: tuple[float, int, str]) -> bool:
        current = self._current.get(entry[2])
        return current is not None and current[0] == entry[1]


def _size_class(blocks_total: int) -> int:
    # The top four significant bits: classes between 6% and 12% wide, eight per doubling.
    shift = max(0, blocks_total.bit_length() - 4)
    return (blocks_total >> shift) << shift
