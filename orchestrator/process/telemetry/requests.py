"""Ended requests: the `pd.request` log line of each with its stages on one time line, and a frontend's latest ones.

The router writes them; the dashboard, the exporter of traces and the command line read them. What is kept is bounded.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

KEPT = 1000  # requests, the latest
SLOWEST_PER_MINUTE = 20
MINUTES = 60
_FIRST_S = 1e-4  # the upper end of the first bucket
_PER_OCTAVE = 8  # buckets, so a percentile is exact to 9%
_BUCKETS = 20 * _PER_OCTAVE  # the last one begins at about 100 s, and has no end
_ENDS_S = [_FIRST_S * 2 ** (bucket / _PER_OCTAVE) for bucket in range(_BUCKETS - 1)]


class RequestLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stages in milliseconds. `exposed_ms`: from the end of prefill compute to decode's first token."""

    id: str
    outcome: str
    decision: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    attempts: int
    decode_worker: str | None
    prefill_worker: str | None
    total_ms: float
    ttft_ms: float | None = None
    queued_ms: float | None = None
    claim_ms: float | None = None  # from the claim until its frontend knew of it, plus the job's way to the queue
    prefill_ms: float | None = None
    exposed_ms: float | None = None
    decode_ms: float | None = None
    cached_tokens: int = 0  # of the prompt, at the worker that prefilled it: estimated if local, counted if remote
    retries: list[str] = []
    arrived_at: float = 0.0  # at the frontend, unix seconds
    frontend_ms: float | None = None  # from arrival to the router: parsing, the chat template, tokenizing
    sent_ms: float | None = None  # from arrival at the router until a decode worker was given the last attempt
    chunks_ms: list[float] = []  # ends of a remote prefill's chunks, from its begin; the last one's is `prefill_ms`

    @property
    def took_ms(self) -> float:
        """From its arrival at the frontend to its end."""
        return self.total_ms + (self.frontend_ms or 0.0)

    @property
    def ended_at(self) -> float:
        """Unix seconds."""
        return self.arrived_at + self.took_ms / 1e3

    def for_people(self) -> str:
        """As the launcher shows it."""
        by = f"prefilled by {self.prefill_worker}, decoded by" if self.prefill_worker else "prefilled and decoded by"
        where = f", {by} {self.decode_worker}" if self.decode_worker else ""
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        times = (self.queued_ms, self.prefill_ms, self.exposed_ms, self.decode_ms)
        named = zip(("queued", "prefill", "exposed transfer", "decode"), times, strict=True)
        took = ", ".join(f"{name} {ms:.0f} ms" for name, ms in named if ms is not None)
        return (
            f"pd.request {self.id}: {self.outcome}, {self.prompt_tokens}{cached} prompt and {self.output_tokens} "
            f"output tokens{where} ({self.reason}){'; ' if took else ''}{took}"
        )

    def with_stages(self) -> dict[str, Any]:
        """As types of JSON."""
        return {**msgspec.to_builtins(self), "stages": msgspec.to_builtins(stages(self))}


def read_request(encoded: str | bytes) -> RequestLine | None:
    """From a log; None for a line that is cut off, or of another release."""
    try:
        return msgspec.json.decode(encoded, type=RequestLine)
    except (msgspec.DecodeError, RecursionError):
        return None


class Stage(msgspec.Struct, frozen=True):
    """`begin_ms` and `end_ms` count from the request's arrival at the frontend."""

    name: str
    begin_ms: float
    end_ms: float
    worker: str = ""

    @property
    def took_ms(self) -> float:
        return self.end_ms - self.begin_ms


