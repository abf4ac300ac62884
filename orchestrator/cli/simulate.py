"""`orchestrator simulate`: one load on one fleet, for one or several policies, at one or several rates.

All options are checked before a simulation runs. A mistake is a ConfigError of one line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from orchestrator.config.settings import ConfigError, SLOConfig
from orchestrator.simulator.faults import Faults
from orchestrator.simulator.plot import PlotError, line_chart
from orchestrator.simulator.profile import PROFILES, Profile, ProfileError, load_profile
from orchestrator.simulator.report import Report, goodput, report
from orchestrator.simulator.settings import FleetError, Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import LOADS, Load, TraceError, at_rate, first, read_trace, repeated, synthetic

DEFAULT_PROFILE = "h100-llama-8b"


def _option(name: str, help: str) -> Any:
    return typer.Option(name, help=help)


def simulate_command(
    trace: Annotated[
        str, _option("--trace", f"A Mooncake .jsonl or Azure .csv file, or a made load: {', '.join(LOADS)}.")
    ],
    fleet: Annotated[str, _option("--fleet", "Workers to begin with.")] = "8P8D",
    policy: Annotated[
        list[str] | None, _option("--policy", "ours, ours:fixed, a decode choice, or field:NAME. Repeatable.")
    ] = None,
    profile: Annotated[
        str, _option("--profile", "A worker's timing: a shipped name or a JSON file.")
    ] = DEFAULT_PROFILE,
    rate: Annotated[float | None, _option("--rate", "Requests per second; by default the trace's own.")] = None,
    sweep: Annotated[
        str | None, _option("--sweep", "rate=10,20,40 simulates each; rate=goodput finds the highest good one.")
    ] = None,
    requests: Annotated[int | None, _option("--requests", "Cut or repeat the load to this many.")] = None,
    ttft_s: Annotated[float | None, _option("--ttft", "TTFT objective, seconds; default the profile's.")] = None,
    tpot_s: Annotated[float | None, _option("--tpot", "TPOT objective, seconds; default the profile's.")] = None,
    report_age_s: Annotated[float, _option("--report-age", "Age of load reports, seconds.")] = 0.1,
    transfer: Annotated[str, _option("--transfer", "KV after prefill (whole) or during it (chunk).")] = "whole",
    kill: Annotated[
        list[str] | None, _option("--kill", "A worker, when and for how long (seconds): d0@30:10. Repeatable.")
    ] = None,
    seed: Annotated[int, _option("--seed", "Of all random draws.")] = 0,
    as_json: Annotated[bool, _option("--json", "JSON instead of a table.")] = False,
    plot: Annotated[Path | None, _option("--plot", "A PNG: attainment by rate, or block usage by time.")] = None,
) -> None:
    """Simulate a fleet under a load with the router's own policies, without engines."""
    try:
        load = parse_load(trace, requests, seed)
        worker = parse_profile(profile)
        prefill, decode = parse_fleet(fleet)
        stacks = [stack(name) for name in policy or ["ours"]]
        rates, search = _rates(sweep, rate, load)
        if transfer not in ("whole", "chunk"):
            raise ConfigError(f"--transfer: expected whole or chunk, got {transfer!r}")
        for name, seconds in (("--ttft", ttft_s), ("--tpot", tpot_s), ("--report-age", report_age_s)):
            if seconds is not None and seconds <= 0:
                raise ConfigError(f"{name}: expected more than 0 seconds, got {seconds:g}")
        slo = SLOConfig(ttft_s=ttft_s or worker.ttft_slo_s, tpot_s=tpot_s or worker.tpot_slo_s)
        every = [
            Settings(
                prefill=prefill,
                decode=decode,
                profile=worker,
                stack=chosen,
                seed=seed,
                report_age_s=report_age_s,
                transfer=transfer,  # type: ignore[arg-type]
                slo=slo,
            )
            for chosen in stacks
        ]
        kills = [_kill(text) for text in kill or []]
        for settings in every:
            _simulation(settings, first(load, 1), kills)  # raises for an impossible fleet or kill
        _run(every, load, kills, rates, search, as_json, plot)
    except (TraceError, ProfileError, FleetError, PlotError, ValueError) as error:
        raise ConfigError(str(error)) from None


class _Kill(NamedTuple):
    worker: str
    at: float  # seconds from the start
    down_s: float


def _simulation(settings: Settings, load: Load, kills: list[_Kill]) -> Simulation:
    sim = Simulation(settings, load)
    for kill in kills:
        Faults(sim).kill(*kill)
    return sim


