"""The few workers of a large fleet that a decode choice has to consider, kept sorted as loads change.

`KVBlocks` ranks a worker by its static score, which is the same for all requests, by a part that is the same for all
workers with equal pools, and by the request's prefix hit. So its choice is among the workers with a hit and those with
the best static score of each pool size. The policies see only those.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from heapq import nsmallest
from itertools import count

from msgspec.structs import replace

from orchestrator.policy.decode_choice import Candidate

# (negative static score, version, candidate, where it is); every version is unique.
_Entry = tuple[float, int, Candidate, tuple[str, ...]]


# With fewer workers it is as fast to rank all of them, and exact also where pools differ in size by a few percent.
SHORTLIST_FROM = 32
_EVERYWHERE = ""
_SORTED = 64  # of so many of the best, up to twice as many, the order is known


class _Ranking:
    """Entries, of which only the best are in order: most updates are of others, and change nothing there."""

    __slots__ = ("_all", "_best", "_others_from")

    def __init__(self) -> None:
        self._all: dict[str, _Entry] = {}  # by worker
        self._best: list[_Entry] = []
        self._others_from: _Entry | None = None  # the least one that is not among the best; None: all are

    def __bool__(self) -> bool:
        return bool(self._all)

    def put(self, entry: _Entry, before: _Entry | None) -> None:
        """Add an entry, in place of the one that its worker had before."""
        others_from, best = self._others_from, self._best
        if before is not None and (others_from is None or before < others_from):
            del best[bisect_left(best, before)]
        self._all[entry[2].worker_id] = entry
        if others_from is None or entry < others_from:
            insort(best, entry)
            if len(best) > 2 * _SORTED:
                self._keep(_SORTED)

    def remove(self, entry: _Entry) -> None:
        del self._all[entry[2].worker_id]
        if self._others_from is None or entry < self._others_from:
            del self._best[bisect_left(self._best, entry)]

    def best(self, most: int) -> list[_Entry]:
        if len(self._best) < most and self._others_from is not None:
            several = max(most, _SORTED)
            self._best = nsmallest(several + 1, self._all.values())
            self._keep(several)
        return self._best[:most]

    def _keep(self, several: int) -> None:
        self._others_from = self._best[several] if len(self._best) > several else None
        del self._best[several:]


class Shortlist:
    """A ranking per class of pool sizes, best workers first, of all workers and of those in each place.

    Pools of nearly equal size share a class and count as equal here; the policy then compares the workers exactly.
    """

    def __init__(self, static_score: Callable[[Candidate], float], per_class: int = 4) -> None:
        self._static_score = static_score
        self._per_class = per_class
        self._current: dict[str, _Entry] = {}  # by worker
        self._places: dict[str, dict[int, _Ranking]] = {}
        self._groups: dict[str, set[str]] = {}  # the workers of each group that steps together
        self._versions = count()

    def __len__(self) -> int:
        return len(self._current)

    def update(self, candidate: Candidate, places: Iterable[str] = ()) -> None:
        """Add a worker, or replace its load. `places`: where it is, as `rack=r1`."""
        worker_id, where = candidate.worker_id, (_EVERYWHERE, *places)
        before = self._current.get(worker_id)
        if before is not None and not _has_same_rankings(before, candidate, where):
            self.remove(worker_id)
            before = None
        entry = (-self._static_score(candidate), next(self._versions), candidate, where)
        self._current[worker_id] = entry
        size_class = _size_class(candidate.blocks_total)
        for place in where:
            if (classes := self._places.get(place)) is None:
                classes = self._places[place] = defaultdict(_Ranking)
            classes[size_class].put(entry, before)
        if before is None and candidate.group:
            self._groups.setdefault(candidate.group, set()).add(worker_id)

    def remove(self, worker_id: str) -> None:
        entry = self._current.pop(worker_id, None)
        if entry is None:
            return
        size_class = _size_class(entry[2].blocks_total)
        for place in entry[3]:
            classes = self._places[place]
            ranking = classes[size_class]
            ranking.remove(entry)
            if not ranking:
                del classes[size_class]
                if not classes:
                    del self._places[place]
        if group := entry[2].group:
            self._groups[group].discard(worker_id)
            if not self._groups[group]:
                del self._groups[group]

    def pick(self, cached_tokens: Mapping[str, int], places: Iterable[str] = ()) -> list[Candidate]:
        """The workers in `cached_tokens`, with their hits filled in, of each class the best other workers, of all and
        of those in each of these places, and all ranks of their groups."""
        picked: dict[str, Candidate] = {}
        for worker_id, tokens in cached_tokens.items():
            if (entry := self._current.get(worker_id)) is not None:
                picked[worker_id] = replace(entry[2], cached_tokens=tokens)
        for place in (_EVERYWHERE, *places):
            for ranking in self._places.get(place, {}).values():
                for _, _, candidate, _ in ranking.best(self._per_class):
                    picked.setdefault(candidate.worker_id, candidate)
        if self._groups:
            groups = {candidate.group for candidate in picked.values() if candidate.group}
            for worker_id in sorted(worker_id for group in groups for worker_id in self._groups[group]):
                picked.setdefault(worker_id, self._current[worker_id][2])
        return list(picked.values())


def _has_same_rankings(entry: _Entry, candidate: Candidate, where: tuple[str, ...]) -> bool:
    known = entry[2]
    return known.blocks_total == candidate.blocks_total and entry[3] == where and known.group == candidate.group


def _size_class(blocks_total: int) -> int:
    # The top four significant bits: classes between 6% and 12% wide, eight per doubling.
    shift = max(0, blocks_total.bit_length() - 4)
    return (blocks_total >> shift) << shift
