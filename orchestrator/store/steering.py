"""What an operator orders a running fleet to do: scale, change a role, drain. For the command line and the dashboard.

Needs the registry and the queue alone, so it works from any machine that reaches the fleet's Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from orchestrator.config.settings import Refused
from orchestrator.config.values import MAX_WORKERS
from orchestrator.store.fields import Launcher
from orchestrator.store.planned import PlannedWorker, is_last_decode, of_launchers, planned_worker
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Registry
from orchestrator.types import DesiredRatio, Role

_HEARTBEATS = 2.0  # after so many every worker that lives has told Redis of itself


async def settle(registry: Registry, heartbeat_s: float) -> None:
    """Wait until Redis has known the fleet for two heartbeats. Before, if it has lost its data, it may know only some
    workers. Raises RedisAway."""
    await asyncio.sleep(_HEARTBEATS * heartbeat_s - await registry.known_for_s())


class Steering:
    """Every method raises Refused, UnknownWorker or RedisAway."""

    def __init__(self, registry: Registry, queue: PrefillQueue, heartbeat_s: float) -> None:
        """`heartbeat_s`: of the fleet's workers."""
        self._registry, self._queue, self._heartbeat_s = registry, queue, heartbeat_s

    async def scale(self, prefill: int | None = None, decode: int | None = None, force: bool = False) -> DesiredRatio:
        """Set how many workers there should be; None leaves that role as it is. Returns the new ratio. `force`: also
        more than there is room for."""
        workers, launchers = await self._workers(), await self._launchers()
        current = await self._desired()
        wanted = DesiredRatio(
            current.prefill if prefill is None else prefill, current.decode if decode is None else decode, "scale"
        )
        if wanted.decode < 1:
            raise Refused(f"decode={wanted.decode}: expected an integer >= 1 (decode workers answer requests)")
        for name, count in (("prefill", wanted.prefill), ("decode", wanted.decode)):
            if not 0 <= count <= MAX_WORKERS:
                raise Refused(f"{name}={count}: expected an integer from 0 to {MAX_WORKERS}")
        launched = _launched(launchers)
        if not force and wanted.prefill + wanted.decode > current.prefill + current.decode:
            by_hand = sum(worker.id not in launched for worker in workers)
            refuse_too_many(wanted, [launcher.room for launcher in launchers], by_hand)
        await self._registry.set_desired(wanted.prefill, wanted.decode, wanted.set_by)
        for worker_id in surplus(wanted, workers, launched):
            await self._registry.order_drain(worker_id)
        return wanted

    async def change_role(self, worker_id: str, role: Role, force: bool) -> bool:
        """Order a role, and move the desired ratio with it, unless it `comes_on_top`. False when it has, or was told to
        take, that role."""
        workers = await self._workers()
        worker = self._find_worker(worker_id, workers)
        if worker.leaving:
            raise Refused(f"{worker_id}: is draining and takes no role any more; `orchestrator scale` starts another")
        if worker.role is role:
            return False
        if worker.fixed:
            raise Refused(f"{worker_id}: its engine has several pipeline stages and stays a {worker.role.value} worker")
        await self._refuse_last_of_role(worker_id, workers, force, "role")
        current = await self._desired()
        on_top = comes_on_top(worker, current, workers, _launched(await self._launchers()))
        step = 1 if role is Role.DECODE else -1
        decode = max(0 if force else 1, current.decode + step)
        wanted = DesiredRatio(max(0, current.prefill - step), decode, "role")
        await self._registry.order_role(worker_id, role, None if on_top else wanted)
        return True

    async def drain(self, worker_id: str, force: bool) -> bool:
        """Order a drain, and lower the desired ratio with it, unless the worker `comes_on_top`. False when it drains
        already."""
        workers = await self._workers()
        worker = self._find_worker(worker_id, workers)
        if worker.leaving:
            return False
        await self._refuse_last_of_role(worker_id, workers, force, "drain")
        current = await self._desired()
        on_top = comes_on_top(worker, current, workers, _launched(await self._launchers()))
        decode = max(0 if force else 1, current.decode - (worker.role is Role.DECODE))
        wanted = DesiredRatio(max(0, current.prefill - (worker.role is Role.PREFILL)), decode, "drain")
        await self._registry.order_drain(worker_id, None if on_top else wanted)
        return True

    async def _launchers(self) -> list[Launcher]:
        return list(of_launchers(await self._registry.launchers()).values())

    async def _workers(self) -> list[PlannedWorker]:
        await settle(self._registry, self._heartbeat_s)
        workers, orders = await self._registry.workers_and_orders()
        return [planned_worker(info, orders.get(worker_id), owned=False) for worker_id, info in workers.items()]

    async def _desired(self) -> DesiredRatio:
        """The ratio that was set; in a fleet without a launcher, the ratio that is there."""
        desired = await self._registry.desired()
        if desired is None:
            roles = [worker.role for worker in await self._workers() if not worker.leaving]
            desired = DesiredRatio(roles.count(Role.PREFILL), roles.count(Role.DECODE))
        return desired

    def _find_worker(self, worker_id: str, workers: list[PlannedWorker]) -> PlannedWorker:
        for worker in workers:
            if worker.id == worker_id:
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
        waiting = (await self._queue.depth()).requests
        if prefill == [worker_id] and waiting:
            raise Refused(
                f"{worker_id}: is the last prefill worker that is ready, and {waiting} prefills wait for it. Repeat "
                f"`orchestrator {command}` with --force to prefill them on decode workers"
            )


def _launched(launchers: Sequence[Launcher]) -> set[str]:
    """Workers that a launcher runs, and drains."""
    return {worker_id for launcher in launchers for worker_id in launcher.workers}


def comes_on_top(
    worker: PlannedWorker, wanted: DesiredRatio, workers: Sequence[PlannedWorker], launched: Collection[str]
) -> bool:
    """Whether no launcher runs it, and its role has more workers than wanted: one of a launcher's would have to leave
    if the desired ratio followed it."""
    return worker.id not in launched and _too_many(wanted, workers)[worker.role] > 0


def _too_many(wanted: DesiredRatio, workers: Sequence[PlannedWorker]) -> dict[Role, int]:
    staying = [worker.role for worker in workers if not worker.leaving]
    return {
        Role.PREFILL: staying.count(Role.PREFILL) - wanted.prefill,
        Role.DECODE: staying.count(Role.DECODE) - wanted.decode,
    }


def refuse_too_many(wanted: DesiredRatio, rooms: Sequence[int | None], by_hand: int) -> None:
    """Raises Refused for more workers than the launchers' machines hold, besides those that were started by hand.
    `rooms`: of each launcher; None where that is not known."""
    total, known = wanted.prefill + wanted.decode, [room for room in rooms if room is not None]
    if rooms and len(known) == len(rooms) and total > sum(known) + by_hand:
        raise Refused(
            f"{wanted.prefill}P{wanted.decode}D: there is room for {sum(known) + by_hand} workers, by the memory, the "
            f"ports and the GPUs where launchers run, not for {total}. Ask for fewer, or start a worker on another "
            "host (`orchestrator join`), or repeat `orchestrator scale` with --force"
        )


def surplus(wanted: DesiredRatio, workers: Sequence[PlannedWorker], launched: Collection[str]) -> list[str]:
    """Which workers that no launcher runs are to leave, so that no more are there than wanted.

    Roles are the launchers' to change: of the role that is too many first, and always all but one ready decode worker.
    """
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
