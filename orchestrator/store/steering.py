"""What an operator orders a running fleet to do: scale, change a role, drain. For the command line and the dashboard.

Needs the registry and the queue alone, so it works from any machine that reaches the fleet's Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from orchestrator.config.settings import Refused
from orchestrator.config.values import MAX_WORKERS
from orchestrator.store.configuration import refuses_local
from orchestrator.store.fields import WorkerOrders
from orchestrator.store.planned import (
    PlannedWorker,
    Reading,
    Seen,
    decided,
    is_last_decode,
    launched,
    of_launchers,
    planned_worker,
)
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Registry
from orchestrator.types import DesiredRatio, Role

NOBODY = "the fleet has no process in this Redis; is --namespace right? Of several models each has its own: FLEET.MODEL"
NEEDS_PREFILL = "with routing.fallback: refuse every long prompt would get 503; set that to local with a rollout"
HEARTBEATS = 2.0  # after so many every worker that lives has told Redis of itself


async def settle(registry: Registry, heartbeat_s: float) -> None:
    """Wait until Redis has known the fleet for two heartbeats: before it may know a part only. Raises RedisAway."""
    await asyncio.sleep(HEARTBEATS * heartbeat_s - await registry.known_for_s())


class Steering:
    """Every method raises Refused or RedisAway. What was read is in the plan that is made of it, so that of two people
    who order at once, or a person beside a launcher, the later one decides again."""

    def __init__(self, registry: Registry, queue: PrefillQueue, heartbeat_s: float) -> None:
        """`heartbeat_s`: of the fleet's workers."""
        self._registry, self._queue, self._heartbeat_s = registry, queue, heartbeat_s

    async def scale(self, prefill: int | None = None, decode: int | None = None, force: bool = False) -> DesiredRatio:
        """Set how many workers there should be; None leaves that role as it is. Returns the new ratio. `force`: also
        more than there is room for, and no prefill worker where prompts need one."""

        async def decide() -> DesiredRatio | None:
            reading = await self._read()
            if not (reading.workers or reading.launchers):
                raise Refused(NOBODY)
            workers, managed = _planned(reading), launched(reading.launchers)
            current = _desired(reading, workers)
            wanted = DesiredRatio(
                current.prefill if prefill is None else prefill, current.decode if decode is None else decode, "scale"
            )
            if wanted.decode < 1:
                raise Refused(f"decode={wanted.decode}: expected an integer >= 1 (decode workers answer requests)")
            for name, count in (("prefill", wanted.prefill), ("decode", wanted.decode)):
                if not 0 <= count <= MAX_WORKERS:
                    raise Refused(f"{name}={count}: expected an integer from 0 to {MAX_WORKERS}")
            if not force and wanted.prefill == 0 < current.prefill and await self._needs_prefill():
                raise Refused(f"prefill=0: {NEEDS_PREFILL}, or repeat `orchestrator scale` with --force")
            if not force and wanted.prefill + wanted.decode > current.prefill + current.decode:
                rooms = [launcher.room for launcher in of_launchers(reading.launchers).values()]
                refuse_too_many(wanted, rooms, by_hand=sum(worker.id not in managed for worker in workers))
            leaving = dict.fromkeys(surplus(wanted, workers, managed), WorkerOrders(drain=True))
            # Without orders, workers that change meanwhile (hundreds may be loading) are no reason to decide again.
            seen = reading.seen if leaving or reading.desired is None else Seen.ratio(reading.desired)
            done = await self._registry.steer(seen, leaving, wanted, by_operator=True)
            return wanted if done is not None else None

        return await decided(decide)

    async def change_role(self, worker_id: str, role: Role, force: bool) -> bool:
        """Order a role. False when it has, or was told to take, that role."""
        return await self._take_out(worker_id, WorkerOrders(role=role), force)

    async def drain(self, worker_id: str, force: bool) -> bool:
        """Order a drain. False when it drains already."""
        return await self._take_out(worker_id, WorkerOrders(drain=True), force)

    async def _take_out(self, worker_id: str, order: WorkerOrders, force: bool) -> bool:
        """Take it out of its role, and the ratio with it unless it `comes_on_top`. False where that changes nothing."""
        command = "drain" if order.drain else "role"

        async def decide() -> bool | None:
            reading = await self._read()
            workers = _planned(reading)
            worker = self._find_unit(worker_id, reading, workers)
            if not _changes(worker, worker_id, order):
                return False
            await self._refuse_last_of_role(worker.id, workers, force, command)
            current, ratio = _desired(reading, workers), None
            if not comes_on_top(worker, current, workers, launched(reading.launchers)):
                counts = {Role.PREFILL: current.prefill, Role.DECODE: current.decode}
                counts[worker.role] -= 1
                if order.role is not None:
                    counts[order.role] += 1
                ratio = DesiredRatio(max(0, counts[Role.PREFILL]), max(0 if force else 1, counts[Role.DECODE]), command)
            done = await self._registry.steer(reading.seen, {worker.id: order}, ratio, by_operator=True)
            return True if done is not None else None

        return await decided(decide)

    async def _read(self) -> Reading:
        await settle(self._registry, self._heartbeat_s)
        return await self._registry.read()

    def _find_unit(self, worker_id: str, reading: Reading, workers: list[PlannedWorker]) -> PlannedWorker:
        """The unit of this id, or that this worker is a rank of."""
        rank = reading.workers.get(worker_id)
        for worker in workers:
            if worker.id == (rank.unit if rank is not None else worker_id):
                return worker
        there = ", ".join(sorted(worker.id for worker in workers)) or "nobody"
        raise Refused(f"worker {worker_id!r} is not in the fleet; there: {there}")

    async def _refuse_last_of_role(
        self, worker_id: str, workers: list[PlannedWorker], force: bool, command: str
    ) -> None:
        """Raises Refused for the last worker of a role while it is needed, unless forced."""
        if force:
            return
        if is_last_decode(worker_id, workers):
            raise Refused(
                f"{worker_id}: is the last decode worker that is ready; without it no request is answered. Start "
                f"another first (`orchestrator scale`), or repeat `orchestrator {command}` with --force"
            )
        prefill = [w.id for w in workers if w.role is Role.PREFILL and w.ready and not w.leaving]
        if prefill != [worker_id]:
            return
        if await self._needs_prefill():
            raise Refused(
                f"{worker_id}: is the last prefill worker that is ready; {NEEDS_PREFILL}. Start another first "
                f"(`orchestrator scale`), or repeat `orchestrator {command}` with --force"
            )
        if waiting := (await self._queue.depth()).requests:
            wait = "1 prefill waits" if waiting == 1 else f"{waiting} prefills wait"
            raise Refused(
                f"{worker_id}: is the last prefill worker that is ready, and {wait} for it. Repeat "
                f"`orchestrator {command}` with --force to prefill them on decode workers"
            )

    async def _needs_prefill(self) -> bool:
        """Whether prompts that should be prefilled remotely are refused where no worker prefills."""
        version = await self._registry.configuration.read()
        return version is not None and refuses_local(version.config)


