"""A sample of the fleet each second, and the points of the last hour, for the dashboard and `orchestrator top`.

Bounded: HOUR_S points of some twenty numbers, and a few samples for each of at most MAX_WATCHERS watchers. Latencies,
requests, tokens, decisions and flows are those of all frontends that tell of themselves (`siblings.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import msgspec

from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.view import Fleet
from orchestrator.frontend.dashboard.siblings import SLOWEST, Second, Siblings, summed
from orchestrator.process.tasks import Turns, ticks
from orchestrator.process.telemetry.metrics import Metrics, counts
from orchestrator.process.telemetry.requests import RequestLine, percentiles
from orchestrator.store.operator.shown import worker_status
from orchestrator.types import Role, WorkerState

log = logging.getLogger("pd.frontend")

INTERVAL_S = 1.0
HOUR_S = 3600
MAX_WATCHERS = 32
_WINDOW = 10  # samples that a percentile is taken over
_JUDGED_WINDOW = 60  # samples that a share of requests is taken over: of a class few may end in a second
_UNSENT = 5  # samples that wait for a slow watcher before it misses some


class Point(msgspec.Struct, frozen=True):
    """One second of the fleet. Times in milliseconds; None if nothing was counted, or Redis is away."""

    at: float  # unix seconds
    queue_requests: int | None
    queue_tokens: int | None
    wait_p50: float | None
    wait_p99: float | None
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    requests: int  # ended in this second
    output_tokens: int  # sent in this second
    decisions: dict[str, int]  # placed in this second, by "decision: reason"
    in_time: dict[str, float]  # share of the last minute's requests that met their objectives, by class
    prefill_ready: int  # units, as the desired ones
    decode_ready: int
    prefill_desired: int | None
    decode_desired: int | None
    prefill_kv: float | None  # share of the KV blocks in use
    decode_kv: float | None


class Flow(msgspec.Struct, frozen=True):
    """KV sent from a prefill to a decode worker in the last second."""

    source: str
    target: str
    bytes: int


class History:
    """Construct it, and start `run()` as a task."""

    def __init__(
        self,
        model: str,
        siblings: Siblings,
        fleet: Fleet,
        queue: QueueView,
        metrics: Metrics | None = None,
    ) -> None:
        self._model, self._siblings, self._recent = model, siblings, siblings.recent
        self._fleet, self._queue = fleet, queue
        self._metrics = metrics or Metrics()
        self.points: deque[Point] = deque(maxlen=HOUR_S)
        self._ttft: deque[list[int]] = deque(maxlen=_WINDOW)
        self._itl: deque[list[int]] = deque(maxlen=_WINDOW)
        self._wait: deque[list[int]] = deque(maxlen=_WINDOW)
        self._judged: deque[tuple[dict[str, int], dict[str, int]]] = deque(maxlen=_JUDGED_WINDOW)
        self._decided: Counter[str] = Counter()
        self._ended = self._tokens = 0
        self._watchers: set[asyncio.Queue[bytes]] = set()

    async def run(self) -> None:
        """Runs until cancelled."""
        turns = Turns(log, "the dashboard's points")  # what is only shown ends no frontend
        async for _ in ticks(INTERVAL_S):
            with turns.turn():
                self.take(time.time())

    def take(self, at: float) -> None:
        """Add a point, and send a sample to every watcher. `at`: unix seconds."""
        mine = self._second()
        self._siblings.tell(mine, self._slowest())
        all_told = summed([mine, *self._siblings.take(mine)])
        flows = self._flows(all_told)
        self.points.append(self._point(at, all_told))
        if self._watchers:
            sample = event("sample", self.sample(flows))  # encoded once for all
            for watcher in self._watchers:
                if not watcher.full():
                    watcher.put_nowait(sample)

    @contextlib.contextmanager
    def watching(self) -> Iterator[asyncio.Queue[bytes] | None]:
        """A queue of the samples from now on, as server-sent events. None if there are MAX_WATCHERS already."""
        if len(self._watchers) >= MAX_WATCHERS:
            yield None
            return
        queue: asyncio.Queue[bytes] = asyncio.Queue(_UNSENT)
        self._watchers.add(queue)
        try:
            yield queue
        finally:
            self._watchers.discard(queue)

    def in_time(self) -> dict[str, float]:
        """The latest point's; empty before the first."""
        return self.points[-1].in_time if self.points else {}

    def columns(self) -> dict[str, list[Any]]:
        """The last hour, one list per field of Point."""
        rows = [msgspec.structs.astuple(point) for point in self.points]
        return {name: [row[i] for row in rows] for i, name in enumerate(Point.__struct_fields__)}

    def sample(self, flows: list[Flow]) -> dict[str, Any]:
        """The fleet now, as types of JSON."""
        return {
            **overview(self._model, self._fleet, self._queue),
            "frontends": self._siblings.count,
            "silent_frontends": self._siblings.silent,
            "flows": msgspec.to_builtins(flows),
            "point": msgspec.to_builtins(self.points[-1]) if self.points else None,
            "slowest": [line.with_stages() for line in self._siblings.slowest(self._slowest())],
        }

    def _slowest(self) -> list[RequestLine]:
        """Of this frontend."""
        return self._recent.slowest(SLOWEST, time.monotonic())

    def _second(self) -> Second:
        """What this frontend has counted since the last call."""
        recent = self._recent
        placed, ended = counts(self._metrics.placements, "decision", "reason"), counts(self._metrics.requests).total()
        decisions, self._decided = placed - self._decided, placed
        requests, self._ended = ended - self._ended, ended
        tokens, self._tokens = recent.output_tokens - self._tokens, recent.output_tokens
        latencies = recent.ttft.take(), recent.itl.take(), recent.queue_wait.take()
        counted = dict(decisions), recent.transferred, recent.judged, recent.met
        recent.transferred, recent.judged, recent.met = Counter(), Counter(), Counter()
        return Second(self._siblings.frontend, *latencies, requests, tokens, *counted)

    def _point(self, at: float, second: Second) -> Point:
        depth, desired = self._queue.depth, self._fleet.desired
        for window, counted in ((self._ttft, second.ttft), (self._itl, second.itl), (self._wait, second.wait)):
            window.append(counted)
        self._judged.append((second.judged, second.met))
        ttft, itl = _ms(self._ttft, 0.5, 0.9, 0.99), _ms(self._itl, 0.5, 0.99)
        wait = _ms(self._wait, 0.5, 0.99)
        return Point(
            at=round(at, 1),
            queue_requests=depth.requests if depth else None,
            queue_tokens=depth.tokens if depth else None,
            wait_p50=wait[0],
            wait_p99=wait[1],
            ttft_p50=ttft[0],
            ttft_p90=ttft[1],
            ttft_p99=ttft[2],
            itl_p50=itl[0],
            itl_p99=itl[1],
            requests=second.requests,
            output_tokens=second.output_tokens,
            decisions=second.decisions,
            in_time=_in_time(self._judged),
            prefill_ready=self._ready_units(Role.PREFILL),
            decode_ready=self._ready_units(Role.DECODE),
            prefill_desired=desired.now.prefill if desired else None,
            decode_desired=desired.now.decode if desired else None,
            prefill_kv=self._kv_used(Role.PREFILL),
            decode_kv=self._kv_used(Role.DECODE),
        )

    def _ready_units(self, role: Role) -> int:
        """Units of which all ranks are ready: what the desired ratio counts."""
        ranks = [view.info for view in self._fleet.workers.values() if view.connected and view.info.role is role]
        ready = Counter(info.unit for info in ranks if info.state is WorkerState.READY)
        sizes = {info.unit: len(info.ranks) for info in ranks}
        return sum(count >= sizes[unit] for unit, count in ready.items())

    def _kv_used(self, role: Role) -> float | None:
        views = self._fleet.workers.values()
        loads = [view.load for view in views if view.info.role is role and view.load is not None]
        total = sum(load.blocks_total for load in loads)
        return round(1 - sum(load.blocks_free for load in loads) / total, 4) if total else None

    def _flows(self, second: Second) -> list[Flow]:
        found = []
        for flow, tokens in second.transferred.items():
            source, _, target = flow.partition(" ")
            view = self._fleet.workers.get(source)
            found.append(Flow(source, target, tokens * view.info.kv_bytes_per_token if view else 0))
        return found