def stages(line: RequestLine) -> list[Stage]:
    """Of the last attempt, in order, but those that did not happen. The time of earlier attempts is in `place`."""
    begin_ms = line.frontend_ms or 0.0
    end_ms = begin_ms + line.total_ms
    found = [Stage("frontend", 0.0, begin_ms)]
    prefill, decode = line.prefill_worker or "", line.decode_worker or ""
    if line.sent_ms is None:
        return [*found, Stage("place", begin_ms, end_ms)]
    sent_ms = min(begin_ms + line.sent_ms, end_ms)
    claim_ms = max(begin_ms, sent_ms - (line.claim_ms or 0.0))
    queue_ms = max(begin_ms, claim_ms - (line.queued_ms or 0.0))
    found.append(Stage("place", begin_ms, queue_ms))
    if line.queued_ms is not None:
        found.append(Stage("queue", queue_ms, claim_ms))
        found.append(Stage("claim", claim_ms, sent_ms, prefill))
    computed_ms = min(sent_ms + (line.prefill_ms if line.prefill_ms is not None else end_ms - sent_ms), end_ms)
    found.append(Stage("prefill", sent_ms, computed_ms, prefill or decode))
    if line.prefill_ms is None:
        return found  # it ended while it was being prefilled
    decoding_ms = computed_ms
    if prefill:
        decoding_ms = min(computed_ms + (line.exposed_ms if line.exposed_ms is not None else end_ms), end_ms)
        found.append(Stage("transfer", computed_ms, decoding_ms, f"{prefill} to {decode}"))
    if line.ttft_ms is not None and decoding_ms < end_ms:
        found.append(Stage("decode", decoding_ms, end_ms, decode))
    return found


class Latencies:
    """Counts durations in buckets that grow by 9%. Adding one costs less than a microsecond."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_ENDS_S, seconds)] += 1

    def take(self) -> list[int]:
        """The counts since the last call."""
        taken, self.counts = self.counts, [0] * _BUCKETS
        return taken


def percentiles(windows: Iterable[Sequence[int]], shares: Sequence[float]) -> list[float | None]:
    """Seconds at each share (0 to 1), over all `windows` of `Latencies.take`; None if nothing was counted."""
    counts = [sum(column) for column in zip(*windows, strict=True)]
    total = sum(counts)
    found: list[float | None] = []
    for share in shares:
        left, bucket = share * total, 0
        while bucket < len(counts) - 1 and (left := left - counts[bucket]) > 0:
            bucket += 1
        found.append(_FIRST_S * 2 ** (bucket / _PER_OCTAVE) if total else None)
    return found


class Recent:
    """Times are the router's monotonic clock, seconds, unless a name says otherwise."""

    def __init__(self) -> None:
        self.ttft, self.itl, self.queue_wait = Latencies(), Latencies(), Latencies()
        self.transferred: Counter[str] = Counter()  # prompt tokens, by "PREFILL-WORKER DECODE-WORKER"
        # Ended requests by class, and those of them that met their objectives; not those whose client left.
        self.judged: Counter[str] = Counter()
        self.met: Counter[str] = Counter()
        self.output_tokens = 0
        self._ended: deque[RequestLine] = deque(maxlen=KEPT)
        self._slow: deque[tuple[int, list[tuple[float, int, RequestLine]]]] = deque(maxlen=MINUTES)
        self._count = 0

    def ended(self, line: RequestLine, now: float) -> None:
        self._ended.append(line)
        self._count += 1
        minute = int(now // 60)
        if not self._slow or self._slow[-1][0] != minute:
            self._slow.append((minute, []))
        slow = self._slow[-1][1]
        entry = (line.took_ms, self._count, line)
        heapq.heappush(slow, entry) if len(slow) < SLOWEST_PER_MINUTE else heapq.heappushpop(slow, entry)

    def latest(self, count: int) -> list[RequestLine]:
        """The latest ended requests, the last one first."""
        return list(self._ended)[::-1][:count]

    def slowest(self, count: int, now: float) -> list[RequestLine]:
        """The slowest requests of the last hour, the slowest first; at most SLOWEST_PER_MINUTE of any minute."""
        recent = [entry for minute, slow in self._slow if minute > now // 60 - MINUTES for entry in slow]
        return [line for _, _, line in heapq.nlargest(count, recent)]

    def find(self, request_id: str) -> RequestLine | None:
        """A request by the client's id, or by the beginning of one; None if it is not kept."""
        kept = [*self.latest(KEPT), *(line for _, slow in reversed(self._slow) for _, _, line in slow)]
        exact = (line for line in kept if line.id == request_id)
        return next(exact, None) or next((line for line in kept if line.id.startswith(request_id)), None)
