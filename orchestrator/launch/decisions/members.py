"""The whole fleet as one launcher plans with it: who is registered, its own workers, and those that load. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from orchestrator.launch.registry_watch import Snapshot
from orchestrator.store.fields import Launcher
from orchestrator.store.planned import PlannedWorker, loading_by_hand, of_launchers, planned_worker
from orchestrator.types import Role


class OwnWorker(msgspec.Struct, frozen=True):
    """A worker of the launcher that plans. `role` is the one that its next start gets, `process` which process runs as
    it now, or nothing; `placed` and `leaving` as of PlannedWorker."""

    role: Role
    process: str = ""
    leaving: bool = False
    placed: bool = True


def members(snapshot: Snapshot, own: Mapping[str, OwnWorker], launcher_id: str) -> list[PlannedWorker]:
    """All workers as `plan` takes them: those in the registry, and launchers' that are not in it."""
    workers = []
    others = workers_of_others(snapshot.launchers, launcher_id)
    for worker_id, info in snapshot.units.items():
        mine = own.get(worker_id)
        owned = mine is not None and mine.process == info.process
        if mine is not None and not owned:
            continue  # left by its dead predecessor; the entry below stands for the worker
        worker = planned_worker(info, snapshot.orders.get(worker_id), owned, managed=worker_id in others)
        if mine is not None and mine.leaving:
            worker = PlannedWorker(worker.id, worker.role, False, True, True)
        workers.append(worker)
    present = {worker.id for worker in workers}
    for worker_id, mine in own.items():
        if worker_id not in present:
            workers.append(PlannedWorker(worker_id, mine.role, ready=False, leaving=mine.leaving, placed=mine.placed))
    known = present | own.keys()
    loading = [(name, role, True) for name, role in others.items()]
    loading += [(name, role, False) for name, role in loading_by_hand(snapshot.launchers).items()]
    return workers + [
        PlannedWorker(name, role, ready=False, owned=False, managed=managed)
        for name, role, managed in sorted(loading)
        if name not in known
    ]


def workers_of_others(launchers: Mapping[str, Launcher], launcher_id: str) -> dict[str, Role]:
    """The workers of the fleet's launchers but this one, and their roles."""
    others = [held for launcher, held in of_launchers(launchers).items() if launcher != launcher_id]
    return {name: role for held in others for name, role in held.workers.items()}
