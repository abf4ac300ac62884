"""Which workers have which LoRA adapters, by their load reports and by what was sent to them since.

`fleet/adapters.py` has the list of those that the fleet serves.
"""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.policy.predict.adapters import PRIOR_LOAD_S, AdapterPlaces, with_placed
from orchestrator.policy.predict.estimates import Smoothed
from orchestrator.types import Role, WorkerInfo, WorkerLoad

LOAD_WEIGHT = 0.1  # of a newly reported load time in the mean
EXPECTED_S = 5.0  # after which what was sent, and no report shows, is not expected any more


class _Sent(NamedTuple):
    adapter: int
    sequence: int  # of the submission; 0 for a job that the worker has claimed
    at: float


class FleetAdapters:
    """`places`: by role, its workers. Times are this frontend's monotonic clock, seconds."""

    def __init__(self) -> None:
        self.places = {role: AdapterPlaces() for role in Role}
        self._load_s = Smoothed(PRIOR_LOAD_S, LOAD_WEIGHT)
        self._sent: dict[str, list[_Sent]] = {}  # by worker

    @property
    def load_s(self) -> float:
        """The mean time in which a worker loads an adapter."""
        return self._load_s.value

    def sent(self, worker_id: str, adapter: int, now: float, sequence: int = 0) -> None:
        """A request with this adapter was sent to a worker, or a worker has claimed its job: `update` must follow."""
        self._sent.setdefault(worker_id, []).append(_Sent(adapter, sequence, now))

    def take_load(self, load: WorkerLoad, before: WorkerLoad | None, seen: int, now: float) -> bool:
        """Take a report that includes every submission up to `seen`. Returns whether `update` must follow."""
        if load.adapter_load_s and (before is None or before.adapter_load_s != load.adapter_load_s):
            self._load_s.observe(load.adapter_load_s)
        sent = self._sent.pop(load.worker_id, None)
        if sent is None:
            return before is None or before.adapters != load.adapters
        if left := [one for one in sent if not _is_reported(one, load, seen) and now - one.at < EXPECTED_S]:
            self._sent[load.worker_id] = left
        return True

    def update(self, info: WorkerInfo, load: WorkerLoad | None, role: Role | None) -> None:
        """`role`: the one in which the worker can get requests; None: it can get none."""
        for pool, places in self.places.items():
            if pool is not role:
                places.remove(info.id)
            elif load is not None:
                sent = (one.adapter for one in self._sent.get(info.id, ()))
                places.update(info.id, info.adapter_slots, with_placed(load.adapters, sent), load.waiting_tokens)

    def forget(self, worker_id: str) -> None:
        self._sent.pop(worker_id, None)
        for places in self.places.values():
            places.remove(worker_id)


def _is_reported(sent: _Sent, load: WorkerLoad, seen: int) -> bool:
    return sent.sequence <= seen if sent.sequence else sent.adapter in load.adapters
