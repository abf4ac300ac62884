"""What planning and operators read from the registry: workers with their orders, who runs them, the rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from orchestrator.store.configuration import Rollout, RolloutStatus
from orchestrator.store.fields import Launcher, WorkerOrders
from orchestrator.store.registry import Frontend
from orchestrator.types import Role, WorkerInfo, WorkerState

# Before the identity of a worker that was started by hand and holds its id, as a launcher holds its workers' ids.
BY_HAND = "by-hand:"


class PlannedWorker(msgspec.Struct, frozen=True):
    """What planning needs of one worker.

    `role` is the one that it has, or was told to take. `ready` means that it serves this role now; a worker that
    loads, restarts or changes its role is not ready. `owned` means that this launcher runs its process, `managed` that
    one of the fleet's launchers does. `fixed` means that its engine cannot take the other role, `flipping` that it
    serves and was told to take this one. One that is not `placed` has no process: it waits for a machine with room.
    """

    id: str
    role: Role
    ready: bool
    leaving: bool = False
    owned: bool = True
    fixed: bool = False
    managed: bool = True
    flipping: bool = False
    placed: bool = True


def planned_worker(info: WorkerInfo, orders: WorkerOrders | None, owned: bool, managed: bool = False) -> PlannedWorker:
    """A registered worker and the orders it has not carried out yet. One that restarts is not leaving."""
    orders = orders or WorkerOrders()
    ends = orders.drain or orders.restart
    flipping = orders.role is not None and (orders.role is not info.role or info.state is not WorkerState.READY)
    draining = info.state is WorkerState.DRAINING and orders.role is None and not orders.restart
    return PlannedWorker(
        info.id,
        orders.role or info.role,
        ready=info.state is WorkerState.READY and not flipping and not ends,
        leaving=orders.drain or draining,
        owned=owned,
        fixed=not info.can_be(info.role.other),
        managed=owned or managed,
        flipping=flipping and not ends,
    )


def of_launchers(holders: Mapping[str, Launcher]) -> dict[str, Launcher]:
    """The launchers among those that hold ids of workers. A launcher drains and replaces its workers."""
    return {holder: held for holder, held in holders.items() if not holder.startswith(BY_HAND)}


def loading_by_hand(holders: Mapping[str, Launcher]) -> dict[str, Role]:
    """Workers that no launcher runs and that are not registered yet."""
    by_hand = (held for holder, held in holders.items() if holder.startswith(BY_HAND))
    return {name: role for held in by_hand for name, role in held.workers.items()}


def rollout_status(rollout: Rollout, frontends: Mapping[str, Frontend]) -> RolloutStatus:
    """A rollout as operators see it."""
    phase, old, new = rollout.phase, rollout.old.generation, rollout.new.generation
    by_hand = [frontend for frontend in frontends.values() if frontend.by_hand and frontend.url]
    behind = [f.url for f in by_hand if not rollout.under_way and f.generation != rollout.target.generation]
    return RolloutStatus(phase, old, new, rollout.why, sorted(behind))


def is_last_decode(worker_id: str, workers: Sequence[PlannedWorker]) -> bool:
    """Whether this is the only ready decode worker: without it no new request could be decoded."""
    ready = {w.id for w in workers if w.role is Role.DECODE and w.ready and not w.leaving}
    return ready == {worker_id}
