"""The `pd_*` counters and histograms of this frontend. Metrics that are read at scrape time are in `frontend.pages`.

The frontends of a host keep theirs in files, so that each can report those of all. prometheus_client opens a file for
each kind of metric when the first metric of that kind gets a value. If the run folder was gone by then (a cleaner of
/tmp may remove it), every request would fail. Each scrape reads all files, so those of frontends that have ended are
made one.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import mmap
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.mmap_dict import MmapedDict

from orchestrator.process.files import locked, make_folder
from orchestrator.process.parent import started_ticks

log = logging.getLogger("pd.frontend")

MODEL = "model_name"  # the label that vLLM's metrics have

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_Kind = TypeVar("_Kind", bound=MetricWrapperBase)
_SUMMED = ("counter", "histogram", "summary")  # kinds of files, each named KIND_PID.db
_LOCK, _JOIN_S = "ended.lock", 2.0  # of the folder, which nobody joins while others read; a scrape waits for so long
_ROOM, _MOST_BESIDE = 1 << 16, 32  # bytes of a file at first, and that it has beside each key, at most
_ENDED = "0"  # in place of the pid: of all that have ended
_made: dict[str, MetricWrapperBase] = {}  # by name, with all models' values


class Metrics:
    """What is counted for one model. `model`: its name where this process serves several, which then is a label."""

    def __init__(self, model: str | None = None) -> None:
        self._model = model
        self.placements = self._counter(
            "pd_placements", "Placement decisions, by decision and its reason", "decision", "reason"
        )
        self.requests = self._counter("pd_requests", "Ended requests, by outcome", "outcome")
        self.objectives = self._counter(
            "pd_objectives",
            "Ended requests, by class (x-slo-class), objective (ttft, tpot), and whether it was met; a refused or "
            "failed one missed its ttft",
            "slo_class",
            "objective",
            "met",
        )
        self.retries = self._counter("pd_retries", "Attempts given up and started again, by why", "why")
        self.first_tokens_early = self._counter(
            "pd_first_tokens_early", "First tokens sent from prefill, before decode had the KV"
        )
        self.first_token_mismatches = self._counter(
            "pd_first_token_mismatches", "First tokens sent from prefill that decode would have sampled otherwise"
        )
        self.prefix_hit_tokens = self._counter(
            "pd_prefix_hit_tokens",
            "Prompt tokens that a prefix cache held: as believed at the worker chosen to prefill locally (local) or to "
            "receive KV (decode), as its engine said where prefilled remotely (prefill)",
            "side",
        )
        # If frontends of one machine share their metrics, the value that was set last counts.
        self.prefix_index_blocks: Any = self._of_model(
            Gauge,
            "pd_prefix_index_blocks",
            "Distinct cached blocks that a frontend knows of",
            multiprocess_mode="mostrecent",
        )
        self.prefix_resyncs = self._counter(
            "pd_prefix_resyncs", "Snapshots of a worker's prefix cache asked for: it is new, or events were lost"
        )
        self.dropped = self._counter(
            "pd_dropped_messages", "Messages dropped: of an older attempt, corrupt or unknown", "why"
        )
        self.queue_wait_s = self._seconds("pd_queue_wait_seconds", "From enqueue to claim of a remote prefill")
        self.prefill_s = self._seconds("pd_prefill_seconds", "From claim to the end of prefill compute")
        self.kv_exposed_s = self._seconds(
            "pd_kv_exposed_seconds", "From the end of remote prefill compute to decode's first token"
        )
        self.ratio_changes = self._counter(
            "pd_ratio_changes", "Changes of the desired ratio decided by this frontend, while it led"
        )
        # These series exist from the start: Prometheus sees no increase in the first value of a new series.
        for outcome in ("finished", "aborted", "failed", "invalid", "rejected"):
            self.requests.labels(outcome)
        for why in ("stale", "corrupt", "error"):
            self.dropped.labels(why)

    def _counter(self, name: str, documentation: str, *labels: str) -> Any:
        return self._of_model(Counter, name, documentation, labels)

    def _seconds(self, name: str, documentation: str) -> Any:
        return self._of_model(Histogram, name, documentation, buckets=_SECONDS)

    def _of_model(
        self, kind: Callable[..., _Kind], name: str, documentation: str, labels: Iterable[str] = (), **options: Any
    ) -> Any:
        """The metric where the process serves one model, else what it has of this one."""
        labels = tuple(labels)
        own = () if self._model is None else (self._model,)
        if name not in _made:
            _made[name] = kind(name, documentation, (*(MODEL for _ in own), *labels), **options)
        made = _made[name]
        if labels:
            return Labelled(made, own)
        return made.labels(*own) if own else made


class Labelled:
    """A metric with labels, of one model. It keeps what it has given: its client takes 20 times as long to find it."""

    def __init__(self, metric: MetricWrapperBase, own: tuple[str, ...]) -> None:
        """`own`: the model's name, where the metric has a label for it."""
        self.metric, self.own = metric, own
        self._of: dict[tuple[str, ...], Any] = {}

    def labels(self, *values: str) -> Any:
        found = self._of.get(values)
        if found is None:
            found = self._of[values] = self.metric.labels(*self.own, *values)
        return found


