"""A model of several launchers, their workers and the registry between them, moved one small step at a time.

What is decided is decided by the real functions; who acts when, on how old a reading, and who dies, is the test's.
"""

import itertools
from dataclasses import dataclass, field

import msgspec
from support_redis import worker

from orchestrator.launch.decisions.members import OwnWorker, members
from orchestrator.launch.decisions.reconcile import Drain, Flip, Start, decide, has_decoded
from orchestrator.launch.decisions.replacement import to_replace
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.launch.supervise import Stage
from orchestrator.store.fields import Launcher, WorkerOrders
from orchestrator.types import DesiredRatio, Role, WorkerInfo, WorkerState
from workers.unit.lifecycle import LifecycleState

NOTHING = WorkerOrders()


@dataclass
class Worker:
    """One process. It obeys as `workers.unit.lifecycle.Moves` does."""

    id: str
    role: Role
    process: str
    generation: int
    life: LifecycleState = LifecycleState.STARTING
    restarts: bool = False
    _done: int = 0

    @property
    def info(self) -> WorkerInfo:
        state = WorkerState.READY if self.life is LifecycleState.READY else WorkerState.DRAINING
        return msgspec.structs.replace(
            worker(self.id, self.role), state=state, process=self.process, generation=self.generation
        )

    def carry_out(self, orders: WorkerOrders) -> bool:
        """Whether its role order is carried out, and was when it registered."""
        if orders.drain or orders.restart:
            self.restarts = orders.restart and not orders.drain
            if self.life is LifecycleState.READY:
                self.life = LifecycleState.LEAVING
        if orders.role is None or orders.sequence <= self._done:
            return orders.role is not None
        before, self._done = self.role, orders.sequence
        if self.life is LifecycleState.READY:
            self.role = orders.role
        return self.role is before


@dataclass
class Slot:
    """As of `worker_pool.py`, with `supervise.py`'s stages."""

    role: Role
    worker: Worker
    stage: Stage = Stage.STARTING

    @property
    def own(self) -> OwnWorker:
        runs = self.worker.process if self.worker.life is not LifecycleState.GONE else ""
        return OwnWorker(self.role, runs, leaving=self.stage is Stage.LEAVING)


@dataclass
class Host:
    """A launcher. It acts on the last reading that it took."""

    id: str
    slots: dict[str, Slot] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    generation: int = 0  # that all are to be of, by that reading
    decoded: bool = False


