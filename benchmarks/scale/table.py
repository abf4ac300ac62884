"""The results of `benchmarks.scale` and their targets, as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import tables

Figure = tuple[str, str, Callable[[dict[str, Any]], float]]
FIGURES: list[Figure] = [
    ("all have joined, s", "30", lambda r: r["join_s"]),
    ("... a frontend's time for it, s", "", lambda r: r["join_cpu_s"]["frontend"]),
    ("... all workers' time for it, s", "", lambda r: r["join_cpu_s"]["workers"]),
    ("... Redis's time for it, s", "", lambda r: r["join_redis"]["cpu_s"]),
    ("... what Redis sent for it, MB", "", lambda r: r["join_redis"]["out_bytes"] / 1e6),
    ("descriptors per worker", "2", lambda r: r["descriptors_per_worker"]),
    ("memory per worker, KB", "300", lambda r: r["kb_per_worker"]),
    ("idle: load reports per second", "", lambda r: r["idle"]["per_frontend"]["reports"]),
    ("idle: share of a core, %", "15", lambda r: r["idle"]["per_frontend"]["cpu_s"] * 100),
    (
        "idle: CPU time for a load report and what comes with it, us",
        "",
        lambda r: r["idle"]["per_frontend"]["cpu_s"] / r["idle"]["per_frontend"]["reports"] * 1e6,
    ),
    ("idle: all workers' share of a core, %", "", lambda r: r["idle"]["workers_cpu_s"] * 100),
    ("idle: Redis commands per second", "", lambda r: r["idle"]["redis"]["commands"]),
    ("idle: Redis's share of a core, %", "", lambda r: r["idle"]["redis"]["cpu_s"] * 100),
    ("load: requests answered per second and frontend", "", lambda r: r["load"]["per_frontend"]["answered"]),
    ("load: load reports per second", "", lambda r: r["load"]["per_frontend"]["reports"]),
    ("load: other messages per second", "", lambda r: r["load"]["per_frontend"]["messages"]),
    ("load: prefix batches per second", "", lambda r: r["load"]["per_frontend"]["prefix_events"]),
    ("load: share of a core, %", "", lambda r: r["load"]["per_frontend"]["cpu_s"] * 100),
    ("load: all workers' share of a core, %", "", lambda r: r["load"]["workers_cpu_s"] * 100),
    ("decision, median CPU time, us", "50", lambda r: r["decision_cpu_us"]["p50"]),
    ("decision, median elapsed, us", "", lambda r: r["decision_us"]["p50"]),
    ("decision, P99 elapsed, us", "", lambda r: r["decision_us"]["p99"]),
    ("a tenth lost: noticed after, s", "", lambda r: r["loss_noticed_s"]),
    ("requests without their answer", "0", lambda r: r["failed"]),
    ("a new frontend sees all, s", "5", lambda r: r["restart_s"]),
    ("... its CPU time until then, s", "", lambda r: r["restart_cpu_s"]["frontend"]),
    ("... that of all workers, s", "", lambda r: r["restart_cpu_s"]["workers"]),
    ("... that of the other frontends, s", "", lambda r: r["restart_cpu_s"]["others"]),
    ("... that of Redis, s", "", lambda r: r["restart_cpu_s"]["redis"]),
]


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    titles = [f"{r['workers']:,} workers, {r['frontends']} frontend{'s'[: r['frontends'] > 1]}" for r in results]
    rows = ([name, most, *(_cell(figure, result) for result in results)] for name, most, figure in FIGURES)
    return tables.table(["", "at most", *titles], rows)


def _cell(figure: Callable[[dict[str, Any]], float], result: dict[str, Any]) -> str:
    try:
        return _shown(figure(result))
    except KeyError:  # the measurement ended before
        return "not measured"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
