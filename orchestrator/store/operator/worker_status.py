"""A worker as operators see it."""

from __future__ import annotations

import msgspec

from orchestrator.types import Role, StepCounters, WorkerInfo, WorkerLoad


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker as `/fleet` and `orchestrator status` show it. None stands for an unknown load."""

    id: str
    role: Role
    state: str  # a WorkerState, or "unreachable"
    engine: str
    host: str
    pid: int
    blocks_total: int
    blocks_free: int | None
    running: int | None
    waiting: int | None
    step_ms: float | None
    generation: int = 0  # of its configuration
    unit: str = ""  # by which operators steer it
    rank: int = 0  # its place in the unit
    ranks: int = 1  # of the unit
    group: StepCounters | None = None  # of the first of the ranks that step together
    labels: tuple[str, ...] = ()  # where it is, as zone=a

    @classmethod
    def of(cls, info: WorkerInfo, load: WorkerLoad | None = None, connected: bool = True) -> WorkerStatus:
        return cls(
            id=info.id,
            role=info.role,
            state=info.state.value if connected else "unreachable",
            engine=info.identity.engine,
            host=info.host,
            pid=info.pid,
            blocks_total=load.blocks_total if load else info.blocks_total,
            blocks_free=load.blocks_free if load else None,
            running=load.running if load else None,
            waiting=load.waiting if load else None,
            step_ms=round(load.step_ms, 2) if load else None,
            generation=info.generation,
            unit=info.unit,
            rank=info.ranks.index(info.id) if info.ranks else 0,
            ranks=max(1, len(info.ranks)),
            group=load.group if load else None,
            labels=info.labels,
        )
