"""When a model's workers end because nobody asks for it (`idle_after_s`). Pure but for what it has seen before."""

from __future__ import annotations

from orchestrator.launch.registry_watch import Snapshot
from orchestrator.types import DesiredRatio, Role, WorkerState


class Idleness:
    """`observe` every reading."""

    def __init__(self) -> None:
        self._awake_since: float | None = None  # monotonic; since then a decode worker has been ready

    def observe(self, snapshot: Snapshot, desired: DesiredRatio, idle_after_s: float | None) -> bool:
        """Whether its workers are to end: for so long they could have served, and no frontend had a request."""
        ready = any(u.role is Role.DECODE and u.state is WorkerState.READY for u in snapshot.units.values())
        under_way = snapshot.rollout is not None and snapshot.rollout.under_way
        if idle_after_s is None or desired.idle or under_way or not ready:
            self._awake_since = None
            return False
        if self._awake_since is None:
            self._awake_since = snapshot.read_at
        if snapshot.read_at - self._awake_since < idle_after_s or not snapshot.frontends:
            return False
        return all(frontend.idle_s >= idle_after_s for frontend in snapshot.frontends.values())
