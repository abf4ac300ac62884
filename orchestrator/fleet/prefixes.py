"""This frontend's view of the workers' prefix caches: takes their events and snapshots into an index of keys.

A load report has the number of the last batch of events that its worker published before it, on the same socket. A
batch that has not arrived by then was lost, or sent before this frontend listened. After such a gap the frontend asks
the worker for a snapshot, and drops what it knew of that worker's cache. It asks a few workers at a time: of a large
fleet's caches it reads for many seconds, and whoever is not answered in time is asked again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from orchestrator.policy.prefix_index import PrefixIndex
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.types import PrefixEvents, WorkerLoad
from orchestrator.wire.messages import PrefixResync, PrefixSnapshot
from orchestrator.wire.sockets import Sent

RESYNC_RETRY_S = 2.0
MOST_ASKED = 8  # workers whose snapshots are awaited at a time; the next report of another one asks it
# Batches kept until the snapshot is complete. Beyond it the oldest are dropped, and the gap asks for another snapshot.
MAX_HELD = 256


class _Awaited:
    """A requested snapshot, and the events that were published meanwhile."""

    def __init__(self) -> None:
        self.sequence = 0  # of the snapshot that is arriving
        self.held: deque[PrefixEvents] = deque(maxlen=MAX_HELD)


class PrefixView:
    """Times are this frontend's monotonic clock, seconds."""

    def __init__(self, send: Callable[[str, PrefixResync], object], metrics: Metrics | None = None) -> None:
        """`send(worker_id, message)` returns `Sent.UNREACHABLE` if that worker is not connected."""
        self.index = PrefixIndex()
        self._send, self._metrics = send, metrics or Metrics()
        self._awaited: dict[str, _Awaited] = {}
        self._asked: dict[str, float] = {}  # when; of them, those that were asked and have not answered

    def take_load(self, load: WorkerLoad, now: float) -> None:
        if load.worker_id in self._awaited:
            self._ask(load.worker_id, now)
        elif load.prefix_sequence > self.index.sequence(load.worker_id):
            self.index.forget(load.worker_id)
            self._ask(load.worker_id, now)

    def take_events(self, events: PrefixEvents, now: float) -> None:
        if (awaited := self._awaited.get(events.worker_id)) is not None:
            awaited.held.append(events)
        elif not self.index.apply(events):
            self._ask(events.worker_id, now)
        self._metrics.prefix_index_blocks.set(len(self.index))

    def take_snapshot(self, worker_id: str, snapshot: PrefixSnapshot, now: float) -> None:
        """Apply a part of a worker's snapshot. The first part replaces its keys, the others add to them. After the last
        part the events that were published meanwhile are applied."""
        awaited = self._awaited.get(worker_id)
        if awaited is None:
            return  # answered twice, or the worker is gone
        if awaited.sequence != snapshot.sequence:
            self.index.resync(worker_id, snapshot.sequence, snapshot.keys)
            awaited.sequence = snapshot.sequence
        else:
            self.index.stored(worker_id, snapshot.keys)
        self.index.hosted(worker_id, snapshot.hosted)
        self._asked[worker_id] = now
        if not snapshot.more:
            del self._awaited[worker_id], self._asked[worker_id]
            for events in awaited.held:
                self.take_events(events, now)
        self._metrics.prefix_index_blocks.set(len(self.index))

    def forget(self, worker_id: str) -> None:
        """The worker is gone, or another process now."""
        self.index.forget(worker_id)
        self._awaited.pop(worker_id, None)
        self._asked.pop(worker_id, None)

    def _ask(self, worker_id: str, now: float) -> None:
        """For a snapshot, if it was not asked lately, few others are, and it is there; else its next report asks."""
        self._awaited.setdefault(worker_id, _Awaited())
        if now - self._asked.get(worker_id, -math.inf) <= RESYNC_RETRY_S:
            return
        if len(self._asked) >= MOST_ASKED:  # those that do not answer hold up nobody
            self._asked = {name: at for name, at in self._asked.items() if now - at <= RESYNC_RETRY_S}
        if len(self._asked) < MOST_ASKED and self._send(worker_id, PrefixResync()) is not Sent.UNREACHABLE:
            self._asked[worker_id] = now
            self._metrics.prefix_resyncs.inc()