class World:
    """`desired` may be set at any time; each method is one step of somebody."""

    def __init__(self, prefill: int, decode: int, launchers: int) -> None:
        self.desired = DesiredRatio(prefill, decode)
        self.generation = 0
        self.workers: list[Worker] = []
        self.hosts: list[Host] = []
        self._registered: dict[str, tuple[WorkerInfo, WorkerOrders]] = {}
        self._launchers: dict[str, Launcher] = {}
        self._version, self._numbers = b"0", itertools.count()
        for _ in range(launchers):
            self.up()

    # ---- what is to be seen ------------------------------------------------------------------------------------

    def serving(self, role: Role) -> int:
        return sum(w.life is LifecycleState.READY and w.role is role for w in self.workers)

    def shape(self) -> tuple[int, int]:
        return self.serving(Role.PREFILL), self.serving(Role.DECODE)

    def picture(self) -> list[str]:
        """All that matters, for comparing."""
        live = [f"{w.process} {w.role.value} {w.life.value} g{w.generation}" for w in self.workers]
        told = [f"{name} is told {orders}" for name, (_, orders) in self._registered.items() if orders != NOTHING]
        held = [f"{launcher} has {' '.join(held.workers)}" for launcher, held in self._launchers.items()]
        return sorted(live) + sorted(told) + sorted(held)

    def read(self, host: Host) -> None:
        host.generation = self.generation
        host.snapshot = Snapshot(
            workers={name: info for name, (info, _) in self._registered.items()},
            orders={name: orders for name, (_, orders) in self._registered.items() if orders != NOTHING},
            launchers=dict(self._launchers),
            desired=self.desired,
            version=self._version,
        )

    # ---- launchers ---------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Another launcher."""
        host = Host(f"launcher-{next(self._numbers)}")
        self.hosts.append(host)
        self._hold_ids(host)

    def act(self, host: Host) -> None:
        """On its last reading, as `WorkerPool.update` and `RolloutRunner._replace` do."""
        snapshot = host.snapshot
        if snapshot is None or snapshot.desired is None:
            return
        self._hold_ids(host)
        for name, slot in host.slots.items():
            self._learn(slot, snapshot.workers.get(name), snapshot.orders.get(name, NOTHING))
        seen = members(snapshot, {name: slot.own for name, slot in host.slots.items()}, host.id)
        host.decoded |= has_decoded(seen)
        actions = decide(snapshot.desired, seen, host.decoded)
        orders = {a.worker_id: {"role": a.role} for a in actions if isinstance(a, Flip)}
        drains = {a.worker_id for a in actions if isinstance(a, Drain)}
        if self._order_all(orders | {name: {"drain": True} for name in drains & snapshot.workers.keys()}, snapshot):
            for action in actions:
                if isinstance(action, Start):
                    self._start(host, self._free_id(), action.role)
            for slot in (host.slots[name] for name in drains):
                if slot.worker.id not in snapshot.workers and slot.stage is Stage.STARTING:
                    slot.worker.life = LifecycleState.GONE
                slot.stage = Stage.LEAVING
        self._roll(host, snapshot)

    def notice(self, host: Host) -> None:
        """That processes have ended: their entries go, and what was not to end is started again."""
        for name, slot in list(host.slots.items()):
            if slot.worker.life is not LifecycleState.GONE:
                continue
            self._leave(name)
            ended = slot.stage is Stage.READY and not slot.worker.restarts
            self.workers = [w for w in self.workers if w is not slot.worker]
            del host.slots[name]
            if slot.stage is not Stage.LEAVING and not ended:
                self._start(host, name, slot.role)

    def give_up(self, host: Host) -> None:
        """On what was told to leave, and has not: a deadline has passed."""
        for slot in host.slots.values():
            if slot.stage is Stage.LEAVING:
                slot.worker.life = LifecycleState.GONE

    def _learn(self, slot: Slot, info: WorkerInfo | None, orders: WorkerOrders) -> None:
        if info is None or slot.own.process != info.process:
            return
        if slot.stage is Stage.STARTING:
            slot.stage = Stage.READY
        slot.role = orders.role or info.role
        if orders.drain and slot.stage is Stage.READY:
            slot.stage = Stage.LEAVING

    def _roll(self, host: Host, snapshot: Snapshot) -> None:
        if min(snapshot.launchers, default="") == host.id:
            claimed = {name for held in snapshot.launchers.values() for name in held.workers} | host.slots.keys()
            loading = len(claimed - snapshot.workers.keys())
            old = [name for name, info in snapshot.workers.items() if info.generation != host.generation]
            chosen = to_replace(snapshot.workers, old, snapshot.orders.keys(), loading, 1)
            self._order_all({name: {"restart": True} for name in chosen}, snapshot)

    def _start(self, host: Host, worker_id: str, role: Role) -> None:
        process = Worker(worker_id, role, f"{worker_id}#{next(self._numbers)}", self.generation)
        self.workers.append(process)
        host.slots[worker_id] = Slot(role, process)
        self._hold_ids(host)

    # ---- workers -----------------------------------------------------------------------------------------------

    def beat(self, process: Worker) -> None:
        """Its heartbeat: it registers, and hears of its orders."""
        if process.life in (LifecycleState.STARTING, LifecycleState.GONE):
            return
        info, orders = self._registered.get(process.id, (process.info, NOTHING))
        self._put(process, orders if info.process == process.process else NOTHING)
        if process.carry_out(orders) and process.life is not LifecycleState.GONE:
            self._put(process, NOTHING)

    def move(self, process: Worker) -> None:
        """It ends what it is at: loading, or draining to leave."""
        if process.life is LifecycleState.STARTING:
            process.life = LifecycleState.READY
            self._put(process, NOTHING)
        elif process.life is LifecycleState.LEAVING:
            process.life = LifecycleState.GONE
            self._leave(process.id)

    # ---- deaths ------------------------------------------------------------------------------------------------

    def die(self, process: Worker) -> None:
        """Its entry stays until its launcher notices, or its time is over."""
        process.life, process.restarts = LifecycleState.GONE, True

    def kill(self, host: Host) -> None:
        """A launcher dies, and its workers with it. Its claims and their entries stay for a while."""
        self.hosts.remove(host)
        for slot in host.slots.values():
            slot.worker.life = LifecycleState.GONE
        self.workers = [w for w in self.workers if w.life is not LifecycleState.GONE or not self._is_of(host, w)]

    def expire(self, which: int | None = None) -> None:
        """What nobody refreshes any more: one of it, or all."""
        alive = {w.process for w in self.workers if w.life not in (LifecycleState.STARTING, LifecycleState.GONE)}
        dead = sorted(name for name, (info, _) in self._registered.items() if info.process not in alive)
        dead += sorted(self._launchers.keys() - {host.id for host in self.hosts})
        for name in dead if which is None else dead[which % len(dead) :][:1] if dead else ():
            self._leave(name)
            self._launchers.pop(name, None)

    @staticmethod
    def _is_of(host: Host, process: Worker) -> bool:
        return any(slot.worker is process for slot in host.slots.values())

    # ---- the registry ------------------------------------------------------------------------------------------

    def _hold_ids(self, host: Host) -> None:
        held = {name: slot.role for name, slot in host.slots.items()}
        self._launchers[host.id] = Launcher(held, self.generation)

    def _free_id(self) -> str:
        taken = self._registered.keys() | {name for held in self._launchers.values() for name in held.workers}
        return next(name for n in itertools.count() if (name := f"worker-{n}") not in taken)

    def _order_all(self, told: dict[str, dict[str, object]], seen: Snapshot) -> bool:
        if told and seen.version != self._version:
            return False
        for worker_id, what in told.items():
            info, orders = self._registered[worker_id]
            orders = msgspec.structs.replace(orders, sequence=next(self._numbers) + 1, **what)
            self._change(worker_id, (info, orders))
        return True

    def _put(self, process: Worker, orders: WorkerOrders) -> None:
        if self._registered.get(process.id) != (process.info, orders):
            self._change(process.id, (process.info, orders))

    def _leave(self, worker_id: str) -> None:
        if worker_id in self._registered:
            self._change(worker_id, None)

    def _change(self, worker_id: str, entry: tuple[WorkerInfo, WorkerOrders] | None) -> None:
        self._registered.pop(worker_id, None)
        if entry is not None:
            self._registered[worker_id] = entry
        self._version = b"%d" % next(self._numbers)
