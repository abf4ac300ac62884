"""The few workers worth considering out of a thousand, kept in order as loads change.

`KVBlocks` ranks a worker by a part that no request changes (its standing) and a part that is the same for workers with
equal pools. So its choice is among the best by standing of each pool size and the workers with a prefix hit, and the
policies run on those few only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from itertools import count

import msgspec

from orchestrator.policy.candidate import Candidate

_Entry = tuple[float, int, Candidate]  # (minus its standing, version, itself); no two versions are equal


# With fewer workers it is as quick to rank all of them, and exact where pools differ in size by a few percent.
SHORTLIST_FROM = 32


class Shortlist:
    """A sorted list for each class of pool sizes: an update is two bisections, and the best workers are at its front.

    Pools within about 6% of each other share a class and count as equal here; the policy then compares them exactly.
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
        """Add a worker, or take its new load."""
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
        """Every worker in `cached_tokens`, with its hit filled in, and the best of the others of each class."""
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
