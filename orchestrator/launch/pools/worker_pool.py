"""The worker processes of this launcher: one supervised process per worker id, made equal to the desired ratio.

reconcile.py decides what to do; this carries it out. Workers that others run get their orders through the registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.commands import Setup
from orchestrator.launch.decisions.reconcile import (
    Action,
    Drain,
    Flip,
    OwnWorker,
    Start,
    decide,
    has_decoded,
    members,
    workers_of_others,
)
from orchestrator.launch.host.process import ProcessGroup
from orchestrator.launch.machines import Machines
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.launch.supervise import Stage, Supervised
from orchestrator.process.parent import own_identity
from orchestrator.store.client import RedisAway
from orchestrator.store.fields import Launcher, WorkerOrders
from orchestrator.store.planned import Holder, PlannedWorker, Seen, decided, of_launchers
from orchestrator.store.registry import Registry
from orchestrator.types import DesiredRatio, Role, WorkerInfo

log = logging.getLogger("pd.launcher")


class Slot:
    """One of our workers: its process, what that was started with, and the role that its next start gets."""

    def __init__(self, role: Role, process: Supervised, setup: Setup) -> None:
        self.role = role
        self.process = process
        self.task: asyncio.Task[None] | None = None
        self.starts(setup)

    def starts(self, setup: Setup) -> None:
        """It drains by what it was started with, also when that is not what starts now."""
        self.generation, self.drain_timeout_s = setup.generation, setup.config.workers.drain_timeout_s

    @property
    def own(self) -> OwnWorker:
        stage, process = self.process.stage, self.process
        runs = process.last_identity if process.pid else ""
        return OwnWorker(self.role, runs, stage in (Stage.LEAVING, Stage.ENDED), stage is not Stage.PLACING)


class WorkerPool:
    """`update` with every snapshot. Nothing is started after `close`. New processes get `setup`."""

    def __init__(
        self,
        registry: Registry,
        machines: Machines,
        on_line: Callable[[str, str], None],
        on_stage: Callable[[Supervised], None],
        setup: Setup,
        launcher_id: str = "",
    ) -> None:
        self.launcher_id = launcher_id or own_identity()
        self.slots: dict[str, Slot] = {}
        self._registry = registry
        self._machines = machines
        self.setup = setup
        self._on_line = on_line
        self._on_stage = on_stage
        self._closed = False
        self._said = ""
        self._complete_at = 0.0  # when all that live are in the registry again
        self._there: frozenset[str] = frozenset()  # members, at the last look
        self._decoded = False  # the fleet has had a decode worker that was ready

    @property
    def setup(self) -> Setup:
        return self._setup

    @setup.setter
    def setup(self, setup: Setup) -> None:
        self._setup = setup
        self._machines.use(setup.config)

    @property
    def _config(self) -> Config:
        return self.setup.config

    async def start(self, seen: Seen, roles: Sequence[Role], orders: Mapping[str, WorkerOrders] = {}) -> bool:
        """Start a worker of each role under an id of its own, and give these orders. False, and nothing is done, where
        the fleet is not the one that was seen: another launcher may have started them. Where another model has taken
        the room meanwhile, the ids are free with the next `hold_ids`. Raises RedisAway."""
        holder = msgspec.structs.replace(self._holder, claims=roles)
        claimed = await self._registry.steer(seen, orders, holder=holder)
        for worker_id, role in zip(claimed or (), roles, strict=False):
            if not self._closed:
                try:
                    self.supervise(worker_id, role)
                except ConfigError as error:
                    log.warning("%s", error)
        return claimed is not None

    def supervise(self, worker_id: str, role: Role) -> None:
        """Run a worker under an id that nobody else has, or take over the process that runs as it already."""
        self._machines.take(worker_id, role)

        def wanted() -> tuple[Role, Setup]:
            return slot.role, self.setup

        def make() -> ProcessGroup:
            slot.starts(self.setup)
            process.start_timeout_s = self._config.workers.start_timeout_s
            return self._machines.worker(worker_id, *wanted(), self._on_line)

        process = Supervised(
            worker_id,
            make,
            self._config.launcher,
            self._config.workers.start_timeout_s,
            self._on_stage,
            self._deregister,
            partial(self._machines.placed, worker_id, wanted),
        )
        slot = Slot(role, process, self.setup)
        self.slots[worker_id] = slot
        slot.task = asyncio.create_task(self._run(slot), name=f"supervise-{worker_id}")

    @property
    def waiting_for_room(self) -> set[str]:
        """Units that have never run. One that has, and finds no room to start again, is missed."""
        waiting = {name: slot.process for name, slot in self.slots.items() if slot.process.stage is Stage.PLACING}
        return {name for name, process in waiting.items() if process.last_exit is None}

    def restart_now(self) -> None:
        """`setup` is another: what waits to be started again is started now."""
        for slot in self.slots.values():
            slot.process.restart_now()

    @property
    def _holder(self) -> Holder:
        held = {name: slot.role for name, slot in self.slots.items()}
        me = Launcher(held, self.setup.generation, self._machines.room)
        return Holder(self.launcher_id, me, self._config.workers.timeout_s, named=self.setup.worker_name)

    async def begin(self, wanted: DesiredRatio) -> None:
        """Register this launcher, and set the desired ratio with it unless that of a fleet that another launcher runs
        is set, or somebody sets one meanwhile. Raises Refused, RedisAway."""
        first: Seen | None = None

        async def decide() -> bool | None:
            nonlocal first
            reading = await self._registry.read()
            ratio = Seen.ratio(reading.desired)
            first = first or ratio
            alone = not of_launchers(reading.launchers).keys() - {self.launcher_id}
            ours = wanted if reading.desired is None or (alone and ratio == first) else None
            return True if await self._registry.steer(reading.seen, {}, ours, self._holder) is not None else None

        await decided(decide)

    async def hold_ids(self) -> None:
        """Tell others what is ours, and which generation we start, within `workers.timeout_s`. Raises RedisAway."""
        me = self._holder
        await self._registry.refresh_launcher(me.id, me.held, me.ttl_s)

    async def update(self, snapshot: Snapshot) -> None:
        """Note what the registry says of our workers, then do what the desired ratio asks for. Raises RedisAway."""
        await self.hold_ids()
        there = {info.process for info in snapshot.workers.values()}
        others = self.workers_of_others(snapshot.launchers)
        for worker_id, slot in self.slots.items():
            info = snapshot.units.get(worker_id)
            if info is not None and slot.process.runs_as(info.process):
                self._follow_registration(slot, info, snapshot)
            elif info is not None and worker_id in others and slot.process.stage not in (Stage.LEAVING, Stage.ENDED):
                log.warning("%s: another launcher has started it while this one was cut off; it ends here", worker_id)
                slot.process.expect_exit(0)
            else:
                slot.process.missed(snapshot.looked_s, self._config.workers.timeout_s, there)
        # Entries of members that live may have run out, or have gone with all that Redis had. Where all are still
        # there, it was this launcher's connection alone, which may fail again and again.
        was_there = self._there
        self._there = frozenset().union(snapshot.workers, snapshot.launchers, snapshot.frontends)
        if self.launcher_id not in snapshot.launchers or (snapshot.was_away and was_there - self._there):
            self._complete_at = snapshot.read_at + self._config.workers.timeout_s
        if snapshot.desired is not None and self.sees_all(snapshot):
            actions = self.actions(snapshot.desired, self.planned(snapshot))
            if actions and await self._order(actions, snapshot):  # else the next reading decides
                for action in actions:
                    self._do(action, snapshot)

    def sees_all(self, snapshot: Snapshot) -> bool:
        """Whether all that live are in it: where Redis has lost some while it was away, they may not be back yet."""
        return snapshot.read_at >= self._complete_at

    def actions(self, desired: DesiredRatio, workers: list[PlannedWorker]) -> list[Action]:
        self._decoded |= has_decoded(workers)
        return decide(desired.now, workers, self._decoded)

    def planned(self, snapshot: Snapshot) -> list[PlannedWorker]:
        return members(snapshot, {name: slot.own for name, slot in self.slots.items()}, self.launcher_id)

    def workers_of_others(self, launchers: dict[str, Launcher]) -> dict[str, Role]:
        return workers_of_others(launchers, self.launcher_id)

    async def close(self) -> None:
        """End all workers, at once. Returns when their processes are gone."""
        self._closed = True
        slots = list(self.slots.values())
        for slot in slots:
            slot.process.request_stop()
        await asyncio.gather(*(slot.task for slot in slots if slot.task), return_exceptions=True)
        with contextlib.suppress(RedisAway):
            await self._registry.leave_launcher(self.launcher_id)

    def _follow_registration(self, slot: Slot, info: WorkerInfo, snapshot: Snapshot) -> None:
        slot.process.seen()
        slot.generation = info.generation
        slot.process.mark_ready()
        orders = snapshot.orders.get(info.id)
        # If it dies while it changes its role, it starts again in the new one.
        slot.role = (orders.role if orders else None) or info.role
        if orders is not None and orders.drain and slot.process.stage is Stage.READY:
            slot.process.expect_exit(self._leave_deadline_s(slot))

    async def _order(self, actions: list[Action], snapshot: Snapshot) -> bool:
        """Tell registered workers what they are to do, and start those that are short, all or none: other launchers
        plan too, and what was planned from an old reading could take a role's last worker. Raises RedisAway."""
        orders: dict[str, WorkerOrders] = {}
        for action in actions:
            match action:
                case Flip(worker_id, role):
                    orders[worker_id] = WorkerOrders(role=role)
                case Drain(worker_id) if worker_id in snapshot.units:
                    orders[worker_id] = WorkerOrders(drain=True)
        fit: list[Role] = []
        try:
            fit = self._machines.fitting([action.role for action in actions if isinstance(action, Start)])
        except ConfigError as error:
            self._log_once(snapshot.desired, f"cannot be reached here: {error}")
        started = await self.start(snapshot.seen, fit, orders)
        for role in fit if started else ():
            self._log_once(snapshot.desired, f"starting a {role.value} worker")
        return started

    def _do(self, action: Action, snapshot: Snapshot) -> None:
        match action:
            case Flip(worker_id, role, stands_in):
                why = "no decode worker is left: " if stands_in else ""
                self._log_once(snapshot.desired, f"{why}{worker_id} becomes a {role.value} worker")
            case Drain(worker_id):
                self._log_once(snapshot.desired, f"draining {worker_id}")
                told = worker_id in snapshot.units  # else nobody knows it yet
                if (slot := self.slots.get(worker_id)) is not None:
                    slot.process.expect_exit(self._leave_deadline_s(slot) if told else 0)

    def _leave_deadline_s(self, slot: Slot) -> float:
        workers = self._config.workers  # the ranks of a unit wait for each other for two heartbeats more
        return slot.drain_timeout_s + 2 * workers.heartbeat_s + self._config.launcher.stop_timeout_s

    def _log_once(self, desired: DesiredRatio | None, what: str) -> None:
        """Log it once, not every second while it cannot be done."""
        wanted = f"{desired.prefill}P{desired.decode}D (set by {desired.set_by})" if desired else ""
        line = f"{wanted}: {what}"
        if line != self._said:
            self._said = line
            log.info("%s", line)

    async def _run(self, slot: Slot) -> None:
        try:
            await slot.process.run()
        finally:
            try:
                await self._machines.give_back(slot.process.name)  # before its id is free
            except Exception:  # else the slot would leave for ever
                log.exception("%s: what it has of its machine is not given back", slot.process.name)
            finally:
                self.slots.pop(slot.process.name, None)

    async def _deregister(self, process: Supervised) -> None:
        """Take it out of the registry at once: the others need not wait for its time to live to run out."""
        try:
            for part in process.parts:
                info = await self._registry.worker(part.name)
                if info is not None and info.process == part.identity:  # else another launcher's may have its id by now
                    await self._registry.leave(part.name, info.kv.engine_id)
        except RedisAway as error:
            log.debug("%s stays in the registry until it expires: %s", process.name, error)