def _changes(worker: PlannedWorker, named: str, order: WorkerOrders) -> bool:
    """Whether the order is not carried out already. Raises Refused for a role that it cannot take."""
    if order.role is None:
        return not worker.leaving
    if worker.leaving:
        raise Refused(f"{named}: is draining and takes no role any more; `orchestrator scale` starts another")
    if worker.fixed and worker.role is not order.role:
        why = "has several pipeline stages" if worker.role is Role.PREFILL else "shares each prompt among its ranks"
        raise Refused(f"{named}: its engine {why} and stays a {worker.role.value} worker")
    return worker.role is not order.role


def _planned(reading: Reading) -> list[PlannedWorker]:
    return [planned_worker(info, reading.orders.get(name), owned=False) for name, info in reading.units.items()]


def _desired(reading: Reading, workers: Sequence[PlannedWorker]) -> DesiredRatio:
    """The ratio that was set; in a fleet without a launcher, the ratio that is there."""
    roles = [worker.role for worker in workers if not worker.leaving]
    return reading.desired or DesiredRatio(roles.count(Role.PREFILL), roles.count(Role.DECODE))


def comes_on_top(
    worker: PlannedWorker, wanted: DesiredRatio, workers: Sequence[PlannedWorker], launched: Collection[str]
) -> bool:
    """Whether no launcher runs it, and its role has more than wanted: else one of a launcher's would have to leave."""
    return worker.id not in launched and _too_many(wanted, workers)[worker.role] > 0


def _too_many(wanted: DesiredRatio, workers: Sequence[PlannedWorker]) -> dict[Role, int]:
    staying = [worker.role for worker in workers if not worker.leaving]
    return {
        Role.PREFILL: staying.count(Role.PREFILL) - wanted.prefill,
        Role.DECODE: staying.count(Role.DECODE) - wanted.decode,
    }


def refuse_too_many(wanted: DesiredRatio, rooms: Sequence[int | None], by_hand: int) -> None:
    """Raises Refused for more than fit beside those by hand. `rooms`: of each launcher; None where not known."""
    total, known = wanted.prefill + wanted.decode, [room for room in rooms if room is not None]
    if rooms and len(known) == len(rooms) and total > sum(known) + by_hand:
        raise Refused(
            f"{wanted.prefill}P{wanted.decode}D: there is room for {sum(known) + by_hand} workers, by the memory, the "
            f"ports and the GPUs where launchers run, not for {total}. Ask for fewer, or start a worker on another "
            "host (`orchestrator join`), or repeat `orchestrator scale` with --force"
        )


def surplus(wanted: DesiredRatio, workers: Sequence[PlannedWorker], launched: Collection[str]) -> list[str]:
    """Which workers that no launcher runs are to leave, so that no more are there than wanted. Roles are the launchers'
    to change: of the role that is too many first, and always all but one ready decode worker."""
    staying = [worker for worker in workers if not worker.leaving]
    too_many = _too_many(wanted, workers)
    by_hand = [worker for worker in staying if worker.id not in launched]
    by_hand.sort(key=lambda worker: (too_many[worker.role] <= 0, worker.id))
    leaving = []
    for worker in by_hand[: max(0, len(staying) - wanted.prefill - wanted.decode)]:
        if not is_last_decode(worker.id, staying):
            leaving.append(worker.id)
            staying.remove(worker)
    return leaving
