"""The fleet's processes that this launcher runs: frontends and workers, watched, restarted, and ended in order.

Redis, the run folder and signals are launcher.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from orchestrator.config.server_args import needs_client_certificate, uses_tls
from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.commands import Setup
from orchestrator.launch.console import Console
from orchestrator.launch.decisions.fleet_size import FleetSize, Idleness
from orchestrator.launch.host.leftovers import SharedMemory
from orchestrator.launch.host.run_folder import StartedProcess
from orchestrator.launch.machines import Machines, frontend_named
from orchestrator.launch.pools.frontend_pool import FrontendPool, OfModel
from orchestrator.launch.pools.worker_pool import WorkerPool
from orchestrator.launch.registry_watch import RegistryWatch, Snapshot
from orchestrator.launch.rollout import RolloutRunner, cannot_start
from orchestrator.launch.supervise import Stage, Supervised, describe
from orchestrator.process.parent import EXIT_AGAIN, has_ended, local_pid
from orchestrator.process.tasks import Turns, cancelled, ticks
from orchestrator.store.planned import BY_HAND, Seen, decided, of_launchers
from orchestrator.store.registry import Registry
from orchestrator.types import IDLE, DesiredRatio, Role

log = logging.getLogger("pd.launcher")

_LOOK_EVERY_S = 30.0
_MACHINES_EVERY_S = 1.0
_POLL_S = 0.1
_READY_REQUEST_TIMEOUT_S = 2.0
_CONNECT_S = 10.0  # for frontends to connect to all workers; an unreachable worker does not delay the others


class StartFailed(ConfigError):
    """The fleet did not start. One line: the process, and its reason."""


class StartLater(StartFailed):
    """It may start the next time, as it is: a process said so of itself, each time."""


@contextlib.asynccontextmanager
async def _asking() -> AsyncIterator[Callable[[str], Awaitable[bool]]]:
    """In it, whether a page of our own processes answers with 200."""
    import httpx  # now: its import takes long, and processes begin with theirs once this one has its modules

    async def is_ok(url: str) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await client.get(url)).status_code == httpx.codes.OK
        return False

    # The certificate is for those who come from outside.
    own = httpx.AsyncClient(timeout=_READY_REQUEST_TIMEOUT_S, trust_env=False, verify=False)  # noqa: S501
    async with own as client:
        yield is_ok


class FleetProcesses:
    """`start`, then `until_ready` while `watch` runs; `end`, whatever happens. `config` is resolved."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        machines: Machines,
        console: Console,
        note_started: Callable[[list[StartedProcess], frozenset[str]], None],
        setup: Setup,
        prepare: Callable[[Config, int], Awaitable[Setup]],
        frontends: FrontendPool,
    ) -> None:
        """`setup`: what processes are started with at first; `prepare` makes the setup of another configuration.
        `frontends`: of all models. They serve this one once `self.frontends` is told to `serve`."""
        self.config = config
        self.desired = DesiredRatio(config.workers.prefill.replicas, config.workers.decode.replicas, "launcher")
        self.watch = RegistryWatch(registry, self._update)
        self.registry = registry
        self._console = console
        self._note_started = note_started
        self._model = setup.model  # its name, where the fleet has several
        self._size = FleetSize(config.scale)
        self._idleness = Idleness()
        self._shared_memory = SharedMemory()
        self._looked_at = 0.0  # monotonic; when it was looked for
        self._ended: list[int] = []  # process groups whose shared memory is to be removed
        self._pool = WorkerPool(registry, machines, console.log, self._show, setup)
        self._machines = machines
        self._looking: asyncio.Task[None] | None = None
        self._all_frontends = frontends
        self.frontends = OfModel(frontends, setup, registry, self._show)
        self._rolling = RolloutRunner(config, registry, self._pool, self.frontends, prepare)
        self._came_up = False

    async def start(self) -> None:
        """Set the desired ratio, unless others run this fleet; start what is missing. Raises ConfigError, RedisAway."""
        await self.remove_dead_entries()
        await self._begin_version()
        await self.registry.configuration.write(self._rolling.version)
        await self._pool.begin(self.desired)
        await self._machines.refresh()
        await self._take_over()
        await decided(self._start_missing)
        await self._update_frontends(self.watch.snapshot)
        self._looking = asyncio.create_task(self._refresh_machines(), name="machines")

    async def _start_missing(self) -> bool | None:
        """Start what nobody runs, as far as it fits; None if the fleet has changed. Raises ConfigError, RedisAway."""
        reading = await self.registry.read()
        self.desired = reading.desired or self.desired
        others = self._pool.workers_of_others(reading.launchers)
        there = [others[name] for name in others.keys() - self._pool.slots.keys()]
        there += [slot.role for slot in self._pool.slots.values()]
        wanted = self.desired.now
        missing = [Role.PREFILL] * (wanted.prefill - there.count(Role.PREFILL))
        missing += [Role.DECODE] * (wanted.decode - there.count(Role.DECODE))
        try:
            missing = self._machines.fitting(missing)
        except ConfigError as error:
            if not there and self.config.idle_after_s is not None:
                idle = msgspec.structs.replace(self.desired, set_by=IDLE, why=str(error))  # others have its room now
                return True if await self.registry.steer(reading.seen, desired=idle) is not None else None
            if not there:
                raise
            missing = []  # what does not fit here may fit there
        return await self._pool.start(reading.seen, missing) or None

    async def until_ready(self) -> None:
        """Returns when all is up, frontends have greeted the workers, and the endpoint answers. Raises StartFailed."""
        async with _asking() as is_ok:
            up_at: float | None = None  # monotonic
            said = False
            while True:
                if self._up(self._processes()) and self.frontends.all_serve and self.url:
                    self._came_up = True
                    up_at = up_at or time.monotonic()
                    up_s = time.monotonic() - up_at
                    greeted = self.watch.snapshot.connected(len(self._all_frontends.processes))
                    if (up_s > _CONNECT_S or greeted) and await self._answers(is_ok):
                        return
                    if up_s > _CONNECT_S and not said:
                        said = True
                        log.warning("%s/ready is not, though all processes here are: it waits for others", self.url)
                    self.watch.read_soon()
                await asyncio.sleep(_POLL_S)

    async def until_started(self) -> None:
        """Returns when all workers are up. Raises StartFailed."""
        while not self._up([slot.process for slot in self._pool.slots.values()]):
            await asyncio.sleep(_POLL_S)
        self._came_up = True

    async def until_served(self) -> None:
        """Returns when all frontends of this launcher serve this model. Raises StartFailed."""
        while not self.frontends.renewed:
            self._up(self.frontends.of_generation(self.frontends.setup.generation))
            await asyncio.sleep(_POLL_S)

    async def _answers(self, is_ok: Callable[[str], Awaitable[bool]]) -> bool:
        if needs_client_certificate(self.config):
            return True  # not known: there is no client certificate to ask with
        page = f"models/{self._model}/ready" if self._model else "ready"
        return await is_ok(f"{self.url}/{page}")

    async def end(self) -> None:
        """Frontends first, so that nothing new comes; then workers, all at once. Returns when all are gone."""
        await cancelled(self._looking)
        await self._rolling.close()
        await self.frontends.close()
        await self._pool.close()

    def kill(self) -> None:
        for process in self._processes():
            process.request_stop()
            process.kill()

    @property
    def url(self) -> str:
        if self._machines.remote:
            return next((frontend.url for frontend in self.watch.snapshot.frontends.values() if frontend.url), "")
        host = self.config.frontend.host
        loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - not bound here
        shown = loopback.get(host, f"[{host}]" if ":" in host else host)
        return f"{'https' if uses_tls(self.config) else 'http'}://{shown}:{self.config.frontend.port}"

    def _processes(self) -> list[Supervised]:
        """Frontends are those of the first model."""
        frontends = self._all_frontends.processes if self.frontends.is_first else ()
        return [*frontends, *(slot.process for slot in self._pool.slots.values())]

    async def _take_over(self) -> None:
        """Supervise the processes that an earlier launcher left running. Raises ConfigError, RedisAway."""
        found = await self._machines.left_running()
        frontends = [name for name in found if frontend_named(name) is not None]
        if self.frontends.is_first:
            self._all_frontends.take_over(frontends)
        left = [name for name in found if name not in frontends]
        if left and self._pool.workers_of_others(await self.registry.launchers()).keys() & set(left):
            await asyncio.sleep(self.config.workers.timeout_s)  # in which the claims of a launcher that is dead run out
        registered, others = (
            await self.registry.workers(),
            self._pool.workers_of_others(await self.registry.launchers()),
        )
        # Where another launcher lives, it runs its own.
        roles = {unit: registered[unit].role if unit in registered else None for unit in left if unit not in others}
        taken = await self._machines.take_over(roles)
        for unit, role in roles.items():
            if unit not in taken:
                log.warning("%s: ending what an earlier launcher left of it", unit)
                await self._machines.give_back(unit)
                continue
            log.info("%s: runs already; taking it over", unit)
            self._pool.supervise(unit, role or taken[unit])

    async def _refresh_machines(self) -> None:
        turns = Turns(log, "the machines")
        async for _ in ticks(_MACHINES_EVERY_S):
            with turns.turn():
                await self._machines.refresh()

    async def remove_dead_entries(self) -> None:
        """Of what ran here and does not any more: its ratio would stay, and a different fleet could not join it."""
        for launcher_id in await self.registry.launchers():
            if has_ended(launcher_id.removeprefix(BY_HAND)):
                await self.registry.leave_launcher(launcher_id)
        for worker_id, info in (await self.registry.workers()).items():
            if has_ended(info.process):
                await self.registry.leave(worker_id, info.kv.engine_id)

    async def _begin_version(self) -> None:
        """Start with the version of the fleet's last rollout, if there was one. Raises ConfigError, RedisAway."""
        launchers = of_launchers(await self.registry.launchers())  # also of an idle model without workers
        others = launchers.keys() - {self._pool.launcher_id}
        runs = any((await self._machines.left_running()).values())  # a place without processes runs nothing
        alone = not others and not runs and not await self.registry.workers()
        if alone:
            await self.registry.forget_log_levels()
        await self._rolling.begin(alone)

    async def _update(self, snapshot: Snapshot) -> None:
        if snapshot.was_away:  # of which processes die, too: that says nothing about them
            for process in self._processes():
                process.restart_now()
        await self._update_frontends(snapshot)
        # Redis was restarted, and has forgotten; a frontend or an operator may have set the ratio again before this.
        if await self.registry.configuration.read() is None:
            await self.registry.configuration.put_back(self._rolling.version)
        self.desired = await self.registry.restored(self.desired, snapshot.desired) or self.desired
        snapshot = msgspec.structs.replace(snapshot, desired=self.desired)
        await self._pool.update(snapshot)
        # Of several launchers one decides, and none on those alone who came back to Redis first.
        first = min(of_launchers(snapshot.launchers), default="") == self._pool.launcher_id
        leads = first and self._pool.sees_all(snapshot)
        if self._came_up:
            await self._rolling.follow(snapshot, leads)
        self._size.scale = self._pool.setup.config.scale
        resize = self._size.observe(snapshot) if self._size.is_on else None  # also of a time in which another one led
        if resize is not None and leads and not self.desired.idle:
            await self._resize(resize)
        if self._came_up and leads:
            await self._rest(snapshot)
        await self.remove_shared_memory()
        self._note_processes()

    async def _update_frontends(self, snapshot: Snapshot) -> None:
        if self.frontends.is_first:
            await self._all_frontends.update(snapshot)

    async def remove_shared_memory(self) -> None:
        """Of processes that have ended."""
        while self._ended:  # in a thread: it reads what every process of this machine maps
            removed = await asyncio.to_thread(self._shared_memory.remove_files_of, self._ended.pop())
            if removed:
                log.info("removed shared memory that a dead process left: %s", ", ".join(removed))

    async def _resize(self, wanted: DesiredRatio) -> None:
        """Change the size, unless somebody else has set one meanwhile. Raises RedisAway."""
        was = self.desired
        if await self.registry.steer(Seen.ratio(was), desired=wanted) is not None:
            sizes = f"{was.prefill}P{was.decode}D -> {wanted.prefill}P{wanted.decode}D"
            log.info("scale: %s: %s", sizes, wanted.why)

    async def _rest(self, snapshot: Snapshot) -> None:
        """End the workers of a model that nobody asks for. Raises RedisAway."""
        idle_after_s = self._pool.setup.config.idle_after_s
        if self._idleness.observe(snapshot, self.desired, idle_after_s):
            why = f"no request for {idle_after_s:g} s"
            idle = msgspec.structs.replace(self.desired, set_by=IDLE, why=why)
            if await self.registry.steer(Seen.ratio(self.desired), desired=idle) is not None:
                log.info("%s: %s: its workers end until the next", self.config.name_served, why)

    def _note_processes(self) -> None:
        """Write down what runs, for the one that cleans up if this process is killed."""
        running = [process for process in self._processes() if process.pid]
        loading = any(process.stage is Stage.STARTING for process in running)
        if loading or time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._shared_memory.scan({part.pid for process in running for part in process.parts})
            self._looked_at = time.monotonic()
        # Those on other machines are not to be cleaned up: the next launcher takes them over.
        here = [] if self._machines.remote else running
        started = [StartedProcess(part.name, part.identity) for process in here for part in process.parts]
        self._note_started(started, self._shared_memory.names)

    def _show(self, process: Supervised) -> None:
        self._looked_at = 0.0  # one that has loaded has all of its shared memory
        if not process.pid:  # what ran last has ended, though it may start again at once
            pids = (local_pid(part.identity) for part in process.parts)
            self._ended += [pid for pid in pids if pid is not None]
        role = f"{slot.role.value}, " if (slot := self._pool.slots.get(process.name)) is not None else ""
        shown = process.stage.value
        if process.stage is Stage.PAUSING and process.last_exit is not None and process.last_exit.final:
            shown = "cannot work as it is"
        self._console.stage(process.name, f"{role}{shown}", done=process.stage in (Stage.READY, Stage.ENDED))
        self.watch.read_soon()

    def _up(self, processes: list[Supervised]) -> bool:
        for process in processes:
            self._check_start(process)
        return all(process.stage is Stage.READY for process in processes)

    def _check_start(self, process: Supervised) -> None:
        """Raises StartFailed if a process reports that it cannot work, or crashes again and again; StartLater if it
        ended to be started again, as where Redis answers this launcher and not its host."""
        end = process.last_exit
        if end is None or end.was_ready or (self.watch.is_away and not end.final):
            return  # without Redis nothing starts, which says nothing about it
        if cannot_start(process) or process.stage is Stage.ENDED:
            self._console.stop_progress()
            if not end.final:  # a final reason needs no more
                self._console.show_failure(process.name, process.last_lines)
            log_file = self._console.log_file
            where = f"; log: {log_file.path}" if log_file is not None else ""
            kind = StartLater if end.code == EXIT_AGAIN else StartFailed
            raise kind(f"{process.name} did not start: it {describe(end)}{where}")
