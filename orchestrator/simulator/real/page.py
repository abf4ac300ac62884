"""The HTML page of a benchmark: figures as a table, latencies as curves. It loads no other files."""

from __future__ import annotations

import html
from collections.abc import Sequence

import plotly.graph_objects as plotly
from plotly.offline import get_plotlyjs

from orchestrator.simulator.real.drive import Run
from orchestrator.simulator.real.figures import Figures, Ratio

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_LEAST_S = 1e-4  # on a logarithmic axis
_POINTS = 200  # of one curve, at most
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 75rem; margin: 2rem auto;
  padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
td, th { padding: .25rem .7rem; border-bottom: 1px solid #8888; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left }
h1 { overflow-wrap: anywhere }
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
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script><h1>{html.escape(title)}</h1>",
        *(_warning(name, figures) for name, _, figures in named if figures.client_was_the_bottleneck),
        _table(list(zip(*rows, strict=True))),
        *(["<h2>First server over second, in turns</h2>", _table(ratio_rows(compared))] if compared else []),
        *charts,
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
    chart = plotly.Figure(layout={"title": title, "template": "plotly_white", "height": 420, "showlegend": True})
    chart.update_xaxes(title=unit, type="log" if log_x else "linear")
    for number, (name, curve) in enumerate(curves):
        again, colour = divmod(number, len(_COLOURS))
        dash = f"{3 * again}px" if again else "solid"  # where the colours begin anew
        xs, ys = [max(x, _LEAST_S) if log_x else x for x, _ in curve], [y for _, y in curve]
        chart.add_scatter(x=xs, y=ys, name=html.escape(name), line={"color": _COLOURS[colour], "dash": dash})
    return str(chart.to_html(full_html=False, include_plotlyjs=False))
