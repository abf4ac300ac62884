"""The few workers worth considering out of a thousand, kept in order as loads change.

`KVBlocks` ranks a worker by a part that no request changes (its standing) and a part that is the same for workers
with equal pools. So the best by standing of each pool size, plus the workers with a prefix hit, contain its
choice; the very same policies then run on those few. A policy without a standing needs all candidates.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from itertools import count

import msgspec

from orchestrator.policy.candidate import Candidate

_Entry = tuple[float, int, Candidate]  # (minus its standing, version, itself); no two versions are equal


# Below this many workers asking each is as quick, and compares no two unequal pools as if they were equal.
SHORTLIST_FROM = 32


class Shortlist:
    """A sorted list per pool-size class: an update is two bisections, and the best are at its front.

    Pools within about 6% of each other share a class, and are compared as if equal until the policy sees them.
    """

    def __init__(self, standing: Callable[[Candidate], float], per_class: int = 4) -> None:
        self._standing = standing
        self._per_class = per_class
        self._current: dict[str, _Entry] = {}  # by worker
        self._classes: dict[int, list[_Entry]] = {}
        self._versions = count()

    def __len__(self) -> int:
        return len(self._current)

    def update(self, candidate: Candidate) -> None:
        """A new worker, or one whose load changed."""
        self.remove(candidate.worker_id)
        entry = (-self._standing(candidate), next(self._versions), candidate)
        self._current[candidate.worker_id] = entry
        insort(self._classes.setdefault(_size_class(candidate.blocks_total), []), entry)

    def remove(self, worker_id: str) -> None:
        entry = self._current.pop(worker_id, None)
        if entry is None:
            return
        size_class = _size_class(entry[2].blocks_total)
        entries = self._classes[size_class]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._classes[size_class]

    def pick(self, cached_tokens: Mapping[str, int]) -> list[Candidate]:
        """Every worker in `cached_tokens`, with its hit filled in, and the best others of each class."""
        current = self._current
        picked = [
            msgspec.structs.replace(current[worker_id][2], cached_tokens=tokens)
            for worker_id, tokens in cached_tokens.items()
            if worker_id in current
        ]
        for entries in self._classes.values():
            for _, _, candidate in entries[: self._per_class]:
                if candidate.worker_id not in cached_tokens:
                    picked.append(candidate)
        return picked


def _size_class(blocks_total: int) -> int:
    # The top four significant bits: classes between 6% and 12% wide, eight per doubling.
    shift = max(0, blocks_total.bit_length() - 4)
    return (blocks_total >> shift) << shift
