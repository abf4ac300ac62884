"""The latest requests of this frontend, for its pages: latencies, transfers, and the requests that ended.

Everything here is bounded. The router writes it, the pages about the fleet read it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from orchestrator.process.telemetry.request_line import RequestLine

KEPT = 1000  # requests, the latest
SLOWEST_PER_MINUTE = 20
MINUTES = 60
_FIRST_S = 1e-4  # the upper end of the first bucket
_PER_OCTAVE = 8  # buckets, so a percentile is exact to 9%
_BUCKETS = 20 * _PER_OCTAVE  # the last one begins at about 100 s, and has no end
_ENDS_S = [_FIRST_S * 2 ** (bucket / _PER_OCTAVE) for bucket in range(_BUCKETS - 1)]


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

    def early_token(self, ttft_s: float) -> None:
        """The client gets the prefill engine's token. The outputs of the decode engine will not have it."""
        self.ttft.add(ttft_s)
        self.output_tokens += 1

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