def _run(
    every: list[Settings],
    load: Load,
    kills: list[_Kill],
    rates: list[float],
    search: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    reports: list[Report] = []
    usage: dict[str, list[tuple[float, float]]] = {}
    with _progress() as progress:
        for settings in every:
            name = settings.stack.name
            task = progress.add_task(name, total=len(load.arrivals) * (1 if search else len(rates)))

            def run(at: float, done: Callable[[int], None] | None = None, settings: Settings = settings) -> Report:
                sim = _simulation(settings, at_rate(load, at), kills).run(done)
                usage[settings.stack.name] = [
                    (time, mean) for time, _, mean in sim.usage[:: max(1, len(sim.usage) // 400)]
                ]
                return report(sim)

            if search:
                found = goodput(run, *rates)
                reports += found.runs
                progress.update(task, description=f"{name}: goodput {found.rate:.4g}/s", completed=len(load.arrivals))
                continue
            for number, at in enumerate(rates):
                before = number * len(load.arrivals)

                def done(finished: int, before: int = before, task: TaskID = task) -> None:
                    progress.update(task, completed=before + finished)

                reports.append(run(at, done))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(reports), indent=2).decode() + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(table(reports))
    if plot is not None:
        _plot(plot, load, reports, usage)


def table(reports: list[Report]) -> Table:
    """One line per run."""
    shown = Table(title=f"{reports[0].load} on {reports[0].fleet}, {reports[0].profile}" if reports else None)
    for column in (
        "policy",
        "rate/s",
        "attained",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
        "ITL p99",
        "imbalance",
        "usage",
    ):
        shown.add_column(column, justify="left" if column == "policy" else "right")
    for column in ("preempted", "rejected", "unfinished", "cached"):
        shown.add_column(column, justify="right")
    for r in reports:
        shown.add_row(
            r.policy, f"{r.rate:.4g}", f"{r.attained:.1%}", f"{r.ttft_p50_s:.3f} s", f"{r.ttft_p99_s:.2f} s",
            f"{r.tpot_p50_s * 1e3:.1f} ms", f"{r.tpot_p99_s * 1e3:.1f} ms", f"{r.itl_p99_s * 1e3:.1f} ms",
            f"{r.imbalance:.3f}", f"{r.usage:.0%}", str(r.preemptions), str(r.rejected), str(r.unfinished),
            f"{r.prefix_hit:.0%}",
        )  # fmt: skip
    return shown


def _plot(path: Path, load: Load, reports: list[Report], usage: dict[str, list[tuple[float, float]]]) -> None:
    by_policy: dict[str, list[tuple[float, float]]] = {}
    for r in reports:
        by_policy.setdefault(r.policy, []).append((r.rate, r.attained))
    if any(len(points) > 1 for points in by_policy.values()):
        title = f"{load.name}: requests that meet both objectives"
        line_chart(path, title, "requests per second", "share of all requests", by_policy, mark_y=0.9)
    else:
        line_chart(path, f"{load.name}: KV blocks in use", "seconds", "mean share over decode workers", usage)


def _progress() -> Progress:
    bar = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    return Progress(*bar, console=console, transient=True, disable=not console.is_terminal)


def parse_load(trace: str, requests: int | None, seed: int) -> Load:
    """Raises ConfigError or TraceError."""
    if requests is not None and requests < 2:
        raise ConfigError(f"--requests: expected at least 2, got {requests}")
    if trace in LOADS:
        return synthetic(trace, requests or 10_000, seed)
    load = read_trace(Path(trace), seed)
    if requests is None:
        return load
    return first(repeated(load, -(-requests // len(load.arrivals))), requests)


def parse_profile(name: str) -> Profile:
    """Raises ConfigError or ProfileError."""
    shipped = {path.stem: path for path in sorted(PROFILES.glob("*.json"))}
    if name in shipped:
        return load_profile(shipped[name])
    if not Path(name).exists():
        raise ConfigError(f"--profile: expected a JSON file or one of {', '.join(shipped)}, got {name!r}")
    return load_profile(Path(name))


def parse_fleet(text: str) -> tuple[int, int]:
    """Prefill and decode workers of `8P8D`. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)[pP](\d+)[dD]", text)
    if match is None:
        raise ConfigError(f"--fleet: expected prefill and decode workers as in 8P8D, got {text!r}")
    return int(match[1]), int(match[2])


def _kill(text: str) -> _Kill:
    match = re.fullmatch(r"(\w+)@(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", text)
    if match is None:
        raise ConfigError(f"--kill: expected a worker, a time and a duration as in d0@30:10, got {text!r}")
    return _Kill(match[1], float(match[2]), float(match[3]))


def _rates(sweep: str | None, rate: float | None, load: Load) -> tuple[list[float], bool]:
    """The rates to simulate, or the bounds of the search and True."""
    if rate is not None and rate <= 0:
        raise ConfigError(f"--rate: expected more than 0 requests per second, got {rate:g}")
    start = rate or load.rate
    if sweep is None:
        return [start], False
    key, _, values = sweep.partition("=")
    if key == "rate" and values == "goodput":
        return [start, 2 * start], True
    try:
        rates = [float(value) for value in values.split(",")]
    except ValueError:
        rates = []
    if key != "rate" or not rates or min(rates) <= 0:
        raise ConfigError(f"--sweep: expected rate=10,20,40 or rate=goodput, got {sweep!r}")
    return rates, False
