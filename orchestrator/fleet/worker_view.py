"""What a frontend knows of each worker: its load and its LoRA adapters, by its last report and what was sent there
since, and its prefix cache, by its events and snapshots.

`fleet/adapters.py` has the list of the adapters that the fleet serves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.policy.decode_choice import Candidate, blocks_for
from orchestrator.policy.predict.adapters import PRIOR_LOAD_S, AdapterPlaces, with_placed
from orchestrator.policy.predict.estimates import Smoothed
from orchestrator.policy.prefix_index import PrefixIndex
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.types import PrefixEvents, Role, WorkerInfo, WorkerLoad, WorkerState
from orchestrator.wire.messages import PrefixResync, PrefixSnapshot
from orchestrator.wire.sockets import Sent

_READY, _PREFILL = WorkerState.READY, Role.PREFILL  # as in `fleet.view`
LOAD_WEIGHT = 0.1  # of a newly reported load time in the mean
EXPECTED_S = 5.0  # after which what was sent, and no report shows, is not expected any more
RESYNC_RETRY_S = 2.0
MOST_ASKED = 8  # workers whose snapshots are awaited at a time; the next report of another one asks it
# Batches kept until the snapshot is complete. Beyond it the oldest are dropped, and the gap asks for another snapshot.
MAX_HELD = 256


@dataclass(slots=True)
class _Placed:
    sequence: int
    blocks: int
    tokens: int


class WorkerView:
    """One worker as this frontend sees it. Times are its monotonic clock; `reported_at`: of the last load report."""

    def __init__(self, info: WorkerInfo, last_heard_at: float, changed: set[str], numbers: Iterator[int]) -> None:
        """`changed` collects ids of workers whose usability or load has changed; `numbers` number what is submitted."""
        self.added_at = self.last_heard_at = self.reported_at = last_heard_at
        self.load: WorkerLoad | None = None
        self.greeted = False  # it has answered `Hello`
        self.disconnected_at: float | None = None
        self.quiet = False  # silent for longer than a working one: slow, stopped or cut off
        self.info, self._changed, self._numbers = info, changed, numbers
        self.connected = False  # the connection is open, and the worker has answered `Hello` and reported its load
        # Redis had it when it was read last. Else it may be cut off from Redis alone: it is heard, and claims nothing.
        self.registered = True
        self._placed: deque[_Placed] = deque()
        self._placed_blocks = self._placed_tokens = 0
        self._candidate: Candidate | None = None
        self._touch()

    def _touch(self) -> None:
        self._candidate = None
        self._changed.add(self.info.id)

    def note_info(self, info: WorkerInfo) -> None:
        self.info = info
        self._touch()

    def note_connected(self, connected: bool) -> None:
        self.connected = connected
        self._touch()

    def note_registered(self, registered: bool) -> None:
        if registered is not self.registered:
            self.registered = registered
            self._touch()

    def disconnect(self, now: float) -> None:
        """Nothing may be sent to it until it answers a greeting, and it is given up unless that is soon. What was sent
        and no report has seen may be lost, and no report would say so: it is not counted any more."""
        self._placed.clear()
        self._placed_blocks = self._placed_tokens = 0
        self.greeted, self.disconnected_at = False, now
        self.note_connected(False)

    def mark_quiet(self, quiet: bool = True) -> None:
        self.quiet = quiet
        self._touch()

    @property
    def usable_as(self) -> Role | None:
        """Its role if it can get requests, else None."""
        usable = self.connected and self.info.state is _READY and self.may_claim
        return self.info.role if usable else None

    @property
    def may_claim(self) -> bool:
        """Whether jobs reach it if it is a prefill worker."""
        return self.registered or self.info.role is not _PREFILL

    def note_placed(self, context_tokens: int, compute_tokens: int) -> int:
        """Count a submission against this worker until a load report has seen it. Returns its sequence number.

        `compute_tokens`: of the context, those to prefill there.
        """
        sequence = next(self._numbers)
        blocks = blocks_for(context_tokens, self.info.identity.block_size)
        self._placed.append(_Placed(sequence, blocks, compute_tokens))
        self._placed_blocks += blocks
        self._placed_tokens += compute_tokens
        self._touch()
        return sequence

    def note_unsent(self) -> None:
        """Take back the last counted submission, which could not be sent."""
        self._uncount(self._placed.pop())

    def _uncount(self, placed: _Placed) -> None:
        self._placed_blocks -= placed.blocks
        self._placed_tokens -= placed.tokens
        self._touch()

    def note_load(self, load: WorkerLoad, seen: int, now: float) -> None:
        """Take a load report that includes every submission up to `seen`. Older reports are ignored."""
        self.last_heard_at = self.reported_at = now
        if self.load is not None and load.sequence <= self.load.sequence:
            return
        changed = self.load is None or _counts(self.load) != _counts(load)
        self.load = load
        while self._placed and self._placed[0].sequence <= seen:
            self._uncount(self._placed.popleft())
        if changed:  # in a large fleet most reports repeat the one before
            self._touch()

    @property
    def candidate(self) -> Candidate:
        """The worker for the policies: its report corrected by what this frontend has placed since."""
        if self._candidate is None:
            load = self.load
            total = load.blocks_total if load else self.info.blocks_total
            free = load.blocks_free if load else total
            self._candidate = Candidate(
                worker_id=self.info.id,
                blocks_total=total,
                blocks_free=max(0, free - self._placed_blocks),
                block_size=self.info.identity.block_size,
                running=load.running if load else 0,
                waiting=(load.waiting if load else 0) + len(self._placed),
                waiting_tokens=load.waiting_tokens if load else 0,
                placed_tokens=self._placed_tokens,
                max_num_seqs=self.info.max_num_seqs,
                group=self.info.unit if self.info.lockstep else "",
            )
        return self._candidate


def _counts(load: WorkerLoad) -> tuple[int, ...]:
    """The load figures of a candidate."""
    return load.blocks_free, load.running, load.waiting, load.waiting_tokens, load.blocks_total


# ---- adapters ------------------------------------------------------------------------------------------------------


class _Sent(NamedTuple):
    adapter: int
    sequence: int  # of the submission; 0 for a job that the worker has claimed
    at: float


class FleetAdapters:
    """Which workers have which LoRA adapters. `places`: by role, its workers. Times as in `WorkerView`."""

    def __init__(self) -> None:
        self.places = {role: AdapterPlaces() for role in Role}
        self._load_s = Smoothed(PRIOR_LOAD_S, LOAD_WEIGHT)
        self._sent: dict[str, list[_Sent]] = {}  # by worker

    @property
    def load_s(self) -> float:
        """The mean time in which a worker loads an adapter."""
        return self._load_s.value

    def sent(self, worker_id: str, adapter: int, now: float, sequence: int = 0) -> None:
        """A request with this adapter was sent to a worker, or a worker has claimed its job: `update` must follow."""
        self._sent.setdefault(worker_id, []).append(_Sent(adapter, sequence, now))

    def take_load(self, load: WorkerLoad, before: WorkerLoad | None, seen: int, now: float) -> bool:
        """Take a report that includes every submission up to `seen`. Returns whether `update` must follow."""
        if load.adapter_load_s and (before is None or before.adapter_load_s != load.adapter_load_s):
            self._load_s.observe(load.adapter_load_s)
        sent = self._sent.pop(load.worker_id, None)
        if sent is None:
            return before is None or before.adapters != load.adapters
        if left := [one for one in sent if not _is_reported(one, load, seen) and now - one.at < EXPECTED_S]:
            self._sent[load.worker_id] = left
        return True

    def update(self, info: WorkerInfo, load: WorkerLoad | None, role: Role | None) -> None:
        """`role`: the one in which the worker can get requests; None: it can get none."""
        for pool, places in self.places.items():
            if pool is not role:
                places.remove(info.id)
            elif load is not None:
                sent = (one.adapter for one in self._sent.get(info.id, ()))
                places.update(info.id, info.adapter_slots, with_placed(load.adapters, sent), load.waiting_tokens)

    def forget(self, worker_id: str) -> None:
        self._sent.pop(worker_id, None)
        for places in self.places.values():
            places.remove(worker_id)


def _is_reported(sent: _Sent, load: WorkerLoad, seen: int) -> bool:
    return sent.sequence <= seen if sent.sequence else sent.adapter in load.adapters


# ---- prefix caches -------------------------------------------------------------------------------------------------


class _Awaited:
    """A requested snapshot, and the events that were published meanwhile."""

    def __init__(self) -> None:
        self.sequence = 0  # of the snapshot that is arriving
        self.held: deque[PrefixEvents] = deque(maxlen=MAX_HELD)


class PrefixView:
    """The workers' prefix caches: takes their events and snapshots into an index of keys. Times as in `WorkerView`.

    A load report has the number of the last batch of events that its worker published before it, on the same socket. A
    batch that has not arrived by then was lost, or sent before this frontend listened. After such a gap the frontend
    asks the worker for a snapshot, and drops what it knew of that worker's cache. It asks a few workers at a time: of a
    large fleet's caches it reads for many seconds, and whoever is not answered in time is asked again.
    """

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
