"""`orchestrator plan`: whether a load should be disaggregated, with which split, and on how many workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from orchestrator.cli.handle import ModelOption, console, option, positive_numbers
from orchestrator.cli.trial.live import live_load, live_profile
from orchestrator.cli.trial.simulate import objectives, parse_configuration, parse_load, parse_profile, progress_bar
from orchestrator.config.settings import ConfigError
from orchestrator.simulator.loads import LOADS
from orchestrator.simulator.plan import FIXED, FleetOption, Outcome, Question, best, fewest, fleet_options, outcome
from orchestrator.simulator.plot import line_chart
from orchestrator.simulator.report import SHARES

app = typer.Typer()


@app.command("plan")
def plan_command(
    workers: Annotated[int, option("--workers", "Workers of both roles together.", min=1, max=512)],
    trace: Annotated[
        str | None, option("--trace", f"A Mooncake .jsonl or Azure .csv file, or one of {', '.join(LOADS)}.")
    ] = None,
    profile: Annotated[str | None, option("--profile", "A worker's timing: a shipped name or a JSON file.")] = None,
    live: Annotated[str | None, option("--live", "URL of a running fleet: its timing and latest requests.")] = None,
    config: Annotated[Path | None, option("--config", "A configuration file; default: the defaults.")] = None,
    model: ModelOption = None,
    ttft_s: Annotated[float | None, option("--ttft", "TTFT objective, seconds.", min=0.001)] = None,
    tpot_s: Annotated[float | None, option("--tpot", "TPOT objective, seconds.", min=0.001)] = None,
    rate: Annotated[
        str | None, option("--rate", "Requests per second, or goodput for the highest. Default: the load's.")
    ] = None,
    requests: Annotated[int | None, option("--requests", "Cut or repeat the load to this many requests.")] = None,
    plot: Annotated[Path, option("--plot", "PNG file for the picture.")] = Path("plan.png"),
    seed: Annotated[int, typer.Option("--seed")] = 0,
    as_json: Annotated[bool, option("--json", "JSON instead of a table.")] = False,
) -> None:
    """Simulate every prefill/decode split of N workers and say which serves a load. Adds other projects' policies."""
    if live is None and (trace is None or profile is None):
        raise ConfigError("plan: expected --trace and --profile, or --live for those of a running fleet")
    load = parse_load(trace, requests, seed) if trace is not None else live_load(live or "")
    worker = parse_profile(profile) if profile is not None else live_profile(live or "")
    served = parse_configuration(config, None, model)
    slo = objectives(served if config else None, worker, ttft_s, tpot_s)
    asked = _rate(rate, load.rate)
    question = Question(load, worker, slo, served, seed)
    outcomes, sentence = _simulate(question, workers, asked)
    if as_json:
        found = [{"way": str(o.option), "score": o.score, "at": o.at, "goodput": _rates(o)} for o in outcomes]
        sys.stdout.write(msgspec.json.encode({"ways": found, "answer": sentence}).decode() + "\n")
    else:
        console(160).print(_table(outcomes, question, asked))
        typer.echo(sentence)
    _draw(plot, outcomes, question, asked, quiet=as_json)


def _rate(text: str | None, own: float) -> float | None:
    """Requests per second; None for `goodput`. Raises ConfigError."""
    if text == "goodput":
        return None
    found = [own] if text is None else positive_numbers(text)
    if len(found) != 1:
        raise ConfigError(f"--rate: expected more than 0 requests per second, or goodput, got {text!r}")
    return found[0]


def _simulate(question: Question, workers: int, rate: float | None) -> tuple[list[Outcome], str]:
    with progress_bar() as progress:
        tried = fleet_options(workers)
        task = progress.add_task(f"{len(tried)} ways", total=len(tried))
        outcomes = []
        for option in tried:
            progress.update(task, description=str(option))
            outcomes.append(outcome(question, option, rate))
            progress.advance(task)
        chosen = best(outcomes)
        if rate is None:
            return outcomes, _goodput_sentence(chosen, outcomes)
        size = progress.add_task("how many workers", total=None)

        def fewest_workers(prefill_share: float, most: int) -> FleetOption | None:
            return fewest(question, rate, SHARES[0], most, prefill_share, lambda: progress.advance(size))

        fixed = best([found for found in outcomes if found.option.policy == FIXED])
        apart, together = fewest_workers(fixed.option.prefill / workers, workers), fewest_workers(0.0, 2 * workers)
    return outcomes, _size_sentence(rate, workers, apart, together)


