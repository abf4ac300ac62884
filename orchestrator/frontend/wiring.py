"""Makes and connects the parts between a frontend and the fleet: transport, membership, queue, router, control calls.

It passes each message to its handler, and keeps this frontend registered; all other logic is in the parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from orchestrator.config.settings import Config
from orchestrator.fleet.adapters import AdapterView
from orchestrator.fleet.control_calls import ControlCalls
from orchestrator.fleet.membership import Membership
from orchestrator.fleet.pause import Rest
from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.ratio_controller import RatioController
from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import PrefixView
from orchestrator.frontend.dashboard.history import History
from orchestrator.frontend.dashboard.siblings import Siblings
from orchestrator.frontend.pause import PauseCalls
from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.decode_choice import RankChoice
from orchestrator.process.parent import own_identity, tell_alive
from orchestrator.process.tasks import Turns, first_of, left_s, rest_s, ticks, until_told
from orchestrator.process.telemetry.metrics import Metrics, counts
from orchestrator.router.request import Codec
from orchestrator.router.router import Router
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.operator.events import EventLog
from orchestrator.store.planned import rollout_status
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Frontend, Registry
from orchestrator.store.steering import Steering
from orchestrator.types import Role
from orchestrator.wire.curve import KeyPair
from orchestrator.wire.messages import CallReply, EngineCrashed, PrefixSnapshot, ToFrontend, Welcome
from orchestrator.wire.transport import Disconnected, FrontendTransport, Unreadable

log = logging.getLogger("pd.frontend")

HEARTBEAT_S = 1.0
_SETTLE_S = 0.05  # workers of a fleet that starts are reached together
FRONTEND_TTL_S = 5.0
# Until it serves, a frontend makes vLLM's app, which may take the loop for longer than a heartbeat may be late.
STARTING_TTL_S = 60.0

T = TypeVar("T")


async def unless_ended(running: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If `running` ends first, raises its exception: `work` might then wait for ever."""
    async with first_of(work, asyncio.shield(running)) as working:
        if not working.done():
            running.result()
        return await working


