"""Where workers are, by their labels, and the class of the link between two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from orchestrator.config.values import Link, labels_of, link_of
from orchestrator.policy.candidate import Candidate
from orchestrator.types import WorkerInfo


class Places:
    def __init__(self) -> None:
        self._labels: dict[str, dict[str, str]] = {}  # by worker
        self._names: dict[str, tuple[str, ...]] = {}  # the same as text
        self._count: Counter[tuple[str, ...]] = Counter()  # workers, by their labels

    @property
    def several(self) -> bool:
        """Whether there are workers with different labels."""
        return len(self._count) > 1

    def add(self, info: WorkerInfo) -> bool:
        """Add or replace a worker. Returns whether it is the first one that is elsewhere."""
        self.remove(info.id)
        alike = not self.several
        labels = self._labels[info.id] = labels_of(info.host, info.labels)
        names = self._names[info.id] = tuple(f"{name}={value}" for name, value in labels.items())
        self._count[names] += 1
        return alike and self.several

    def remove(self, worker_id: str) -> None:
        if self._labels.pop(worker_id, None) is not None:
            self._count[names := self._names.pop(worker_id)] -= 1
            if not self._count[names]:
                del self._count[names]

    def names(self, worker_id: str) -> tuple[str, ...]:
        """Its labels as text; none of an unknown worker, or where all workers are in one place."""
        return self._names.get(worker_id, ()) if self.several else ()

    def link(self, one: str | None, other: str | None) -> Link:
        """The class of the link between two workers."""
        return link_of(self._of(one), self._of(other))

    def links(self, worker_id: str, others: Iterable[Candidate]) -> dict[str, Link]:
        """The class of the link from this worker to each other one; none where all are in one place."""
        mine = self._of(worker_id)
        return {it.worker_id: link_of(mine, self._of(it.worker_id)) for it in others} if self.several else {}

    def _of(self, worker_id: str | None) -> Mapping[str, str]:
        return self._labels.get(worker_id or "", {})