def _goodput_sentence(chosen: Outcome, outcomes: list[Outcome]) -> str:
    together = next(found for found in outcomes if found.option.prefill == 0 and found.option.policy == FIXED)
    if together.score <= 0:
        return f"{chosen.option} bears {chosen.score:.3g} requests/s; aggregated bears none within the objectives."
    gain = chosen.score / together.score
    worth = "disaggregation pays" if gain >= 1.05 else "disaggregation does not pay"
    return (
        f"{chosen.option} bears {chosen.score:.3g} requests/s, aggregated {together.score:.3g}: {worth} ({gain:.2f}x)."
    )


def _size_sentence(rate: float, workers: int, apart: FleetOption | None, together: FleetOption | None) -> str:
    aggregated = (
        "aggregated needs more than twice as many" if together is None else f"aggregated needs {together.decode}"
    )
    if apart is None:
        if together is None or together.decode > workers:
            return f"{workers} workers do not serve {rate:.3g} requests/s within the objectives; {aggregated}."
        return f"{_all_together(together.decode)} {rate:.3g} requests/s."
    if together is not None and together.decode <= apart.prefill + apart.decode:
        return f"{_all_together(together.decode)} your load; disaggregation does not pay."
    return f"{apart.prefill + apart.decode} workers as {apart.prefill}P{apart.decode}D serve your load; {aggregated}."


def _all_together(workers: int) -> str:
    return "1 worker serves" if workers == 1 else f"{workers} workers, all aggregated, serve"


def _rates(found: Outcome) -> dict[str, float]:
    return {f"{share:.0%}": at.rate for share, at in found.goodput.items()}


def _table(outcomes: list[Outcome], question: Question, rate: float | None) -> Table:
    slo, name = question.slo, question.load.name
    what = "goodput" if rate is None else f"{rate:.4g} requests/s"
    shown = Table(title=f"{name}, {question.profile.name}: {what}; TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s * 1e3:g} ms")
    columns = [f"goodput {share:.0%}" for share in SHARES] if rate is None else ["attained"]
    for column in ("way", *columns, "TTFT P50", "P99", "max", "TPOT P50", "P99", "cached"):
        shown.add_column(column, justify="left" if column == "way" else "right")
    chosen = best(outcomes).option
    for found in outcomes:
        at = found.at or found.goodput[SHARES[0]].at
        figures = [f"{x:.4g}/s" for x in _rates(found).values()] or [f"{found.score:.1%}"]
        if at is not None:
            figures += [f"{s:.2f} s" for s in (at.ttft_p50_s, at.ttft_p99_s, at.ttft_max_s)]
            figures += [f"{s * 1e3:.0f} ms" for s in (at.tpot_p50_s, at.tpot_p99_s)] + [f"{at.prefix_hit:.0%}"]
        shown.add_row(str(found.option), *figures, style="bold" if found.option == chosen else "")
    return shown


def _draw(path: Path, outcomes: list[Outcome], question: Question, rate: float | None, quiet: bool) -> None:
    fixed = [(found.option.prefill, found.score) for found in outcomes if found.option.policy == FIXED]
    last = max(prefill for prefill, _ in fixed)
    lines: dict[str, list[tuple[float, float]]] = {"fixed split": [(float(x), y) for x, y in fixed]}
    for found in outcomes:
        if found.option.policy != FIXED:
            lines[str(found.option)] = [(0.0, found.score), (float(max(1, last)), found.score)]
    y_name = "requests per second that 90% attain" if rate is None else "share of requests within both objectives"
    try:
        line_chart(path, f"{question.load.name}, {question.profile.name}", "prefill workers", y_name, lines)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        return
    if not quiet:
        typer.echo(f"picture: {path}")
