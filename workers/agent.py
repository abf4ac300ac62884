"""One worker process: starts the engine, joins the fleet, serves until it leaves or its engine dies.

Wires the data path (`serving`), the claims, the load reports, the peers and the moves together and owns their loops.
What an engine does, what a message means and how a role changes is elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time

import msgspec

from orchestrator.config.settings import Config, ConfigError
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import IncompatibleWorker, Left, Ordered, Registry, Resync
from orchestrator.types import Role, WorkerInfo
from orchestrator.wire.transport import WorkerTransport
from workers.attempts import Attempts
from workers.claims import ClaimLoop
from workers.engine import Engine, EngineDead, EngineInfo
from workers.lifecycle import Life, Lifecycle
from workers.loads import LoadReporter
from workers.moves import Moves
from workers.peers import Peers, listening
from workers.prefix import PrefixReporter
from workers.serving import Serving

log = logging.getLogger("pd.worker")

IDLE_REPORT_S = 0.25
UNREPORTED_S = 0.025  # after something that no step may report, ask the engine this soon
ENGINE_HUNG_S = 120.0  # no step is as long as this
PUSHED_POLL_S = 0.02
JOIN_RETRY_S = 0.25
EXIT_LEFT, EXIT_ENGINE_DEAD = 0, 1


class EngineStartFailed(RuntimeError):
    """The engine did not start. One line."""


class IdInUse(RuntimeError):
    """Another living worker has this id. One line."""


class Agent:
    """`run()` once. `request_stop` may be called from a signal handler on the loop."""

    def __init__(self, engine: Engine, redis: Redis, config: Config, worker_id: str, role: Role, host: str) -> None:
        self.worker_id = worker_id
        self.life = Lifecycle(role)
        self.info: WorkerInfo | None = None
        self._engine, self._config, self._host = engine, config, host
        self._registry = Registry(redis, config.namespace)
        self._queue = PrefillQueue(redis, config.namespace, config.queue, worker_id)
        self._attempts = Attempts()
        self._beat_now = asyncio.Event()
        self._ended = asyncio.Event()
        self._exit_code = EXIT_LEFT
        self._redis_away = False
        self._joined = False

    async def run(self) -> int:
        """Serve until drained, stopped or the engine dies. Returns the exit code: 0 left in order, 1 engine dead.

        Raises IncompatibleWorker, IdInUse, EngineStartFailed, ConfigError, OSError.
        """
        started_at = time.time()
        engine = await self._start_engine()
        if engine is None:
            return EXIT_LEFT
        self._transport = WorkerTransport(self._host)
        self.info = WorkerInfo(
            id=self.worker_id,
            role=self.life.role,
            state=self.life.registered,
            host=self._host,
            pid=os.getpid(),
            request_address=self._transport.request_address,
            load_address=self._transport.load_address,
            identity=engine.identity,
            kv=engine.kv,
            blocks_total=engine.blocks_total,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            kv_bytes_per_token=engine.kv_bytes_per_token,
            started_at=started_at,
            supported_tasks=engine.supported_tasks,
        )
        self._load = LoadReporter(self.worker_id, engine.blocks_total, self._attempts, self._transport.publish)
        self._prefix = PrefixReporter(self.worker_id, self._transport.publish, self._transport.send, self._load)
        self._serving = Serving(
            self.worker_id,
            self._engine,
            self._attempts,
            self._load,
            self._prefix,
            self._transport.send,
            self.life.refusal,
            engine.identity.max_model_len,
        )
        self._claims = ClaimLoop(
            self.worker_id,
            engine,
            self._queue,
            self._config.queue,
            self._config.workers.claim_batches,
            self._engine,
            self._attempts,
            self._load,
            self._serving,
            lambda: self.life.claims and not self._redis_away,
        )
        self._serving.prefills = self._claims
        self._peers = Peers(self.worker_id, self._registry, self._config.workers.timeout_s, self._peer_died)
        self._moves = Moves(
            *(self.worker_id, self.life, self._config, self._registry, self._attempts, self._serving, self._claims),
            self._pushed,
            announce=self._announce,
            end=self._ended.set,
        )
        return await self._serve()

    async def _start_engine(self) -> EngineInfo | None:
        """None when it was told to stop meanwhile. Raises EngineStartFailed."""
        limit_s = self._config.workers.start_timeout_s
        starting = asyncio.create_task(self._engine.start(), name="engine-start")
        stopped = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({starting, stopped}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                return starting.result()
        except EngineDead as error:
            raise EngineStartFailed(f"the engine did not start: {error}") from error
        except (ValueError, TypeError) as error:  # what vLLM raises for arguments that cannot work
            raise ConfigError(str(error)) from error
        finally:
            stopped.cancel()
            starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await self._engine.stop()
        if self._ended.is_set():
            return None
        raise EngineStartFailed(f"the engine did not start within workers.start_timeout_s ({limit_s:g} s)")

    async def _serve(self) -> int:
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._join()
            data_path = (self._receive, self._pump, self._report, self._claims.run)
            loops = (*data_path, self._heartbeat, self._watch, self._peers.run)
            tasks = [asyncio.create_task(loop(), name=loop.__qualname__) for loop in loops]
            ended = asyncio.create_task(self._ended.wait())
            await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            for task in tasks:
                if task.done():
                    self._explain(task)
            return self._exit_code
        finally:
            if self.life.can_enter(Life.GONE):
                self.life.enter(Life.GONE)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close()

    def _explain(self, task: asyncio.Task[None]) -> None:
        """A loop ended by itself: that is an error, and decides how the process ends."""
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, IncompatibleWorker):
            raise error  # found when it entered again after Redis had lost it
        self._exit_code = EXIT_ENGINE_DEAD
        if isinstance(error, EngineDead):
            log.error("leaving: %s", error)
        else:
            log.error("leaving: %s ended unexpectedly", task.get_name(), exc_info=error)

    async def _close(self) -> None:
        await self._moves.close()
        await self._peers.close()
        await self._claims.close()
        await self._serving.close()
        self._prefix.close()
        self._load.close()
        try:
            if self._joined:  # else the entry of this id, if any, is another's
                await self._registry.leave(self.worker_id)
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
        """Raises IncompatibleWorker, IdInUse. While Redis is away it is tried again: the engine is loaded already."""
        self.life.enter(Life.READY)
        while not self._ended.is_set():
            try:
                await self._refuse_twin()
                await self._registry.join(self._current(), self._config.workers.timeout_s)
                self._joined = True
                break
            except RedisAway as error:
                self._note_redis(error)
                await asyncio.sleep(JOIN_RETRY_S)
        assert self.info is not None
        log.info(
            "ready: %s worker, engine %s, %d KV blocks of %d tokens",
            *(self.life.role.value, self.info.identity.engine, self.info.blocks_total, self.info.identity.block_size),
        )

    async def _refuse_twin(self) -> None:
        """A predecessor's entry outlives it by seconds; a living twin would fight over the entry for ever."""
        other = (await self._registry.workers()).get(self.worker_id)
        if other is not None and await listening(other.request_address):
            raise IdInUse(
                f"worker id {self.worker_id!r} is in use by process {other.pid} on {other.host}; choose another --id"
            )

    def _current(self) -> WorkerInfo:
        assert self.info is not None
        self.info = msgspec.structs.replace(self.info, role=self.life.role, state=self.life.registered)
        return self.info

    async def _heartbeat(self) -> None:
        while True:
            try:
                orders = await self._registry.refresh(self._current(), self._config.workers.timeout_s)
                self._note_redis(None)
                await self._moves.obey(orders)
            except RedisAway as error:
                self._note_redis(error)
            await self._serving.check_frontends(self._config.workers.timeout_s, time.monotonic())
            try:
                async with asyncio.timeout(self._config.workers.heartbeat_s):
                    await self._beat_now.wait()
            except TimeoutError:
                continue
            finally:
                self._beat_now.clear()

    def _note_redis(self, error: RedisAway | None) -> None:
        if (error is not None) != self._redis_away:
            self._redis_away = error is not None
            if error is not None:
                log.warning("serving on without Redis: %s", error)
            else:
                log.info("Redis is back")

    async def _watch(self) -> None:
        async for event in self._registry.watch():
            if isinstance(event, Ordered):
                if event.id == self.worker_id:
                    self._beat_now.set()
            elif isinstance(event, Left) and event.kind == "frontend":
                await self._serving.frontend_left(event.id)
            elif isinstance(event, Resync) or getattr(event, "kind", "") == "worker":
                self._peers.heard(event)

    async def _peer_died(self, peer: WorkerInfo) -> None:
        try:
            await self._engine.fail_peer(peer.kv.engine_id)
        except EngineDead as error:
            log.debug("its own engine is dead too: %s", error)
        self._load.dirty.set()
        await self._claims.peer_died(peer.id)

    # ---- the data path -----------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            await self._serving.handle(*await self._transport.receive())

    async def _pump(self) -> None:
        while True:
            await self._serving.deliver(await self._engine.next_step())

    async def _report(self) -> None:
        """Load while no step reports it: what aborts and ended transfers freed, and a sign of life."""
        measured_at_step = -1
        while True:
            steps = self._load.steps
            try:
                async with asyncio.timeout(IDLE_REPORT_S if self._load.settled else UNREPORTED_S):
                    await self._load.dirty.wait()
                self._load.dirty.clear()
                await asyncio.sleep(UNREPORTED_S)  # several at once are one question
            except TimeoutError:
                pass
            if self._load.steps != steps:
                continue  # steps are running, and report themselves
            load = self._load.engine
            unsure = len(self._attempts) or load.blocks_free < self._load.blocks_total or load.running or load.waiting
            if unsure or not self._load.settled or measured_at_step != steps:
                measured_at_step = steps
                await self._measure()
            else:
                self._load.publish_soon()

    async def _measure(self) -> None:
        """Raises EngineDead, also for an engine that has not answered for ENGINE_HUNG_S."""
        asking = asyncio.create_task(self._engine.load(), name="engine-load")
        deadline = time.monotonic() + ENGINE_HUNG_S
        try:
            while not (await asyncio.wait({asking}, timeout=IDLE_REPORT_S))[0]:
                if time.monotonic() > deadline:
                    raise EngineDead(f"the engine has not answered for {ENGINE_HUNG_S:g} s")
                self._load.publish_soon()  # a sign of life through a long step
        finally:
            asking.cancel()
        self._load.measured(asking.result())
        self._claims.wake()

    async def _pushed(self, deadline: float) -> None:
        """Until receivers have the KV that is still being pushed: leaving before would cost them a prefill."""
        while time.monotonic() < deadline:
            load = await self._engine.load()
            if load.blocks_free >= self._load.blocks_total:
                return
            await asyncio.sleep(PUSHED_POLL_S)

    # ---- leaving -----------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """SIGTERM or SIGINT: leave soon. A second time, or while the engine starts: at once."""
        if self.life.can_enter(Life.LEAVING):
            self._moves.leave(self._config.launcher.stop_timeout_s / 2)
        else:
            self._ended.set()

    def _announce(self) -> None:
        """Tell the registry now, not with the next heartbeat."""
        self._beat_now.set()
        self._claims.wake()
