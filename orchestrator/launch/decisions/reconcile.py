"""Compares the desired ratio with the present workers, which a launcher takes from its reading of the registry and from
what it runs itself, and decides what to do. Pure: no clock, no I/O.

Running workers change their roles before any process is started or drained, also in place of one that loads: a change
of role is done within a heartbeat, a new process costs loading the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Union

import msgspec

from orchestrator.launch.registry_watch import Snapshot
from orchestrator.store.fields import Launcher
from orchestrator.store.planned import PlannedWorker, loading_by_hand, of_launchers, planned_worker
from orchestrator.types import DesiredRatio, Role


class Start(msgspec.Struct, frozen=True):
    role: Role


class Flip(msgspec.Struct, frozen=True):
    """Tell a running worker to take this role. `stands_in`: because no other worker has it."""

    worker_id: str
    role: Role
    stands_in: bool = False


class Drain(msgspec.Struct, frozen=True):
    """Let a worker finish what it has, then end it."""

    worker_id: str


Action = Union[Start, Flip, Drain]


def decide(desired: DesiredRatio, workers: Sequence[PlannedWorker], decoded: bool) -> list[Action]:
    """What to do now, in this order. `decoded`: the fleet has had a decode worker that was ready."""
    if decoded and desired.decode and (flip := stand_in(workers)) is not None:
        return [flip]
    return plan(desired, workers)


def has_decoded(workers: Iterable[PlannedWorker]) -> bool:
    return any(worker.role is Role.DECODE and worker.ready for worker in workers)


def plan(desired: DesiredRatio, workers: Sequence[PlannedWorker]) -> list[Action]:
    """What to do now. What cannot be done yet is left for a later call, when more workers are ready.

    A worker that no launcher runs counts where workers are short, and may change its role. It is never drained, and
    none of a launcher's is drained in its place: a worker that was started by hand comes on top. Of several launchers
    each comes to the same plan and does its own part: the workers to flip and to drain are chosen from all of them.
    While any worker of a role is desired, one that is ready stays ready until another is.
    """
    staying = {w.id: w for w in workers if not w.leaving}
    actions: list[Action] = []
    for unplaced in _waiting_surplus(desired, staying.values()):
        if unplaced.owned:
            actions.append(Drain(unplaced.id))
        del staying[unplaced.id]
    for role in Role:
        short = _wanted(desired, role) - _count(staying.values(), role)
        spare = _count(staying.values(), role.other) - _wanted(desired, role.other)
        spare = min(spare, _flexible(staying.values(), role.other))
        for chosen in islice(_to_flip(desired, role.other, staying.values()), max(0, min(short, spare))):
            actions.append(Flip(chosen.id, role))
            staying[chosen.id] = msgspec.structs.replace(chosen, role=role, ready=False, flipping=True)
        # A spare worker of the other role will be flipped, now or when more are ready: it needs no new process.
        actions += [Start(role)] * max(0, short - max(0, spare))
    for serves, role in product((False, True), Role):  # of both roles those first that serve none yet
        spare = _count(staying.values(), role) - _wanted(desired, role)
        # Spare workers that the other role still waits for are flipped into it, not drained.
        waiting = max(0, _wanted(desired, role.other) - _count(staying.values(), role.other))
        waiting = min(waiting, _flexible(staying.values(), role))
        managed = sum(worker.managed and worker.role is role for worker in staying.values())
        loading = _loading(role.other, staying.values())
        most = max(0, min(spare - waiting, managed - _wanted(desired, role)))
        for chosen in islice(_to_drain(desired, role, staying.values()), most):
            if not (serves or _loads(chosen)):
                break
            if chosen.ready and not chosen.fixed and loading:  # it serves there before that one does
                actions.append(Flip(chosen.id, role.other))
                staying[chosen.id] = msgspec.structs.replace(chosen, role=role.other, ready=False, flipping=True)
                chosen = loading.pop()
            if chosen.owned:  # else its launcher drains it
                actions.append(Drain(chosen.id))
            del staying[chosen.id]
    return actions


def stand_in(workers: Sequence[PlannedWorker]) -> Flip | None:
    """Which worker takes the decode role at once where no decode worker is ready and none is about to be, or None.

    For a fleet that has had decode workers: while one loads for the first time, nothing is wrong. Without a prefill
    worker nothing is to be done, since prompts can be prefilled where they decode. `plan` moves the worker back when
    enough others decode again.
    """
    staying = [worker for worker in workers if not worker.leaving]
    if any(worker.role is Role.DECODE and (worker.ready or worker.flipping) for worker in staying):
        return None
    # One that has yet to become a prefill worker may be told to remain what it was.
    able = [w for w in staying if w.role is Role.PREFILL and (w.ready or w.flipping) and not w.fixed]
    chosen = max(able, key=lambda w: (w.flipping, w.managed, _age_order(w.id)), default=None)
    return Flip(chosen.id, Role.DECODE, stands_in=True) if chosen is not None else None


def _waiting_surplus(desired: DesiredRatio, workers: Iterable[PlannedWorker]) -> list[PlannedWorker]:
    """Workers that wait for room in a role that has enough others. They are ended before any that serve."""
    vain = []
    for role in Role:
        of_role = [w for w in workers if w.role is role]
        spare = len(of_role) - _wanted(desired, role)
        unplaced = sorted((w for w in of_role if not w.placed), key=lambda w: _age_order(w.id), reverse=True)
        vain += unplaced[: max(0, spare)]
    return vain


def _wanted(desired: DesiredRatio, role: Role) -> int:
    return desired.prefill if role is Role.PREFILL else desired.decode


def _count(workers: Iterable[PlannedWorker], role: Role) -> int:
    return sum(worker.role is role for worker in workers)


def _flexible(workers: Iterable[PlannedWorker], role: Role) -> int:
    return sum(worker.role is role and not worker.fixed for worker in workers)


def _expendable(
    desired: DesiredRatio, role: Role, able: Iterable[PlannedWorker], workers: Iterable[PlannedWorker]
) -> Iterator[PlannedWorker]:
    """Those of `able` that can be taken out of this role one after the other: each is neither the only worker that
    serves it, nor the one that is about to where none does."""
    serving = sum(worker.role is role and worker.ready for worker in workers)
    for worker in able:
        if not (worker.ready or worker.flipping) or _wanted(desired, role) == 0 or serving > worker.ready:
            serving -= worker.ready
            yield worker


def _to_flip(desired: DesiredRatio, role: Role, workers: Collection[PlannedWorker]) -> Iterator[PlannedWorker]:
    """First those that have yet to take this role, which keep the other then; launchers' before others', ones that were
    started as the other role, so that engines serve what their arguments are for, and the newest first, so that equal
    situations move the same workers."""
    able = [w for w in workers if w.role is role and (w.ready or w.flipping) and not w.fixed]
    returns = role.other
    able.sort(key=lambda w: (w.flipping, w.managed, w.started_as is returns, _age_order(w.id)), reverse=True)
    return _expendable(desired, role, able, workers)


def _to_drain(desired: DesiredRatio, role: Role, workers: Collection[PlannedWorker]) -> Iterator[PlannedWorker]:
    """Those that load, then those that change to this role, then those that cannot change theirs, then the newest."""
    able = [w for w in workers if w.role is role and w.managed]
    able.sort(key=lambda w: (_loads(w), not w.ready, w.fixed, _age_order(w.id)), reverse=True)
    return _expendable(desired, role, able, workers)


def _loading(role: Role, workers: Iterable[PlannedWorker]) -> list[PlannedWorker]:
    """The newest last."""
    loading = [worker for worker in workers if worker.role is role and worker.managed and _loads(worker)]
    return sorted(loading, key=lambda worker: _age_order(worker.id))


def _loads(worker: PlannedWorker) -> bool:
    """Whether it serves no role, now or until it changes."""
    return not worker.ready and not worker.flipping


def _age_order(worker_id: str) -> tuple[int, str]:
    """A sort key by which worker-10 is newer than worker-9."""
    number = worker_id.rpartition("-")[2]
    return (int(number) if number.isdigit() else -1, worker_id)


class OwnWorker(msgspec.Struct, frozen=True):
    """A worker of the launcher that plans. `role`: of its next start; `process`: which runs as it now, or nothing."""

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
    others = [held for launcher, held in of_launchers(launchers).items() if launcher != launcher_id]
    return {name: role for held in others for name, role in held.workers.items()}
