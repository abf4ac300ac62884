"""One worker process: starts the engine, joins the fleet, serves until it leaves or its engine dies.

Builds the parts of a worker and owns their loops, the registry entry and the heartbeat. Engines, messages and changes
of role are in other modules.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any

import msgspec

from orchestrator.config.settings import Config
from orchestrator.config.values import labels_of, strict_label
from orchestrator.process.parent import EXIT_AGAIN, own_identity, report_exit, tell_alive
from orchestrator.process.tasks import cancelled, left_s, set_whenever, ticks, until_told
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.fields import Departed, Heartbeat
from orchestrator.store.operator.log_levels import LogLevels, follow_log_level
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import IncompatibleWorker, Registry
from orchestrator.types import Role, WorkerInfo
from orchestrator.wire.addresses import Listening
from orchestrator.wire.curve import KeyPair
from orchestrator.wire.transport import WorkerTransport
from workers.attempts import Attempts
from workers.claims import ClaimLoop
from workers.engine import Engine, EngineDead, EngineInfo
from workers.load.reports import LoadReporter, PrefixReporter
from workers.peers import FRONTEND_GONE_S, FRONTENDS_CHECK_S, Frontends, IdInUse, Meetings, Peers, refuse_duplicate_id
from workers.prefills import Parts, Prefills
from workers.serving import Serving
from workers.unit.lifecycle import Drain, Lifecycle, LifecycleState, Moves
from workers.unit.link import GroupLink

log = logging.getLogger("pd.worker")

JOIN_RETRY_S = 0.25
EXIT_LEFT, EXIT_ENGINE_DEAD = 0, 1


class Agent:
    """`run()` once. `request_stop` may be called from a signal handler on the loop."""

    def __init__(
        self,
        engine: Engine,
        redis: Redis,
        config: Config,
        worker_id: str,
        role: Role,
        at: Listening,
        generation: int,
        link: GroupLink | None = None,
    ) -> None:
        """`link`: to the other ranks of its unit; None where it is alone."""
        self.worker_id, self._link = worker_id, link or GroupLink(config, redis, worker_id, (), at, generation)
        self.life = Lifecycle(role)
        self._generation = generation
        self.info: WorkerInfo | None = None
        self._engine, self._config, self._listening = engine, config, at
        self._registry = Registry(redis, config.namespace)
        self._log_levels = LogLevels(redis, config.namespace)
        self._queue = PrefillQueue(redis, config.namespace, worker_id, lease_s=config.workers.lease_s)
        self._attempts = Attempts()
        self._beat_now, self._ended = asyncio.Event(), asyncio.Event()
        self._exit_code, self._redis_away, self._died_of = EXIT_LEFT, False, ""
        self._told = Heartbeat()
        self.joined = False

    async def run(self) -> int:
        """Serve until drained, stopped or the engine dies. Returns the exit code: 0 left, 1 engine dead, 75 to restart.

        Raises IncompatibleWorker, IdInUse, EngineStartFailed, ConfigError, OSError.
        """
        engine_info = await self._link.start(self._engine, self._config.workers.start_timeout_s, self._ended)
        if engine_info is None:
            return EXIT_LEFT
        self._keys = KeyPair.new() if self._config.security.mesh == "curve" else None
        self._transport = WorkerTransport(self._listening, keys=self._keys, find_frontends=self._registry.frontends_of)
        self.info = self._describe(engine_info)
        self._build(self.info)
        return await self._serve()

    def _describe(self, engine: EngineInfo) -> WorkerInfo:
        host, config = self._listening.reached_at, self._config
        labels = tuple(f"{name}={value}" for name, value in config.workers.labels.items())
        return WorkerInfo(
            id=self.worker_id,
            role=self.life.role,
            started_as=self.life.role,
            state=self.life.registered,
            host=host,
            pid=os.getpid(),
            process=own_identity(),
            generation=self._generation,
            ranks=self._link.ranks,
            pairs_within=labels_of(host, labels).get(strict_label(config.routing.pairing), ""),
            labels=labels,
            request_address=self._transport.request_address,
            load_address=self._transport.load_address,
            mesh_key=self._keys.public if self._keys else "",
            **{name: getattr(engine, name) for name in engine.__struct_fields__},
        )

    def _build(self, info: WorkerInfo) -> None:
        """Make the parts of the worker, in the order of their dependencies."""
        self._frontends = Frontends(self._transport.send)
        timeout_s = self._config.workers.timeout_s
        self._peers = Peers(
            info.id, self._registry, self._attempts, timeout_s, lambda: self.life.claims, self._peer_died
        )
        self._meetings = Meetings(self._registry, self._engine)
        mesh = self._transport
        self._load = LoadReporter(
            info.id, info.blocks_total, self._attempts, mesh.publish, lambda: mesh.corrupt, lambda: self._told.workers
        )
        self._load.longest_step_s = info.speed.prefill_s_per_token * info.max_num_batched_tokens
        self._prefix = PrefixReporter(info.id, self._transport.publish, self._frontends.send, self._load)
        parts = Parts(info, self._engine, self._queue, self._frontends, self._attempts, self._load)
        self._prefills = Prefills(parts, self._may_claim, self._fetches(info))
        self._claims = ClaimLoop(parts, self._prefills, self._config, self._may_claim)
        self._serving = Serving(parts, self._prefills, self._prefix, self._link)
        drain = Drain(parts, self._claims, self._prefills, self._serving)
        self._moves = Moves(
            life=self.life,
            drain=drain,
            config=self._config,
            info=info,
            clear_orders=lambda sequence: self._registry.clear_orders(info.id, sequence),
            announce=self._heartbeat_now,
            end=self._ended.set,
        )

    def _fetches(self, info: WorkerInfo) -> bool:
        """Whether this worker fetches prefixes; the log says why it does not although the configuration permits it."""
        wanted = self._config.kv.fetch == "auto"
        if wanted and not info.lends:
            log.info(
                "kv.fetch: auto does nothing here: prefixes are not cached, the model has a recurrent state, ranks "
                "share prompts, or KV of this model or of an engine with pipeline stages goes as whole prompts only"
            )
        return wanted and info.lends

    async def _serve(self) -> int:
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._join()
            tasks = [asyncio.create_task(loop, name=name) for name, loop in self._loops().items()]
            ended = asyncio.create_task(self._ended.wait())
            await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            for task in tasks:
                if task.done():
                    self._set_exit_code(task)
            if self._died_of:
                self._serving.engine_crashed(self._died_of, await self._link.died())
            return EXIT_AGAIN if self._moves.restarts and self._exit_code == EXIT_LEFT else self._exit_code
        finally:
            if self.life.can_enter(LifecycleState.GONE):
                self.life.enter(LifecycleState.GONE)
            await cancelled(*tasks)
            await self._close()

    def _loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """By name. They run until the worker leaves; one that ends by itself ends it. Of several the first says why."""
        return {
            "receive": self._receive(),
            "pump": self._pump(),
            "report": self._load.run(self._engine, self._claims.wake),
            "claims": self._claims.run(),
            "heartbeat": self._heartbeat(),
            "frontends": self._check_frontends(),
            "orders": set_whenever(self._beat_now, self._registry.ordered(self._current().unit)),
            "log level": follow_log_level([self._log_levels], self.worker_id, logging.getLogger("pd")),
            "ranks": self._link.watch(lambda: self.life.state is LifecycleState.LEAVING, self._ended.set),
        }

    def _set_exit_code(self, task: asyncio.Task[None]) -> None:
        """Set the exit code for a loop that ended by itself, and log why. Raises IncompatibleWorker, IdInUse."""
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, IncompatibleWorker | IdInUse):
            raise error  # raised when the worker registered again after Redis had lost its entry
        if isinstance(error, EngineDead) and self._moves.drained:
            return  # nothing is left here, and the other ranks of its unit have just left
        of_engine, said = isinstance(error, EngineDead), f": {error!r}" if error else ", without an error"
        why = str(error) if of_engine else f"{task.get_name()} ended unexpectedly{said}"
        log.error("leaving: %s", why, exc_info=None if of_engine else error)
        self._died_of = self._died_of or (why if of_engine else "")
        if self._exit_code == EXIT_LEFT:
            self._exit_code = EXIT_ENGINE_DEAD
            report_exit("", why, final=False)  # what the engine's processes write after it is not why

    async def _close(self) -> None:
        await self._moves.close()
        self._meetings.close()
        await self._peers.close()
        await self._prefills.close()
        await self._queue.aclose()
        await self._serving.close()
        self._prefix.close()
        self._load.close()
        try:
            if self.joined:  # otherwise an entry with this id belongs to another process
                await self._registry.leave(self.worker_id, self._current().kv.engine_id)
        except RedisAway as error:
            log.warning("left without notice: %s", error)
        try:
            async with asyncio.timeout(self._config.launcher.stop_timeout_s):
                await self._engine.stop()
        except TimeoutError:
            log.error("the engine did not stop in time")
        except EngineDead:
            log.debug("the engine was dead already")
        self._transport.close()

    # ---- joining and staying -----------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Register, and try again while Redis is away. Raises IncompatibleWorker, IdInUse."""
        self.life.enter(LifecycleState.READY)
        while not self._ended.is_set():
            try:
                await self._registry.replace(self._current(), self._config.workers.timeout_s, refuse_duplicate_id)
                self.joined = True
                break
            except RedisAway as error:
                self._note_redis(error)
                await asyncio.sleep(JOIN_RETRY_S)
        assert self.info is not None
        role, blocks, identity = self.life.role.value, self.info.blocks_total, self.info.identity
        text = "ready: %s worker, engine %s, %d KV blocks of %d tokens"
        log.info(text, role, identity.engine, blocks, identity.block_size)

    def _may_claim(self) -> bool:
        return self.life.claims and not self._redis_away and self._told.decodes and not self._load.stuck

    def _current(self) -> WorkerInfo:
        assert self.info is not None
        now = {"role": self.life.role, "state": self.life.registered, "drained": self._moves.drained}
        self.info = msgspec.structs.replace(self.info, **now)
        return self.info

    async def _heartbeat(self) -> None:
        while True:
            try:
                if self._redis_away and self.life.claims:  # a heartbeat that is answered too late would count there
                    await self._registry.known_for_s()
                last = self._told.last_departure if self._peers.concerned else ""
                timeout_s, mine = self._config.workers.timeout_s, self._current()
                self._told = await self._registry.refresh(mine, timeout_s, last, refuse_duplicate_id)
                self._note_redis(None)
                self._peers.note(self._told.departed, idle=not self._load.held)
                self._meetings.note(self._told, mine)
                await self._moves.carry_out(self._told, mine)
            except RedisAway as error:
                self._note_redis(error)
            await until_told(self._beat_now, left_s(self._config.workers.heartbeat_s))

    async def _check_frontends(self) -> None:
        async for late_s in ticks(FRONTENDS_CHECK_S):
            await self._serving.check_frontends(FRONTEND_GONE_S, time.monotonic(), late_s)

    def _note_redis(self, error: RedisAway | None) -> None:
        if error is not None:
            tell_alive()
        was_away, self._redis_away = self._redis_away, error is not None
        if error is not None and not was_away:
            log.warning("serving on without Redis: %s", error)
        elif error is None and was_away:
            log.info("Redis is back")

    async def _peer_died(self, peer: Departed) -> None:
        try:
            await self._engine.fail_peer(peer.engine_id)
        except RuntimeError as error:  # this engine may be dead too
            log.info("the engine was not told that %s is dead: %s", peer.worker_id, error)
        self._load.dirty.set()
        self._prefills.fetches.late.forget(peer.engine_id)
        await self._claims.peer_died(peer.worker_id)

    # ---- the data path -----------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            await self._serving.handle(*await self._transport.receive())

    async def _pump(self) -> None:
        while True:
            await self._serving.deliver(await self._engine.next_step())

    # ---- leaving -----------------------------------------------------------------------------------------------

    def request_stop(self, timeout_s: float) -> None:
        """Drain for at most `timeout_s` and leave; leave at once at the second call, or while the engine starts."""
        if self.life.can_enter(LifecycleState.LEAVING):
            self._moves.leave(timeout_s)
        else:
            self._ended.set()

    def _heartbeat_now(self) -> None:
        self._beat_now.set()
        self._claims.wake()
