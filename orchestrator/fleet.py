"""The live view of the fleet that decisions are made on: each worker's last load plus what was placed since.

A view only: `membership` feeds it from the registry and the mesh, `router` reads it and notes placements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.policy.decode_choice import Candidate, blocks_for
from orchestrator.types import Role, WorkerInfo, WorkerLoad, WorkerState


@dataclass(slots=True)
class _Placed:
    sequence: int
    blocks: int
    tokens: int


@dataclass(slots=True, eq=False)
class WorkerView:
    """One worker as this frontend sees it. `heard_at` is the frontend's monotonic clock, seconds."""

    info: WorkerInfo
    heard_at: float
    load: WorkerLoad | None = None
    connected: bool = False  # greeted, and the connection stands
    disconnected_at: float | None = None
    sequence: int = 0  # of the last submission sent to it
    _placed: deque[_Placed] = field(default_factory=deque)
    _placed_blocks: int = 0
    _placed_tokens: int = 0
    _candidate: Candidate | None = None

    def usable(self, role: Role) -> bool:
        return self.connected and self.info.role is role and self.info.state is WorkerState.READY

    def note_placed(self, prompt_tokens: int) -> int:
        """Count a submission against this worker until a load report has seen it. Returns its sequence number."""
        self.sequence += 1
        blocks = blocks_for(prompt_tokens, self.info.identity.block_size)
        self._placed.append(_Placed(self.sequence, blocks, prompt_tokens))
        self._placed_blocks += blocks
        self._placed_tokens += prompt_tokens
        self._candidate = None
        return self.sequence

    def note_load(self, load: WorkerLoad, seen: int, now: float) -> None:
        """Take a load report that includes every submission up to `seen`. Older reports are ignored."""
        self.heard_at = now
        if self.load is not None and load.sequence <= self.load.sequence:
            return
        self.load = load
        while self._placed and self._placed[0].sequence <= seen:
            old = self._placed.popleft()
            self._placed_blocks -= old.blocks
            self._placed_tokens -= old.tokens
        self._candidate = None

    @property
    def candidate(self) -> Candidate:
        """The worker for the policies: its report corrected by what this frontend has placed since."""
        if self._candidate is None:
            load = self.load
            total = load.blocks_total if load else self.info.blocks_total
            free = load.blocks_free if load else total
            self._candidate = Candidate(
                worker_id=self.info.id,
                blocks_total=total,
                blocks_free=max(0, free - self._placed_blocks),
                block_size=self.info.identity.block_size,
                running=load.running if load else 0,
                waiting=(load.waiting if load else 0) + len(self._placed),
                waiting_tokens=load.waiting_tokens if load else 0,
                max_num_seqs=self.info.max_num_seqs,
                placed_tokens=self._placed_tokens,
            )
        return self._candidate


class Fleet:
    """All workers that are not known to be gone."""

    def __init__(self, frontend_id: str) -> None:
        self.frontend_id = frontend_id
        self.workers: dict[str, WorkerView] = {}

    def upsert(self, info: WorkerInfo, now: float) -> bool:
        """Add or update. True when this is a new process: what an older one of the same id held is lost."""
        view = self.workers.get(info.id)
        if view is not None and view.info.kv.engine_id == info.kv.engine_id:
            view.info = info
            view._candidate = None
            return False
        self.workers[info.id] = WorkerView(info, heard_at=now)
        return True

    def remove(self, worker_id: str) -> WorkerView | None:
        return self.workers.pop(worker_id, None)

    def take_load(self, load: WorkerLoad, now: float) -> None:
        if view := self.workers.get(load.worker_id):
            view.note_load(load, load.seen.get(self.frontend_id, 0), now)

    def decode_candidates(self, avoid: Iterable[str] = ()) -> list[Candidate]:
        """Decode workers that take requests now; those to avoid only when there is no other."""
        usable = [view.candidate for view in self.workers.values() if view.usable(Role.DECODE)]
        avoid = set(avoid)
        return [c for c in usable if c.worker_id not in avoid] or usable if avoid else usable

    def ready(self, role: Role) -> int:
        return sum(view.usable(role) for view in self.workers.values())

    def silent(self, now: float, timeout_s: float, reconnect_s: float) -> list[str]:
        """Workers to give up: fell silent for `timeout_s`, or stayed disconnected for `reconnect_s`."""
        return [
            worker_id
            for worker_id, view in self.workers.items()
            if (view.load is not None and now - view.heard_at > timeout_s)
            or (view.disconnected_at is not None and now - view.disconnected_at > reconnect_s)
        ]
