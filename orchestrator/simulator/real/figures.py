"""The figures of a run, and the ratios between two servers. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from orchestrator.simulator.real.drive import Run
from orchestrator.simulator.report import percentile

SHARES = (0.5, 0.9, 0.99, 1.0)
# Above this share of a core, or this delay in sending (s), the client's own times distort the server's.
CLIENT_BUSY = 0.8
CLIENT_LATE_S = 0.1


class Spread(msgspec.Struct, frozen=True):
    """Percentiles in seconds; NaN (in JSON: null) without values."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values) or [math.nan]
        return cls(*(percentile(ordered, share) for share in SHARES))


class Figures(msgspec.Struct, frozen=True):
    """The figures of one run. `attained` (share of requests) and `goodput` (requests per second) count the answers
    within both objectives; errors count as missed."""

    url: str
    load: str
    rate: float | None
    users: int | None
    requests: int
    errors: int
    span_s: float
    requests_per_s: float
    output_tokens_per_s: float
    cached: float  # share of prompt tokens
    ttft: Spread
    tpot: Spread
    itl: Spread
    total: Spread
    attained: float
    goodput: float
    client_cpu_ms: float  # per request
    client_busy: float  # share of a core
    client_late_s: float
    reasons: dict[str, int]  # of errors

    @property
    def client_was_the_bottleneck(self) -> bool:
        return self.client_busy > CLIENT_BUSY or self.client_late_s > CLIENT_LATE_S


def figures(run: Run, ttft_s: float, tpot_s: float) -> Figures:
    """The figures of a run. `ttft_s` and `tpot_s` are the objectives."""
    answered = [sent.timing for sent in run.sent if sent.timing is not None]
    met = sum(timing.ttft_s <= ttft_s and timing.tpot_s <= tpot_s for timing in answered)
    span_s = max(run.span_s, 1e-9)
    prompt_tokens = sum(timing.prompt_tokens for timing in answered)
    return Figures(
        url=run.url,
        load=run.load,
        rate=run.rate,
        users=run.users,
        requests=len(run.sent),
        errors=len(run.sent) - len(answered),
        span_s=run.span_s,
        requests_per_s=len(answered) / span_s,
        output_tokens_per_s=sum(timing.output_tokens for timing in answered) / span_s,
        cached=sum(timing.cached_tokens for timing in answered) / prompt_tokens if prompt_tokens else 0.0,
        ttft=Spread.of([timing.ttft_s for timing in answered]),
        tpot=Spread.of([timing.tpot_s for timing in answered if timing.output_tokens > 1]),
        itl=Spread.of([gap for timing in answered for gap in timing.gaps_s]),
        total=Spread.of([timing.total_s for timing in answered]),
        attained=met / len(run.sent) if run.sent else 0.0,
        goodput=met / span_s,
        client_cpu_ms=run.client_cpu_s / len(run.sent) * 1e3 if run.sent else 0.0,
        client_busy=run.client_cpu_s / span_s,
        client_late_s=run.late_s,
        reasons=dict(Counter(sent.error for sent in run.sent if sent.error).most_common(5)),
    )


_SAME = 1.01  # a ratio up to this is none


class Ratio(msgspec.Struct, frozen=True):
    """A figure of the first server over that of the second, at one rate: median, least and most over pairs of turns."""

    name: str
    rate: float | None  # requests per second; None in a closed loop
    median: float
    least: float
    most: float
    more_is_better: bool

    @property
    def better(self) -> str:
        """The server that was better in every turn, by more than hundredths: first, second, or - for neither."""
        if self.least > _SAME:
            return "first" if self.more_is_better else "second"
        if self.most < 1 / _SAME:
            return "second" if self.more_is_better else "first"
        return "-"


# The figures by which two servers are compared: name, attribute path, whether more is better.
_COMPARED = (
    ("requests/s", "requests_per_s", True),
    ("output tokens/s", "output_tokens_per_s", True),
    ("goodput", "goodput", True),
    *(
        (f"{name} {share}", f"{name.lower()}.{share.lower()}", False)
        for name in ("TTFT", "TPOT")
        for share in ("P50", "P99")
    ),
)


def ratios(first: Sequence[Figures], second: Sequence[Figures]) -> list[Ratio]:
    """The ratios of two servers that ran in turns, for each rate. `first[i]` and `second[i]` are one pair of turns.

    A figure is left out if the second server has 0 in some turn, or if either has no value.
    """
    turns: dict[float | None, list[tuple[Figures, Figures]]] = {}
    for pair in zip(first, second, strict=True):
        turns.setdefault(pair[0].rate, []).append(pair)
    found = []
    for rate, each in turns.items():
        for name, path, more_is_better in _COMPARED:
            pairs = [(_at(a, path), _at(b, path)) for a, b in each]
            if all(b > 0 and not math.isnan(a) for a, b in pairs):
                values = [a / b for a, b in pairs]
                found.append(Ratio(name, rate, statistics.median(values), min(values), max(values), more_is_better))
    return found


def _at(figures: Figures, path: str) -> float:
    value: object = figures
    for part in path.split("."):
        value = getattr(value, part)
    assert isinstance(value, (int, float))
    return float(value)