def overview(model: str, fleet: Fleet, queue: QueueView) -> dict[str, Any]:
    """The fleet now, as types of JSON."""
    workers = sorted(fleet.workers.values(), key=lambda view: (view.info.role.value, view.info.id))
    return {
        "model": model,
        "workers": msgspec.to_builtins([worker_status(view.info, view.load, view.connected) for view in workers]),
        "queue": msgspec.to_builtins(queue.depth),
        "desired": msgspec.to_builtins(fleet.desired),
    }


def event(name: str, data: Any) -> bytes:
    """A server-sent event whose data is JSON."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


async def samples(watcher: asyncio.Queue[bytes], ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The samples of a watcher, until `ended()` is true; it is called at least once a second."""
    while not ended():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INTERVAL_S):
                sample = await watcher.get()
            yield sample


def _in_time(window: Iterable[tuple[dict[str, int], dict[str, int]]]) -> dict[str, float]:
    judged, met = Counter[str](), Counter[str]()
    for of_second, met_in_second in window:
        judged.update(of_second)
        met.update(met_in_second)
    return {name: round(met[name] / judged[name], 4) for name in sorted(judged)}


def _ms(windows: deque[list[int]], *shares: float) -> list[float | None]:
    return [None if seconds is None else round(seconds * 1e3, 2) for seconds in percentiles(windows, shares)]
