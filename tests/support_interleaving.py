"""Launchers, operators, frontends and workers of one fleet on a real Redis, whose calls are let through one at a time.

The launchers' and operators' code is the real one; who is let through next, and who dies, is the test's. After every
call it is checked what that call has changed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from support_redis import worker
from support_wait import DEADLINE_S

from orchestrator.config.settings import Config, Refused, parse_config
from orchestrator.launch.commands import Setup
from orchestrator.launch.fleet_processes import FleetProcesses
from orchestrator.launch.pools.worker_pool import Slot, WorkerPool
from orchestrator.launch.registry_watch import RegistryWatch, Snapshot
from orchestrator.launch.supervise import Stage
from orchestrator.store import steering
from orchestrator.store.client import Redis
from orchestrator.store.planned import Reading
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Registry
from orchestrator.types import DesiredRatio, Role, WorkerState

TTL_S = 600.0  # nobody's time runs out by itself
QUIET_ROUNDS = 40  # more than any fleet here needs


class Gate:
    """A Redis whose every call waits until `World.let` names its caller."""

    def __init__(self, redis: Redis, world: World, name: str) -> None:
        self._redis, self._world, self._name = redis, world, name

    async def call(self, *args: Any) -> Any:
        await self._world.turn(self._name)
        return await self._redis.call(*args)

    async def execute_command(self, *args: Any) -> Any:
        await self._world.turn(self._name)
        return await self._redis.execute_command(*args)


class Process:
    """What `WorkerPool` needs of a supervised process, and the worker in it."""

    def __init__(self, name: str, role: Role, number: int) -> None:
        self.name, self.stage, self.pid = name, Stage.STARTING, 1
        self.last_identity = f"{name}#{number}"
        self.info = msgspec.structs.replace(worker(name, role), process=self.last_identity, state=WorkerState.READY)
        kv = msgspec.structs.replace(self.info.kv, engine_id=self.last_identity)
        self.info = msgspec.structs.replace(self.info, kv=kv, request_address=f"tcp://{self.last_identity}")
        self.registered = False

    def runs_as(self, process: str) -> bool:
        return process == self.last_identity

    def mark_ready(self) -> None:
        self.stage = Stage.READY if self.stage is Stage.STARTING else self.stage

    def expect_exit(self, deadline_s: float) -> None:
        self.stage = Stage.LEAVING
        self.pid = 1 if deadline_s else 0

    def seen(self) -> None: ...

    def missed(self, looked_s: float, timeout_s: float, there: Collection[str] = ()) -> None: ...


class Launcher(WorkerPool):
    """A launcher's real pool; it plans on the last reading, as `FleetProcesses` does."""

    def __init__(self, world: World, registry: Registry, name: str) -> None:
        machines = SimpleNamespace(fitting=list, room=None, use=lambda config: None)
        setup = Setup(0, world.config, Path("unused"))
        super().__init__(registry, machines, print, print, setup, name)  # type: ignore[arg-type]
        self._world = world
        self.held: DesiredRatio | None = None
        self.acted = False  # since Redis was emptied
        self.watch = RegistryWatch(registry, self._follow)

    def supervise(self, worker_id: str, role: Role) -> None:
        process = Process(worker_id, role, next(self._world.numbers))
        self.slots[worker_id] = Slot(role, process, self.setup)  # type: ignore[arg-type]

    async def begin_fleet(self) -> None:
        await self.begin(DesiredRatio(1, 2, "launcher"))

    async def look(self) -> None:
        await self.watch.read()
        self.acted = True

    async def _follow(self, snapshot: Snapshot) -> None:
        self.held = await self._registry.restored(self.held, snapshot.desired)
        await self.update(msgspec.structs.replace(snapshot, desired=self.held, read_at=self._world.now))

    async def resize(self, more: int) -> None:
        """As for the objectives' sake."""
        if (was := self.held) is None:
            return
        fleet: Any = SimpleNamespace(registry=self._registry, desired=was)
        await FleetProcesses._resize(
            fleet, DesiredRatio(was.prefill, max(1, was.decode + more), "objectives", why="by chance")
        )


