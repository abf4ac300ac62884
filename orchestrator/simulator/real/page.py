"""The HTML page of a benchmark: figures as a table, latencies as curves. It loads no other files."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from orchestrator.simulator.real.drive import Run
from orchestrator.simulator.real.figures import Figures, Ratio

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 260, 56, 34  # pixels
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASH = 3  # pixels; longer dashes when the colours begin anew
_POINTS = 200  # of one curve, at most
_STYLE = """
:root { color-scheme: light dark; --line: #8888; --text: #222; --back: #fff }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --back: #16181c } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 75rem;
  margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
td, th { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left }
figure { display: inline-block; margin: 1rem 1rem 0 0 }
h1 { overflow-wrap: anywhere }
svg { max-width: 100%; height: auto; overflow: visible } svg text { fill: var(--text); font-size: 12px }
.warning { border-left: 4px solid #d55e00; padding-left: .7rem }
"""

Points = list[tuple[float, float]]


def page(title: str, rows: Sequence[Sequence[str]], runs: Sequence[tuple[Run, Figures]], compared: list[Ratio]) -> str:
    """The page's HTML. `rows`: first the names of the figures, then for each run its figures as text."""
    named = [
        (_name(figures, [before for _, before in runs[:n]]), run, figures) for n, (run, figures) in enumerate(runs)
    ]
    timings = [(name, [sent.timing for sent in run.sent if sent.timing is not None]) for name, run, _ in named]
    ttft = [(name, _cdf([timing.ttft_s for timing in all_of])) for name, all_of in timings]
    itl = [(name, _cdf([gap for timing in all_of for gap in timing.gaps_s])) for name, all_of in timings]
    over_time = [
        (name, _thinned(sorted((sent.at_s, sent.timing.ttft_s) for sent in run.sent if sent.timing is not None)))
        for name, run, _ in named
    ]
    charts = [
        _chart("Time to first token: share of requests", "s", ttft, log_x=True),
        _chart("Time between tokens: share of gaps", "s", itl, log_x=True),
        _chart("Time to first token, s, over the run", "s since its start", over_time),
    ]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>",
        *(_warning(name, figures) for name, _, figures in named if figures.client_was_the_bottleneck),
        _table(list(zip(*rows, strict=True))),
        *(["<h2>First server over second, in turns</h2>", _table(ratio_rows(compared))] if compared else []),
        *(f"<figure>{chart}</figure>" for chart in charts),
        "</html>",
    ]
    return "\n".join(parts)


def ratio_rows(compared: Sequence[Ratio]) -> list[list[str]]:
    """Names, then a row for each ratio."""
    rows = [["figure", "ratio", "least", "most", "better in every turn"]]
    for r in compared:
        name = r.name if r.rate is None else f"{r.name} at {r.rate:.3g}/s"
        rows.append([name, f"{r.median:.2f}", f"{r.least:.2f}", f"{r.most:.2f}", r.better])
    return rows


def _name(figures: Figures, before: Sequence[Figures]) -> str:
    how = f"{figures.rate:.3g}/s" if figures.rate is not None else f"{figures.users} users"
    turn = 1 + sum((each.url, each.rate) == (figures.url, figures.rate) for each in before)
    return f"{figures.url} {how}{f', turn {turn}' if turn > 1 else ''}"


def _warning(name: str, figures: Figures) -> str:
    return (
        f"<p class=warning>{html.escape(name)}: the client was the bottleneck ({figures.client_busy:.0%} of a core, "
        f"{figures.client_late_s:.2f} s late): these are its times, not the server's.</p>"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    return "<table>" + row(rows[0], "th") + "".join(row(cells, "td") for cells in rows[1:]) + "</table>"


def _cdf(values: list[float]) -> Points:
    ordered = sorted(values)
    return _thinned([(value, (n + 1) / len(ordered)) for n, value in enumerate(ordered)])


def _thinned(points: Points) -> Points:
    step = max(1, len(points) // _POINTS)
    return [*points[:-1:step], *points[-1:]]


def _chart(title: str, unit: str, curves: Sequence[tuple[str, Points]], log_x: bool = False) -> str:
    """A chart as SVG. A logarithmic axis begins at the smallest value, but at most four decades below the largest."""
    points = [point for _, curve in curves for point in curve]
    if not points:
        return f"<figcaption>{html.escape(title)}: nothing was answered</figcaption>"
    high = max(max(x for x, _ in points), 1e-6)
    low = min(max(min(x for x, _ in points), high / 1e4), high / 2) if log_x else 0.0
    top = max(y for _, y in points) or 1.0
    x_at, y_at = _scale(low, high, _LEFT, _WIDTH - 10, log_x), _scale(0.0, top, _HEIGHT - _BOTTOM, 10, False)
    parts = [f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT + 16 * len(curves)}' width={_WIDTH} role=img>"]
    for tick in _ticks(low, high, log_x):
        parts.append(f"<text x={x_at(tick):.0f} y={_HEIGHT - 16} text-anchor=middle>{tick:.3g}</text>")
    for tick in (0.0, top / 2, top):
        y = y_at(tick)
        parts.append(f"<text x={_LEFT - 6} y={y + 4:.0f} text-anchor=end>{tick:.3g}</text>")
        parts.append(f"<path d='M{_LEFT} {y:.1f}H{_WIDTH - 10}' stroke='var(--line)' fill=none />")
    for number, (name, curve) in enumerate(curves):
        colour, y = _COLOURS[number % len(_COLOURS)], _HEIGHT + 16 * number + 4
        dashes = f"stroke-dasharray='{_DASH * (number // len(_COLOURS))}'"  # none of 0
        line = " ".join(f"{x_at(max(x, low)):.1f},{y_at(value):.1f}" for x, value in curve)
        parts.append(f"<polyline points='{line}' fill=none stroke='{colour}' stroke-width=1.6 {dashes} />")
        parts.append(f"<path d='M{_LEFT - 8} {y - 4}h20' stroke='{colour}' stroke-width=4 {dashes} />")
        parts.append(f"<text x={_LEFT + 16} y={y}>{html.escape(name)}</text>")
    parts.append(f"<text x={_WIDTH - 10} y={_HEIGHT - 2} text-anchor=end>{html.escape(unit)}</text></svg>")
    return f"<figcaption>{html.escape(title)}</figcaption>" + "".join(parts)


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Callable[[float], float]:
    if log:
        low, high = math.log(low), math.log(high)
    return lambda value: start + ((math.log(value) if log else value) - low) / (high - low) * (end - start)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if not log:
        return [high * n / 4 for n in range(5)]
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return [10.0**power for power in powers] or [low, high]
