"""What planning and operators read from the registry: workers with their orders, who runs them, the rollout.

Every change of roles and of the desired ratio is a plan (`Registry.steer`) that is carried out as a whole, or not at
all once the reading that it follows from is old. So no two people, launchers or frontends that decide at the same time
undo each other's orders, or take a role's last worker together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from orchestrator.config.settings import Refused
from orchestrator.store.configuration import Rollout
from orchestrator.store.fields import Frontend, Launcher, WorkerOrders, launcher_to_fields, member, order_field
from orchestrator.types import DesiredRatio, Role, WorkerInfo, WorkerState

# Before the identity of a worker that was started by hand and holds its id, as a launcher holds its workers' ids.
BY_HAND = "by-hand:"
TRIES = 5  # a plan that is refused is made anew from a new reading so often
T = TypeVar("T")


class Seen(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a plan relies on; None: on nothing of that."""

    version: str | None = None  # of the workers, their orders, who holds their ids, and the rollout
    set_at: str | None = None  # when the desired ratio was set, as Redis has it; "" where none was
    leader: str | None = None  # the frontend that decides the ratio

    @classmethod
    def ratio(cls, desired: DesiredRatio | None, leader: str | None = None) -> Seen:
        """For a plan that relies on the desired ratio alone."""
        return cls(None, f"{desired.set_at:.6f}" if desired is not None else "", leader)


class Reading(msgspec.Struct, frozen=True, dict=True):
    """The fleet at one moment. Workers are for who sends requests; launchers and operators deal in units."""

    workers: dict[str, WorkerInfo] = {}
    orders: dict[str, WorkerOrders] = {}  # of units: those that are not carried out
    launchers: dict[str, Launcher] = {}
    desired: DesiredRatio | None = None
    version: bytes = b""

    @cached_property  # a launcher asks for each of its workers
    def units(self) -> dict[str, WorkerInfo]:
        """The units all of whose ranks are registered, each as its first rank."""
        there = Counter(info.unit for info in self.workers.values())
        firsts = {unit: info for unit in there if (info := self.workers.get(unit)) is not None}
        return {unit: info for unit, info in firsts.items() if there[unit] >= len(info.ranks)}

    @property
    def seen(self) -> Seen:
        return msgspec.structs.replace(Seen.ratio(self.desired), version=self.version.decode())


def in_role_of_unit(workers: dict[str, WorkerInfo]) -> dict[str, WorkerInfo]:
    """These workers, each in the role of its unit, which its first rank's entry has."""

    def current(info: WorkerInfo) -> WorkerInfo:
        first = workers.get(info.unit, info)
        return info if first.role is info.role else msgspec.structs.replace(info, role=first.role)

    return {name: current(info) for name, info in workers.items()}


class Holder(msgspec.Struct, frozen=True):
    """A launcher that registers, or stays registered for `ttl_s` more."""

    id: str
    held: Launcher
    ttl_s: float
    claims: Sequence[Role] = ()  # it claims an id for a worker of each
    named: str = "worker"  # what such an id begins with


class PlannedWorker(msgspec.Struct, frozen=True):
    """What planning needs of one worker."""

    id: str
    role: Role  # that it has, or was told to take
    ready: bool  # it serves this role now; one that loads, restarts or has yet to take its role does not
    leaving: bool = False
    owned: bool = True  # this launcher runs its process
    fixed: bool = False  # its engine cannot take the other role
    managed: bool = True  # one of the fleet's launchers runs its process
    flipping: bool = False  # it serves the other role, and takes this one at its next heartbeat
    placed: bool = True  # else it has no process: it waits for a machine with room
    started_as: Role | None = None  # whose engine arguments it has; None where its process is not registered


def planned_worker(info: WorkerInfo, orders: WorkerOrders | None, owned: bool, managed: bool = False) -> PlannedWorker:
    """A registered worker and the orders it has not carried out yet. One that restarts is not leaving."""
    orders = orders or WorkerOrders()
    ends = orders.drain or orders.restart
    ready = info.state is WorkerState.READY and not ends
    flipping = ready and orders.role not in (None, info.role)
    return PlannedWorker(
        info.id,
        orders.role or info.role,
        ready=ready and not flipping,
        leaving=orders.drain or (info.state is WorkerState.DRAINING and not orders.restart),
        owned=owned,
        fixed=not info.can_be(info.role.other),
        managed=owned or managed,
        flipping=flipping,
        started_as=info.started_as,
    )


def of_launchers(holders: Mapping[str, Launcher]) -> dict[str, Launcher]:
    """The launchers among those that hold ids of workers. A launcher drains and replaces its workers."""
    return {holder: held for holder, held in holders.items() if not holder.startswith(BY_HAND)}


def launched(holders: Mapping[str, Launcher]) -> set[str]:
    """The workers that a launcher runs, and drains."""
    return {name for held in of_launchers(holders).values() for name in held.workers}


def loading_by_hand(holders: Mapping[str, Launcher]) -> dict[str, Role]:
    """Workers that no launcher runs and that are not registered yet."""
    by_hand = (held for holder, held in holders.items() if holder.startswith(BY_HAND))
    return {name: role for held in by_hand for name, role in held.workers.items()}


def rollout_status(rollout: Rollout, frontends: Mapping[str, Frontend]) -> dict[str, Any]:
    """As `/fleet` and `orchestrator status` show it, without the configurations."""
    by_hand = [frontend for frontend in frontends.values() if frontend.by_hand and frontend.url]
    behind = [f.url for f in by_hand if not rollout.under_way and f.generation != rollout.target.generation]
    return {
        "phase": rollout.phase.value,
        "old": rollout.old.generation,
        "new": rollout.new.generation,
        "why": rollout.why,
        "restart": sorted(rollout.restart),  # units; where there are any it is a restart
        "to_restart": sorted(behind),  # no launcher runs them, and they kept another configuration than it ended with
    }


def is_last_decode(worker_id: str, workers: Sequence[PlannedWorker]) -> bool:
    """Whether this is the only ready decode worker: without it no new request could be decoded."""
    ready = {w.id for w in workers if w.role is Role.DECODE and w.ready and not w.leaving}
    return ready == {worker_id}


def plan(
    seen: Seen,
    orders: Mapping[str, WorkerOrders],
    desired: DesiredRatio | None,
    holder: Holder | None,
    kind: str = "worker",
) -> bytes:
    """The argument of the registry's function `steer`; `kind`: of the members that have the orders."""
    what: dict[str, Any] = msgspec.to_builtins(seen)
    what["orders"] = [(kind, member_id, *order_field(order)) for member_id, order in orders.items()]
    if desired is not None:
        what["desired"] = (desired.prefill, desired.decode, desired.set_by, desired.why)
    if holder is not None:
        what["entry"] = member("launcher", holder.id, holder.ttl_s, False, [], launcher_to_fields(holder.held))
        what["claims"], what["named"] = [role.value for role in holder.claims], holder.named
    return msgspec.json.encode(what)


async def decided(decide: Callable[[], Awaitable[T | None]]) -> T:
    """What `decide` returns: it reads, and steers; None when its plan was refused. Raises Refused when all are."""
    for _ in range(TRIES):
        if (result := await decide()) is not None:
            return result
    raise Refused(
        f"the fleet changed {TRIES} times while this was decided, so nothing was ordered; look at `orchestrator "
        "status`, and repeat it"
    )
