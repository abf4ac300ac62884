"""`orchestrator simulate`: one load on one fleet, for one or several policies, at one or several rates.

All options are checked before a simulation runs. A mistake is a ConfigError of one line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from orchestrator.cli.handle import ModelOption, console, option, positive_numbers
from orchestrator.config.models import load_model
from orchestrator.config.settings import Config, ConfigError, SLOConfig, overridden, parse_config
from orchestrator.simulator import faults
from orchestrator.simulator.engine.profile import PROFILES, Profile, load_profile
from orchestrator.simulator.loads import LOADS, synthetic
from orchestrator.simulator.plot import line_chart
from orchestrator.simulator.report import SHARES, Goodput, Report, goodputs, report
from orchestrator.simulator.settings import Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import MOST_REQUESTS, Load, at_rate, first, read_trace, repeated

DEFAULT_PROFILE = "h100-llama-8b"
app = typer.Typer()


@app.command("simulate")
def simulate_command(
    trace: Annotated[
        str, option("--trace", f"A Mooncake .jsonl or Azure .csv file, or a synthetic load: {', '.join(LOADS)}.")
    ],
    fleet: Annotated[
        str | None, option("--fleet", "Workers at the start, as 8P8D; default: the configuration's, else 8P8D.")
    ] = None,
    config: Annotated[Path | None, option("--config", "A configuration file for the router.")] = None,
    sets: Annotated[list[str] | None, option("--set", "Override a key: slo.admission=off. Repeatable.")] = None,
    model: ModelOption = None,
    policy: Annotated[
        list[str] | None,
        option("--policy", "ours, ours:fixed, a decode choice, or field:NAME (another project's). Repeatable."),
    ] = None,
    profile: Annotated[str, option("--profile", "A worker's timing: a shipped name or a JSON file.")] = DEFAULT_PROFILE,
    rate: Annotated[float | None, option("--rate", "Requests per second; default: the trace's own.")] = None,
    sweep: Annotated[
        str | None, option("--sweep", "rate=10,20,40 simulates each; rate=goodput searches the goodput.")
    ] = None,
    requests: Annotated[int | None, option("--requests", "Cut or repeat the load to this many requests.")] = None,
    ttft_s: Annotated[
        float | None, option("--ttft", "TTFT objective, seconds; default: the file's, else the profile's.")
    ] = None,
    tpot_s: Annotated[float | None, option("--tpot", "TPOT objective, seconds; same default.")] = None,
    kill: Annotated[
        list[str] | None, option("--kill", "d0@30:10 kills worker d0 after 30 s, for 10 s. Repeatable.")
    ] = None,
    racks: Annotated[
        str | None, option("--racks", "2:8 puts the workers into 2 racks, between which KV takes 8 times as long.")
    ] = None,
    seed: Annotated[int, option("--seed", "Seed of all random draws.")] = 0,
    as_json: Annotated[bool, option("--json", "JSON instead of a table.")] = False,
    plot: Annotated[Path | None, option("--plot", "A PNG: attainment by rate, or block usage by time.")] = None,
) -> None:
    load = parse_load(trace, requests, seed)
    worker = parse_profile(profile)
    served = parse_configuration(config, sets, model)
    prefill, decode = parse_fleet(fleet or "8P8D") if fleet or config is None else _replicas(served)
    rates, search = _rates(sweep, rate, load)
    for name, seconds in (("--ttft", ttft_s), ("--tpot", tpot_s)):
        if seconds is not None and seconds <= 0:
            raise ConfigError(f"{name}: expected more than 0 seconds, got {seconds:g}")
    rack_count, between_racks = _racks(racks)
    slo = objectives(served if config else None, worker, ttft_s, tpot_s)
    every = [
        Settings(
            prefill=prefill,
            decode=decode,
            profile=worker,
            stack=chosen,
            seed=seed,
            slo=slo,
            racks=rack_count,
            between_racks=between_racks,
        )
        for chosen in [stack(name, served) for name in policy or ["ours"]]
    ]
    kills = [_kill(text) for text in kill or []]
    for settings in every:
        _simulation(settings, first(load, 1), kills)  # raises for an impossible fleet or kill
    _run(every, load, kills, rates, search, as_json, plot)


_Kill = tuple[str, float, float]  # a worker, when, in seconds from the start, and for how many seconds


def _simulation(settings: Settings, load: Load, kills: list[_Kill]) -> Simulation:
    sim = Simulation(settings, load)
    for kill in kills:
        faults.kill(sim, *kill)
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
    good: dict[str, dict[float, Goodput]] = {}
    usage: dict[str, list[tuple[float, float]]] = {}
    with progress_bar() as progress:
        for settings in every:
            name = settings.stack.name

            def run(at: float, done: Callable[[int], None] | None = None, settings: Settings = settings) -> Report:
                sim = _simulation(settings, at_rate(load, at), kills).run(done)
                usage[settings.stack.name] = [
                    (time, mean) for time, _, mean in sim.usage[:: max(1, len(sim.usage) // 400)]
                ]
                return report(sim)

            if search:
                task = progress.add_task(name, total=len(load.arrivals))
                found = good[name] = goodputs(run, rates[0], rates[1])
                reports += {r.rate: r for at_share in found.values() for r in at_share.runs}.values()
                rates_found = ", ".join(f"{at_share.rate:.4g}" for at_share in found.values())
                progress.update(task, description=f"{name}: goodput {rates_found}/s", completed=len(load.arrivals))
                continue
            for at in rates:
                task = progress.add_task(f"{name} at {at:.4g}/s", total=len(load.arrivals))
                reports.append(run(at, lambda finished: progress.update(task, completed=finished)))  # noqa: B023 - at once
    if as_json:
        found_rates = {name: {f"{share:.0%}": at.rate for share, at in found.items()} for name, found in good.items()}
        shown = {"goodput": found_rates, "runs": reports} if search else reports
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n")
    else:
        out = console(220)
        out.print(table(reports, "all rates tried" if search else ""))
        if search:
            at_goodput = [at.at for found in good.values() for at in found.values() if at.at is not None]
            out.print(table(at_goodput, "goodput at " + ", ".join(f"{share:.0%}" for share in SHARES)))
    if plot is not None:
        _plot(plot, load, reports, usage)


def table(reports: list[Report], what: str = "") -> Table:
    """One line per run."""
    title = f"{reports[0].load} on {reports[0].fleet}, {reports[0].profile}" if reports else "no rate is good"
    shown = Table(title=f"{title}: {what}" if what else title)
    columns = ("policy", "rate/s", "attained", "TTFT p50", "p90", "p99", "max", "TPOT p50", "p90", "p99", "max")
    for column in (*columns, "ITL p99", "imbalance", "usage", "preempted", "rejected", "unfinished", "cached"):
        shown.add_column(column, justify="left" if column == "policy" else "right")
    for r in reports:
        ttft = (r.ttft_p50_s, r.ttft_p90_s, r.ttft_p99_s, r.ttft_max_s)
        tpot = (r.tpot_p50_s, r.tpot_p90_s, r.tpot_p99_s, r.tpot_max_s)
        shown.add_row(
            r.policy, f"{r.rate:.4g}", f"{r.attained:.1%}", *(f"{seconds:.2f} s" for seconds in ttft),
            *(f"{seconds * 1e3:.0f} ms" for seconds in tpot), f"{r.itl_p99_s * 1e3:.0f} ms",
            f"{r.imbalance:.2f}", f"{r.usage:.0%}", str(r.preemptions), str(r.rejected), str(r.unfinished),
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


def progress_bar() -> Progress:
    bar = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    shown = console(stderr=True)
    return Progress(*bar, console=shown, transient=True, disable=not shown.is_terminal)


def parse_load(trace: str, requests: int | None, seed: int) -> Load:
    """Raises ConfigError."""
    if requests is not None and not 2 <= requests <= MOST_REQUESTS:
        raise ConfigError(f"--requests: expected 2 to {MOST_REQUESTS}, got {requests}")
    if trace in LOADS:
        return synthetic(trace, requests or 10_000, seed)
    load = read_trace(Path(trace), seed)
    if requests is None:
        return load
    return first(repeated(load, -(-requests // len(load.arrivals))), requests)


def parse_profile(name: str) -> Profile:
    """Raises ConfigError."""
    shipped = {path.stem: path for path in sorted(PROFILES.glob("*.json"))}
    if name in shipped:
        return load_profile(shipped[name])
    if not Path(name).exists():
        raise ConfigError(f"--profile: expected a JSON file or one of {', '.join(shipped)}, got {name!r}")
    return load_profile(Path(name))


def parse_configuration(path: Path | None, sets: list[str] | None, model: str | None) -> Config:
    """The defaults, changed by a file and by `a.b=value`. `model`: which of the file's. Raises ConfigError."""
    if path is not None:
        return load_model(path, sets, model)
    if model is not None:
        raise ConfigError("--model: names a model of a configuration file; name the file with --config")
    return parse_config(overridden({"model": "demo"}, sets or []))