def counts(counter: Labelled, *labels: str) -> collections.Counter[str]:
    """A counter's values, by the values of these labels, joined by ": "."""
    found: collections.Counter[str] = collections.Counter()
    for sample in next(iter(counter.metric.collect())).samples:
        if sample.name.endswith("_total") and counter.own in ((), (sample.labels.get(MODEL),)):
            found[": ".join(sample.labels[label] for label in labels)] += int(sample.value)
    return found


def keep_counting() -> None:
    """From now on a missing folder of the files is made, and what finds no room in a file is in memory. Idempotent."""
    values.MmapedDict = _Kept  # type: ignore[assignment,misc]


class _Kept(MmapedDict):
    """A file that has its room before it is written as memory: on a full disk that would kill this process (SIGBUS).
    Where there is none, or no descriptor for it, it is memory, which no scrape reads."""

    _f: BinaryIO | None = None  # type: ignore[assignment]

    def __init__(self, filename: str) -> None:
        try:
            make_folder(Path(filename).parent)
            _make_room(filename, _ROOM)
            super().__init__(filename)
        except OSError as error:
            self._leave_file(error)
            self._m, self._capacity, self._used, self._positions = mmap.mmap(-1, _ROOM), _ROOM, 8, {}

    def _init_value(self, key: str) -> None:
        while self._used + len(key.encode()) + _MOST_BESIDE > self._capacity:
            size = 2 * self._capacity
            try:
                if self._f is not None:
                    os.posix_fallocate(self._f.fileno(), 0, size)
                    self._m = mmap.mmap(self._f.fileno(), size)
            except OSError as error:
                self._leave_file(error)
            if self._f is None:
                held, self._m = self._m, mmap.mmap(-1, size)
                self._m[: len(held)] = held[:]
            self._capacity = size
        super()._init_value(key)

    def _leave_file(self, error: OSError) -> None:
        log.warning("scrapes lack what this frontend counts from now on: %s; mend that, then restart it", error)
        if self._f is not None:
            self._f.close()
        self._f = None


def _make_room(path: str, size: int) -> None:
    """Let the file have as many bytes. Raises OSError, and leaves no empty file, of which each scrape would fail."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        is_new = os.fstat(descriptor).st_size == 0
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            if is_new:
                os.unlink(path)
            raise
    finally:
        os.close(descriptor)


def shown(registry: CollectorRegistry) -> bytes:
    """What a scrape shows. Blocks: for tenths of a second in a large fleet."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # of a folder that was removed nothing is joined; who joins may stand still
            stack.enter_context(locked(_folder() / _LOCK, _JOIN_S, shared=True))
        return generate_latest(registry)


def join_ended() -> None:
    """Join the files of frontends that have ended, one for each kind. If it cannot be done now, a later one does it."""
    with contextlib.suppress(OSError), locked((place := _folder()) / _LOCK, 0.0):
        ended = [path for path in place.glob("*_*.db") if _has_ended(path.stem.rpartition("_")[2])]
        for kind in _SUMMED:
            if own := [path for path in ended if path.name.startswith(f"{kind}_")]:
                _join(own, place / f"{kind}_{_ENDED}.db")
        for path in ended:  # of gauges the value of one that runs counts
            path.unlink(missing_ok=True)


def _folder() -> Path:
    """Of the files. Raises FileNotFoundError where there are none."""
    if not (place := os.environ.get("PROMETHEUS_MULTIPROC_DIR")):
        raise FileNotFoundError("this process keeps its metrics by itself")
    return Path(place)


def _has_ended(pid: str) -> bool:
    return pid.isdecimal() and pid != _ENDED and started_ticks(int(pid)) is None


def _join(ended: list[Path], into: Path) -> None:
    """If this is cut short, something is missing: Prometheus knows counters that begin anew, none counted twice."""
    totals: collections.Counter[str] = collections.Counter()
    for path in [*ended, *([into] if into.exists() else [])]:
        totals.update(_values_of(path))
    new = into.with_suffix(".new")
    new.unlink(missing_ok=True)
    _make_room(str(new), _ROOM + sum(len(key.encode()) + _MOST_BESIDE for key in totals))
    file = MmapedDict(str(new))
    for key, value in totals.items():
        file.write_value(key, value, 0.0)
    file.close()
    for path in ended:
        path.unlink()
    new.replace(into)


def _values_of(path: Path) -> dict[str, float]:
    """None of a file that cannot be read, which would fail each scrape: its process was killed when it made it."""
    try:
        return {key: value for key, value, _, _ in MmapedDict.read_all_values_from_file(path)}
    except (RuntimeError, ValueError, struct.error) as error:
        log.warning("not counted any more: %s, which cannot be read (%s)", path, error)
        return {}
