"""Keeps the fleet view and the connections up to date: by registry events, load reports and broken connections.

While Redis is away, workers stay known as long as they report. A worker is lost when it has left the registry and is
silent or its connection breaks, when its connection stays broken, or when it is silent for long. Long before that it
counts as quiet: it may be slow, so it is kept, but other workers are used instead. Time in which this process itself
did not run does not count as silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import PrefixView, WorkerView
from orchestrator.process.tasks import Turns, left_s, rest_s, set_whenever, ticks, until_told
from orchestrator.store.client import RedisAway
from orchestrator.store.registry import Registry
from orchestrator.types import WorkerInfo, WorkerLoad
from orchestrator.wire.transport import FrontendTransport, Published

log = logging.getLogger("pd.membership")

# A living worker's kernel accepts a new connection within ZMQ's first retries, a dead one's never. The handshake that
# follows may wait for those of others.
RECONNECT_S = 0.5
# A worker reports after each engine step, and four times a second through a long one or while idle;
# in a large fleet every 0.4 s (`workers/load/reports.py`).
QUIET_S = 1.0
TICK_S, LATE_S = 0.1, 0.01
RESYNC_S = 5.0
# Reports of a large fleet are read together, at most this late: a twentieth of the time between two of one worker.
READ_PAUSE_S_PER_WORKER, READ_PAUSES_S = 25e-6, (0.0025, 0.01)
# Between two readings of the registry, at least and at most. A large fleet that starts makes many events at once: one
# reading serves them all. A reading may seem to take long because this process stood still: the rest has a bound.
COALESCE_S, READ_REST_S = 0.05, 1.0


class Membership:
    """Owns the tasks that watch, and tells of each worker by its id, once each time: that it is gone (`on_lost`), that
    it has become quiet, and that its connection broke and was made again, on which messages may be lost (`on_reset`).
    Of workers that are gone, or quiet, together it tells together: thousands of requests are looked through for them.
    """

    def __init__(
        self,
        registry: Registry,
        fleet: Fleet,
        transport: FrontendTransport,
        prefixes: PrefixView,
        silence_s: float,
        on_lost: Callable[..., None],
        on_quiet: Callable[..., None],
        on_reset: Callable[[str], None],
    ) -> None:
        self._registry = registry
        self._fleet = fleet
        self._transport = transport
        self._prefixes = prefixes
        self._silence_s, self._quiet_s = silence_s, min(QUIET_S, silence_s / 2)
        self._on_lost, self._on_quiet, self._on_reset = on_lost, on_quiet, on_reset
        self._registry_changed = asyncio.Event()
        self._unregistered: set[str] = set()
        self._left: set[str] = set()  # of these, those that were heard: they left by themselves, as drained ones do
        self._left_out: dict[str, str] = {}  # the logged reason by worker, so that it is logged once
        self._unreached: set[str] = set()  # workers of which the log says that they have not been reached
        self._turns = Turns(log, "looking for silent workers")
        self.synced = asyncio.Event()  # the registry has been asked once
        self.reached = asyncio.Event()  # one worker more is connected

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(set_whenever(self._registry_changed, self._registry.watch()))
            tasks.create_task(self._follow_registry())
            tasks.create_task(self._receive_reports())
            tasks.create_task(self._tick())

    def on_welcome(self, worker_id: str) -> None:
        """The worker has answered `Hello`. It gets requests once it has also reported its load."""
        if view := self._fleet.workers.get(worker_id):
            again = view.disconnected_at is not None
            if again or not view.greeted:  # else it asks whether this frontend is there: no load report
                view.reported_at = time.monotonic()
            view.greeted, view.disconnected_at, view.last_heard_at = True, None, time.monotonic()
            self._note_connected(view)
            if again:
                log.warning("the connection to worker %s broke and was made again", worker_id)
                self._on_reset(worker_id)

    def _note_connected(self, view: WorkerView) -> None:
        if view.greeted and view.load is not None and not view.connected:
            view.note_connected(True)
            self.reached.set()

    def disconnected(self, worker_id: str) -> None:
        view = self._fleet.workers.get(worker_id)
        if view is not None and view.greeted:
            view.disconnect(time.monotonic())

    async def _follow_registry(self) -> None:
        """Read the registry again after every event, instead of relying on the order of events."""
        await self._resync()
        self.synced.set()
        turns = Turns(log, "reading the registry")  # a defect here ends no frontend, nor does one in those below
        while True:
            await until_told(self._registry_changed, left_s(RESYNC_S))
            began = time.monotonic()
            with turns.turn():
                await self._resync()
            await asyncio.sleep(rest_s(began, COALESCE_S, READ_REST_S))

    async def _tick(self) -> None:
        async for late_s in ticks(TICK_S):
            with self._turns.turn():
                if late_s > LATE_S:
                    self._fleet.discount_stall(late_s, time.monotonic())
                if late_s <= TICK_S:  # else reports that came meanwhile are not read yet
                    self._look(time.monotonic())

    def _look(self, now: float) -> None:
        for part in (self._look_for_quiet, self._look_for_lost, self._tell_unreached):
            with self._turns.turn():  # a defect that lasts in one of them must not keep the others off
                part(now)

    def _look_for_quiet(self, now: float) -> None:
        if quiet := mark_silent_quiet(self._fleet, now, self._quiet_s):
            for worker_id in quiet:
                log.warning("worker %s has become quiet: others take its place for now", worker_id)
            self._on_quiet(*quiet)

    def _look_for_lost(self, now: float) -> None:
        for worker_id, view in self._fleet.workers.items():
            if view.disconnected_at is not None and self._transport.is_coming(worker_id):
                view.disconnected_at = now
        with self._telling_lost() as lost:
            for worker_id in self._fleet.silent(now, self._silence_s, RECONNECT_S):
                self._remove(worker_id, "it fell silent or its connection stayed broken", lost)
            for worker_id in self._unregistered & self._fleet.workers.keys():
                view = self._fleet.workers[worker_id]
                # Redis may have lost its data: keep the workers that still report.
                silent = now - view.last_heard_at > 2 * TICK_S + self._heartbeat_slack()
                broken = view.disconnected_at is not None and not self._transport.is_coming(worker_id)
                if silent or broken:
                    self._remove(worker_id, "it left the registry", lost)

    @contextlib.contextmanager
    def _telling_lost(self) -> Iterator[list[str]]:
        """Who is lost in it is told of at its end, whatever it meets: no later look finds a worker that was removed."""
        lost: list[str] = []
        try:
            yield lost
        finally:
            if lost:
                self._on_lost(*lost)

    def _tell_unreached(self, now: float) -> None:
        """Log each worker once that is registered, but cannot be reached: a firewall, or its host has another address
        by now. Nothing is sent there, and the worker itself sees nothing wrong."""
        unreached = {
            worker_id
            for worker_id, view in self._fleet.workers.items()
            if not view.greeted
            and view.disconnected_at is None
            and now - view.added_at > self._silence_s
            and not self._transport.is_coming(worker_id)
        }
        for worker_id in unreached - self._unreached:
            info = self._fleet.workers[worker_id].info
            log.warning(
                "worker %s is registered, but no connection to %s comes about: it gets no requests; see "
                "`orchestrator doctor ports %s`",
                worker_id,
                info.request_address,
                info.host,
            )
        self._unreached = unreached

    async def _receive_reports(self) -> None:
        turns = Turns(log, "taking a report")
        while True:
            pause_s = self._pause_s()
            messages = await self._transport.receive_published(pause_s)
            now = time.monotonic()
            for message in messages:
                try:
                    self._take(message, now)
                except Exception as error:  # what one worker says must not cost what the others say
                    turns.failed(error)
            if pause_s:  # of a large fleet many reports come between two requests, which are not to wait for them
                with turns.turn():
                    self._fleet.apply_changes()

    def _take(self, message: Published, now: float) -> None:
        view = self._fleet.workers.get(message.worker_id)
        if view is None:
            return  # the last message of a worker that is gone
        if isinstance(message, WorkerLoad):
            self._fleet.take_load(message, now)
            self._note_connected(view)
            self._prefixes.take_load(message, now)
        else:
            self._prefixes.take_events(message, now)

    def _pause_s(self) -> float:
        pause_s = len(self._fleet.workers) * READ_PAUSE_S_PER_WORKER
        least_s, most_s = READ_PAUSES_S
        return min(pause_s, most_s) if pause_s >= least_s else 0.0

    async def _resync(self) -> None:
        try:
            registered = await self._registry.workers()
        except RedisAway as error:
            log.warning("membership is frozen while Redis is away: %s", error)
            return
        with self._telling_lost() as lost:
            for info in registered.values():
                self._take_entry(info, lost)
        views = self._fleet.workers.values()
        for view in views:
            view.note_registered(view.info.id in registered)
        before, self._unregistered = self._unregistered, self._fleet.workers.keys() - registered.keys()
        alive_since = time.monotonic() - self._quiet_s  # the entry of one that died stays for longer than that
        new = self._unregistered - before
        self._left |= {name for name in new if self._fleet.workers[name].last_heard_at > alive_since}
        self._left &= self._unregistered
        hosted = (view.load.kv.host_blocks for view in views if view.load is not None)
        self._prefixes.index.make_room(sum(view.info.blocks_total for view in views) + sum(hosted))

    def _take_entry(self, info: WorkerInfo, lost: list[str]) -> None:
        """Add or update this worker. `lost` gets its id if it is another process now, or was one that is left out."""
        known = self._fleet.workers.get(info.id)
        try:
            self._transport.connect(info.id, info.request_address, info.load_address, info.mesh_key)
            if self._fleet.upsert(info, time.monotonic()):
                if known is not None:
                    lost.append(info.id)
                # Its connection may be older, and was greeted before it was known here: that of a predecessor with the
                # same addresses, or made when its entry was damaged.
                self._transport.greet(info.id)
        except Exception as error:  # of an address, or of anything else in a damaged entry: the others are taken
            if self._left_out.get(info.id) != str(error):
                self._left_out[info.id] = str(error)
                defect = not isinstance(error, ValueError)  # an AddressError is one
                log.warning("left out worker %s: %s", info.id, error, exc_info=defect)
            if known is not None and known.info.kv.engine_id != info.kv.engine_id:
                self._remove(info.id, "another process has its id, which is left out", lost)

    def _heartbeat_slack(self) -> float:
        return min(1.0, self._silence_s / 4)

    def _remove(self, worker_id: str, why: str, lost: list[str]) -> None:
        """Forget the worker, and add it to `lost`. A defect is logged: others may be lost with it."""
        if worker_id in self._left:
            log.info("worker %s has left the fleet", worker_id)
        else:
            log.warning("worker %s is gone: %s", worker_id, why)
        lost.append(worker_id)
        with self._turns.turn():
            self._fleet.remove(worker_id)
        with self._turns.turn():
            self._transport.disconnect(worker_id)


def mark_silent_quiet(fleet: Fleet, now: float, after_s: float) -> list[str]:
    """Mark as quiet workers without a report for `after_s`, and other ranks of their units, which may wait for them as
    for one that was lost; as heard those that report again. Returns those that were not quiet before."""
    reported = [view for view in fleet.workers.values() if view.load is not None]
    silent = {view.info.unit for view in reported if now - view.reported_at > after_s} | fleet.broken_units
    changed = [view for view in reported if view.quiet is not (view.info.unit in silent)]
    for view in changed:
        view.mark_quiet(not view.quiet)
    return [view.info.id for view in changed if view.quiet]