class FleetConnection:
    """Construct it, start `run()` as a task, and wait for `synced()` (see `unless_ended`). Call `announce()` once
    clients can be served."""

    def __init__(
        self,
        frontend_id: str,
        config: Config,
        redis: Redis,
        codec: Codec,
        generation: int = 0,
        by_hand: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        """`generation`: that of `config`. `by_hand`: whether the frontend runs without a launcher."""
        self._metrics = metrics = metrics or Metrics()
        self.frontend_id = frontend_id
        self.told_to_drain = asyncio.Event()
        self._generation, self._by_hand = generation, by_hand
        self._process = own_identity()  # once: clients may have all descriptors by the time of a heartbeat
        self._refuses = config.routing.fallback == "refuse"
        self.registry = Registry(redis, config.namespace)
        self._events = EventLog(redis, config.namespace)
        choose = RankChoice(decode_choice(config.routing.decode_choice), config.routing.ranks)
        self.fleet = Fleet(frontend_id, choose.static_score)
        self._keys = KeyPair.new() if config.security.mesh == "curve" else None
        self.transport = FrontendTransport(frontend_id, metrics.dropped.labels("corrupt").inc, keys=self._keys)
        self.prefixes = PrefixView(self.transport.send, metrics)
        self.calls = ControlCalls(self.fleet, self.transport)
        self.adapters = AdapterView(self.registry, self.calls, self._send_heartbeat)
        jobs = PrefillQueue(redis, config.namespace, lease_s=config.workers.lease_s)
        self.queue = QueueView(jobs, frontend_id, config.workers.lease_s)
        self.steering = Steering(self.registry, jobs, config.workers.heartbeat_s)
        self.rest = Rest(self.registry, self._serves, lambda: self.fleet.desired, config.cold_start_s)
        self.fleet.rest = self.rest
        self.router = Router(
            config, self.fleet, self.transport, self.queue, self.prefixes.index, codec, choose, metrics
        )
        self.membership = Membership(
            self.registry,
            self.fleet,
            self.transport,
            self.prefixes,
            config.workers.timeout_s,
            on_lost=self._worker_lost,
            on_quiet=self.router.lost.worker_quiet,
            on_reset=self._connection_reset,
        )
        self.pause = PauseCalls(self.fleet, self.calls, self.router, self.queue)
        self.ratio_controller = RatioController(
            frontend_id,
            config,
            self.registry,
            self._events,
            self.fleet,
            predictor=self.router.learning.predictor,
            reuse=self.router.learning.reuse,
            tpot=self.router.learning.tpot,
            metrics=metrics,
        )
        self.siblings = Siblings(frontend_id, redis, config.namespace, self.router.learning.recent)
        self.history = History(config.name_served, self.siblings, self.fleet, self.queue, metrics)
        self.in_flight: Callable[[], int] = lambda: len(self.router.requests)  # of the whole process
        self._beaten = asyncio.Event()
        self._cpu_at, self._cpu = (time.process_time(), time.monotonic()), 0.0
        self._url = ""
        self._ttl_s = STARTING_TTL_S

    def _serves(self) -> bool:
        """Whether the workers that a request may need are ready: a prefill worker too, where nothing stands in."""
        desired = self.fleet.desired
        pool = self._refuses and desired is not None and desired.prefill > 0
        return bool(self.fleet.ready(Role.DECODE)) and (not pool or bool(self.fleet.ready(Role.PREFILL)))

    async def run(self) -> None:
        """Runs until cancelled."""
        await self._send_heartbeat()  # workers accept only frontends that are in the registry
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.membership.run())
            tasks.create_task(self.queue.run(self.router.lost.queue_lost, self.router.lost.job_failed))
            tasks.create_task(self.router.run())
            tasks.create_task(self._receive())
            tasks.create_task(self._heartbeat())
            tasks.create_task(self.adapters.run())
            tasks.create_task(self.rest.run())
            tasks.create_task(self.ratio_controller.run())
            tasks.create_task(self.siblings.run())
            tasks.create_task(self.history.run())
            tasks.create_task(self._log_retries())

    async def synced(self) -> None:
        """Wait until registry, queue, adapters and desired ratio have been read once, so that decisions have their
        data."""
        for known in (self.membership.synced, self.queue.polled, self.adapters.asked, self._beaten):
            await known.wait()

    async def supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the fleet's engines support. Waits for the first worker."""
        await self.worker_connected()
        return next(iter(self.fleet.workers.values())).info.supported_tasks

    async def worker_connected(self) -> None:
        """Wait until there is a worker that control calls reach."""
        while not any(view.connected for view in self.fleet.workers.values()):
            self.rest.recall()
            await asyncio.sleep(HEARTBEAT_S / 10)

    async def announce(self, url: str) -> None:
        """Register this frontend as serving at `url`."""
        self._url, self._ttl_s = url, FRONTEND_TTL_S
        await self._send_heartbeat()

    def drain(self) -> None:
        """Send no more clients to this frontend, and set `told_to_drain`."""
        self._url = ""
        self.told_to_drain.set()

    async def close(self) -> None:
        try:
            await self.registry.leave_frontend(self.frontend_id)
        except RedisAway as error:
            log.warning("left without notice: %s", error)
        self.transport.close()

    async def _receive(self) -> None:
        while True:
            worker_id, message, payload = await self.transport.receive()
            try:
                self._handle(worker_id, message, payload, time.monotonic())
            except Exception:  # a defect in the handling of one message must not end this process and all its requests
                self._metrics.dropped.labels("error").inc()
                log.exception("could not handle %s from worker %s", type(message).__name__, worker_id)

    def _handle(
        self, worker_id: str, message: ToFrontend | Disconnected | Unreadable, payload: list[bytes], now: float
    ) -> None:
        if isinstance(message, Disconnected):
            self.membership.disconnected(worker_id)
        elif isinstance(message, Unreadable):
            self.calls.answers_lost(worker_id)
            self.router.lost.outputs_lost(worker_id)
        elif isinstance(message, Welcome):
            self.membership.on_welcome(worker_id)
        elif isinstance(message, CallReply):
            self.calls.on_reply(worker_id, message)
        elif isinstance(message, PrefixSnapshot):
            self.prefixes.take_snapshot(worker_id, message, now)
        else:
            if isinstance(message, EngineCrashed):
                self.calls.worker_lost(worker_id)  # nothing else says so while Redis is away
            self.router.handle(worker_id, message, payload, now)

    async def _heartbeat(self) -> None:
        turns = Turns(log, "the heartbeat")
        while True:
            began = time.monotonic()
            with turns.turn():
                await self._send_heartbeat()
            rested_at = time.monotonic() + rest_s(began, _SETTLE_S, HEARTBEAT_S)
            # Whoever waits for the fleet waits until this one reaches its workers.
            if await until_told(self.membership.reached, left_s(HEARTBEAT_S)):
                await asyncio.sleep(max(_SETTLE_S, rested_at - time.monotonic()))
                self.membership.reached.clear()

    async def _log_retries(self) -> None:
        """Record retries as events, at most once a second: a worker that dies with a thousand requests is one event."""
        noted: Counter[str] = Counter()
        turns = Turns(log, "the events of retries")  # as the dashboard: what is only told ends no frontend
        async for _ in ticks(HEARTBEAT_S):
            with turns.turn():
                counted = counts(self._metrics.retries, "why")
                new, noted = counted - noted, counted
                for why, count in new.items():
                    with contextlib.suppress(RedisAway):
                        await self._events.note("retried", frontend=self.frontend_id, why=why, count=str(count))

    async def _send_heartbeat(self) -> None:
        # Registered from the start, even without a url: jobs of an unknown frontend are dropped as orphans.
        learning = self.router.learning
        try:
            me = Frontend(
                id=self.frontend_id,
                url=self._url,
                process=self._process,
                offered=replace(learning.offered, generated_tokens=learning.recent.output_tokens),
                mesh_key=self._keys.public if self._keys else "",
                generation=self._generation,
                by_hand=self._by_hand,
                cpu=self._cpu_used(),
                in_flight=self.in_flight(),
                idle_s=self.rest.idle_s(bool(self.router.requests) or self.pause.active, learning.offered.requests),
                adapters=self.adapters.serves,
                reaches=sum(view.connected for view in self.fleet.workers.values()),
            )
            orders = await self.registry.refresh_frontend(me, self._ttl_s)
            if orders.drain:
                self.drain()
            self.fleet.desired = await self.registry.restored(self.fleet.desired, await self.registry.desired())
        except RedisAway as error:
            log.debug("heartbeat missed: %s", error)
            if self._url or self.told_to_drain.is_set():  # before that it loads, which has a deadline
                tell_alive()
        self._beaten.set()

    async def rollout(self) -> dict[str, Any] | None:
        """The last rollout; None if there was none, or Redis is away."""
        try:
            found = await self.registry.rollout.read()
            return rollout_status(found, await self.registry.frontends()) if found is not None else None
        except RedisAway:
            return None

    def _cpu_used(self) -> float:
        """Cores used since this was worked out last, half a heartbeat ago or more: in the 50 ms between two that follow
        each other closely a frontend may be busy, or idle, which it is not for long. 0 until then."""
        (used_s, at), now = self._cpu_at, (time.process_time(), time.monotonic())
        if now[1] - at > HEARTBEAT_S / 2:
            self._cpu_at, self._cpu = now, (now[0] - used_s) / (now[1] - at)
        return self._cpu

    def _worker_lost(self, *worker_ids: str) -> None:
        with contextlib.ExitStack() as told:  # each is, the last one first, whatever another one meets
            for worker_id in worker_ids:
                told.callback(self.calls.worker_lost, worker_id)
            told.callback(self.router.lost.worker_lost, *worker_ids)
            for worker_id in worker_ids:
                told.callback(self.prefixes.forget, worker_id)

    def _connection_reset(self, worker_id: str) -> None:
        self.calls.answers_lost(worker_id)  # another process may have been asked, of which nobody hears without Redis
        self.router.lost.connection_reset(worker_id)


class FleetConnections:
    """The connections of one frontend to the fleets of its models. The launcher follows the first's registry."""

    def __init__(self, connections: Mapping[str, FleetConnection]) -> None:
        """`connections`: by model; the name of a single one may be empty."""
        self._of_model = connections
        self._each = list(connections.values())
        self.told_to_drain = asyncio.Event()
        for connection in self._each:
            connection.told_to_drain = self.told_to_drain
            connection.in_flight = self._in_flight

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for connection in self._each:
                tasks.create_task(connection.run())

    async def synced(self) -> None:
        """Wait until all are."""
        for connection in self._each:
            await connection.synced()

    async def begin_adapters(self) -> None:
        for connection in self._each:
            await connection.adapters.begin()

    async def announce(self, url: str) -> None:
        """Register this frontend as serving, each model at its own path: with the first last, for then it serves
        all."""
        for model, connection in reversed(list(self._of_model.items())):
            await connection.announce(f"{url}/models/{model}" if model else url)

    def drain(self) -> None:
        for connection in self._each:
            connection.drain()

    async def close(self) -> None:
        for connection in self._each:
            await connection.close()

    def _in_flight(self) -> int:
        return sum(len(connection.router.requests) for connection in self._each)