class World:
    """`moves` are what may happen next."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self.config: Config = parse_config({"model": "m", "engine": "sim", "namespace": namespace})
        self.numbers, self.now = itertools.count(), 1000.0
        self.launchers: dict[str, Launcher] = {}
        self.frontend_held: DesiredRatio | None = None
        self.frontend_acted = False
        self.log: list[str] = []
        self.accepted: dict[float, tuple[int, int]] = {}
        self._redis, self._admin = redis, Registry(redis, namespace)
        self._actors: dict[str, asyncio.Task[Any]] = {}
        self._began: dict[str, DesiredRatio | None] = {}  # what was desired when this launcher began
        self._known: set[str] = set()  # ids of workers that were claimed
        self._orders: dict[str, Callable[[DesiredRatio, Reading], tuple[int, int]]] = {}
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._moved = asyncio.Event()
        self._emptied = False
        for _ in range(2):
            self._launch()

    # ---- who does what -----------------------------------------------------------------------------------------

    def registry(self, name: str) -> Registry:
        return Registry(Gate(self._redis, self, name), self.config.namespace)  # type: ignore[arg-type]

    def _launch(self) -> None:
        name = f"launcher-{next(self.numbers)}"
        self.launchers[name] = launcher = Launcher(self, self.registry(name), name)
        self._act(name, launcher.begin_fleet())

    def order(self, verb: str, prefill: int | None, decode: int | None, chosen: int) -> None:
        """An operator's order, on a worker that there is now."""
        name = f"operator-{next(self.numbers)}"
        queue = PrefillQueue(Gate(self._redis, self, name), self.config.namespace)  # type: ignore[arg-type]
        steers = steering.Steering(self.registry(name), queue, heartbeat_s=0)
        there = sorted(p.name for p in self.processes() if p.registered)
        worker_id = there[chosen % len(there)] if there else ""
        if verb == "scale":
            self._orders[name] = lambda was, _: (
                was.prefill if prefill is None else prefill,
                was.decode if decode is None else decode,
            )
            self._act(name, steers.scale(prefill, decode, force=True))
        elif worker_id and verb == "drain":
            self._orders[name] = lambda was, now: _less(was, _role(now, worker_id))
            self._act(name, steers.drain(worker_id, force=False))
        elif worker_id:
            role = Role.PREFILL if chosen % 2 else Role.DECODE
            self._orders[name] = lambda was, _: _less(was, role.other, more=role)
            self._act(name, steers.change_role(worker_id, role, force=False))

    def _act(self, name: str, doing: Awaitable[Any]) -> None:
        async def act() -> None:
            try:
                await doing
            except Refused as why:
                self.log.append(f"{name}: {why}")
            finally:
                self._moved.set()

        self._actors[name] = asyncio.create_task(act())

    async def turn(self, name: str) -> None:
        self._turns[name] = asyncio.get_running_loop().create_future()
        self._moved.set()
        await self._turns[name]

    async def _parked(self) -> None:
        """Until everybody waits for a turn, or has ended."""
        while True:
            for name in [name for name, task in self._actors.items() if task.done()]:
                self._actors.pop(name).result()
            if self._actors.keys() <= self._turns.keys():
                return
            self._moved.clear()
            async with asyncio.timeout(DEADLINE_S):
                await self._moved.wait()

    def processes(self) -> Iterator[Process]:
        for launcher in self.launchers.values():
            for slot in launcher.slots.values():
                yield slot.process  # type: ignore[misc]

    # ---- what may happen ---------------------------------------------------------------------------------------

    async def moves(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        await self._parked()
        found: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            (f"{name} is let through", lambda name=name: self._let(name)) for name in sorted(self._turns)
        ]
        for name, launcher in sorted(self.launchers.items()):
            if name not in self._actors:
                found.append((f"{name} looks", lambda n=name, la=launcher: self._begin(n, la.look())))
        if "frontend" not in self._actors:
            found.append(("the frontend looks", lambda: self._begin("frontend", self._frontend_looks())))
        for process in sorted(self.processes(), key=lambda process: process.name):
            what = "has orders" if process.registered else "has loaded"
            found.append((f"{process.name} {what}", lambda p=process: self.beat(p)))
        return found

    async def _let(self, name: str) -> None:
        await self.let(name)

    async def _begin(self, name: str, doing: Awaitable[Any]) -> None:
        self._act(name, doing)

    async def _frontend_looks(self) -> None:
        registry = self.registry("frontend")
        self.frontend_held = await registry.restored(self.frontend_held, await registry.desired())
        self.frontend_acted = True

    async def resize(self, chosen: int) -> None:
        name, launcher = sorted(self.launchers.items())[chosen % len(self.launchers)]
        if name not in self._actors:
            self._orders[name] = lambda was, _: (was.prefill, max(1, was.decode + (1 if chosen % 2 else -1)))
            self._act(name, launcher.resize(1 if chosen % 2 else -1))

    async def let(self, name: str) -> bool:
        """One call to Redis, and what follows from its answer. False where it still has to wait."""
        if name.startswith("operator") and self._emptied:
            holders = [launcher.acted for launcher in self.launchers.values()] + [self.frontend_acted]
            if not all(holders):
                return False  # `settle` waits for two heartbeats of everybody
            self._emptied = False
        before = await self._admin.read()
        if name in self.launchers and name not in self._began:
            self._began[name] = before.desired
        self._turns.pop(name).set_result(None)
        await self._parked()
        after = await self._admin.read()
        assert not _serving(before) or _serving(after), f"{name} took the last decode worker: {self.log}"
        self._no_order_is_lost(name, before, after.desired)
        self._no_more_than_asked(after)
        return True

    def _no_order_is_lost(self, name: str, before: Reading, now: DesiredRatio | None) -> None:
        was = before.desired
        if now is None or now == was:
            return
        ratio = now.prefill, now.decode
        if now.set_at in self.accepted:  # Redis had lost it
            assert self.accepted[now.set_at] == ratio and (was is None or was.set_at < now.set_at)
            return
        self.accepted[now.set_at] = ratio
        if name in self._orders and was is not None:
            assert ratio == self._orders[name](was, before), f"{name} undid another's: {was}, {self.log}"
        if name not in self._orders:  # a launcher that starts alone
            assert self._began[name] == was, f"{name} undid what was ordered since it began: {was}, {self.log}"

    def _no_more_than_asked(self, now: Reading) -> None:
        slots = {process.name: process for process in self.processes()}
        claimed = {name for held in now.launchers.values() for name in held.workers} | slots.keys()
        new, self._known = claimed - self._known, claimed
        leaving = {name for name, told in now.orders.items() if told.drain}
        leaving |= {name for name, process in slots.items() if process.stage is Stage.LEAVING}
        if new and (asked := now.desired) is not None:
            staying = claimed - leaving
            assert len(staying) <= asked.prefill + asked.decode, f"{new} of {staying} for {asked}: {self.log}"

    async def beat(self, process: Process) -> None:
        """A worker registers; or it says that it is there, and does what it is told."""
        registry = self._admin
        if process.pid == 0:
            await self._end(process)
            return
        if not process.registered:
            process.registered = True
            await registry.join(process.info, TTL_S)
            return
        told = (await registry.refresh(process.info, TTL_S)).orders
        if told.drain:
            await self._end(process)
        elif told.role is not None:
            process.info = msgspec.structs.replace(process.info, role=told.role)
            await registry.refresh(process.info, TTL_S)
            await registry.clear_orders(process.name, told.sequence)

    async def _end(self, process: Process) -> None:
        for launcher in self.launchers.values():
            if (slot := launcher.slots.get(process.name)) is not None and slot.process is process:  # type: ignore[comparison-overlap]
                del launcher.slots[process.name]
        await self._admin.leave(process.name, process.last_identity)

    async def crash(self, chosen: int) -> None:
        """A worker dies; its launcher starts it again."""
        for launcher in self.launchers.values():
            for name, slot in launcher.slots.items():
                if slot.process.stage is not Stage.LEAVING and chosen % 3 == 0:
                    await self._admin.leave(name)
                    launcher.supervise(name, slot.role)
                    return
                chosen += 1

    async def kill(self, chosen: int) -> None:
        """A launcher dies with all of its workers, and is started again."""
        name = sorted(self.launchers)[chosen % len(self.launchers)]
        gone = self.launchers.pop(name)
        if (task := self._actors.pop(name, None)) is not None:
            self._turns.pop(name).cancel()
            await asyncio.gather(task, return_exceptions=True)
        for worker_id in gone.slots:
            await self._admin.leave(worker_id)
        await self._admin.leave_launcher(name)
        self._launch()

    async def empty(self) -> None:
        """Redis loses everything; each worker is back with its next heartbeat."""
        await self._parked()
        async for key in self._redis.scan_iter(match=f"{self._admin.keys.prefix}*", count=1000):
            await self._redis.delete(key)
        self._emptied, self.frontend_acted = True, False
        for launcher in self.launchers.values():
            launcher.acted = False
        for process in self.processes():
            if process.registered and process.pid:
                await self._admin.refresh(process.info, TTL_S)

    # ---- how it ends -------------------------------------------------------------------------------------------

    def newest_held(self) -> DesiredRatio | None:
        held = [launcher.held for launcher in self.launchers.values()] + [self.frontend_held]
        return max((one for one in held if one is not None), key=lambda one: one.set_at, default=None)

    async def quiet(self) -> None:
        """Everybody does all that is left to do; the fleet is what was ordered last."""
        held = self.newest_held()
        for _ in range(2):
            await self._everybody_acts()
        for _ in range(QUIET_ROUNDS):
            desired = await self._admin.desired()
            if desired is not None and self._shape() == (desired.prefill, desired.decode) and not self._turns:
                break
            await self._everybody_acts()
        assert desired is not None and (held is None or desired.set_at >= held.set_at), f"{held} is lost: {self.log}"
        ratio = desired.prefill, desired.decode
        assert self.accepted[desired.set_at] == ratio and self._shape() == ratio, f"{self._shape()}: {self.log}"

    async def _everybody_acts(self) -> None:
        self.now += 100  # in which everybody has been heard
        for process in list(self.processes()):
            await self.beat(process)
        for name, launcher in sorted(self.launchers.items()):
            if name not in self._actors:
                self._act(name, launcher.look())
        if "frontend" not in self._actors:
            self._act("frontend", self._frontend_looks())
        await self._parked()
        for _ in range(400):
            let = [await self.let(name) for name in sorted(self._turns)]
            if not any(let):
                return
        raise AssertionError(f"{sorted(self._turns)} never end: {self.log}")

    def _shape(self) -> tuple[int, int]:
        roles = [p.info.role for p in self.processes() if p.stage is not Stage.LEAVING]
        return roles.count(Role.PREFILL), roles.count(Role.DECODE)

    async def close(self) -> None:
        for task in self._actors.values():
            task.cancel()
        await asyncio.gather(*self._actors.values(), return_exceptions=True)


def _less(was: DesiredRatio, role: Role, more: Role | None = None) -> tuple[int, int]:
    counts = {Role.PREFILL: was.prefill, Role.DECODE: was.decode}
    counts[role] -= 1
    if more is not None:
        counts[more] += 1
    return max(0, counts[Role.PREFILL]), max(1, counts[Role.DECODE])


def _role(now: Reading, worker_id: str) -> Role:
    """The one that it has, or was told to take."""
    told = now.orders.get(worker_id)
    return told.role if told is not None and told.role is not None else now.workers[worker_id].role


def _serving(now: Reading) -> bool:
    """Whether a decode worker is ready and stays one."""
    ready = [w for w in now.workers.values() if w.role is Role.DECODE and w.state is WorkerState.READY]
    return any((told := now.orders.get(w.id)) is None or told.role is Role.DECODE and not told.drain for w in ready)