def objectives(served: Config | None, profile: Profile, ttft_s: float | None, tpot_s: float | None) -> SLOConfig:
    """The given objectives, else the configuration's, else the profile's."""
    default = served.slo if served else SLOConfig(ttft_s=profile.ttft_slo_s, tpot_s=profile.tpot_slo_s)
    return SLOConfig(ttft_s=ttft_s or default.ttft_s, tpot_s=tpot_s or default.tpot_s)


def _replicas(served: Config) -> tuple[int, int]:
    return served.workers.prefill.replicas, served.workers.decode.replicas


def parse_fleet(text: str) -> tuple[int, int]:
    """Prefill and decode workers of `8P8D`. Raises ConfigError."""
    prefill, decode = _parts("--fleet", r"(\d+)[pP](\d+)[dD]", "prefill and decode workers as in 8P8D", text)
    return int(prefill), int(decode)


def _racks(text: str | None) -> tuple[int, float]:
    """How many racks, and how many times as long KV takes between them. Raises ConfigError."""
    expected = "a number of racks and a factor of at least 1 as in 2:8"
    count, factor = _parts("--racks", r"([1-9]\d*):([1-9]\d*(?:\.\d+)?)", expected, text or "1:1")
    return int(count), float(factor)


def _kill(text: str) -> _Kill:
    expected = "a worker, a time and a duration as in d0@30:10"
    worker, at, down_s = _parts("--kill", r"(\w+)@(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", expected, text)
    return worker, float(at), float(down_s)


def _parts(option: str, pattern: str, expected: str, text: str) -> tuple[str, ...]:
    """The groups of the pattern. Raises ConfigError."""
    if (match := re.fullmatch(pattern, text)) is None:
        raise ConfigError(f"{option}: expected {expected}, got {text!r}")
    return match.groups()


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
    rates = positive_numbers(values)
    if key != "rate" or not rates:
        raise ConfigError(f"--sweep: expected rate=10,20,40 or rate=goodput, got {sweep!r}")
    return rates, False
