"""`orchestrator bench`: sends load to one server, or to two in turns, and reports latencies and goodput."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from orchestrator.cli.handle import OUT, check_writable, console, option, positive_numbers
from orchestrator.cli.look.views import plain_table
from orchestrator.cli.trial.simulate import parse_load
from orchestrator.config.settings import ConfigError
from orchestrator.simulator.real.client import Target
from orchestrator.simulator.real.drive import Prompts, Run, Sent, closed_loop, open_loop
from orchestrator.simulator.real.figures import Figures, Ratio, figures, ratios
from orchestrator.simulator.real.page import page, ratio_rows
from orchestrator.simulator.trace import Load, at_rate, first, scaled, steady

app = typer.Typer()
API_KEY = "OPENAI_API_KEY"
_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 4, 64


@app.command("bench")
def bench_command(
    url: Annotated[str, typer.Argument(help="The server, as `orchestrator up` prints it.")],
    load: Annotated[str | None, option("--load", "A trace, or bursty, heavy_tailed, code, chat or agents.")] = None,
    prompt_tokens: Annotated[int, option("--prompt-tokens", "Tokens per prompt, without --load.", min=1)] = 512,
    output_tokens: Annotated[int, option("--output-tokens", "Tokens per answer, without --load.", min=1)] = 128,
    rates: Annotated[
        str | None, option("--rate", "Requests per second; 2,4,8 makes three runs. Default: --users.")
    ] = None,
    users: Annotated[int, option("--users", "Clients; each sends its next request after an answer.", min=1)] = 8,
    requests: Annotated[int, option("--requests", "Requests per run.", min=2)] = 200,
    scale: Annotated[float, option("--scale-tokens", "Factor on the token counts of --load.")] = 1.0,
    ttft_s: Annotated[float, option("--ttft", "TTFT objective, seconds.")] = 2.0,
    tpot_s: Annotated[float, option("--tpot", "TPOT objective, seconds.")] = 0.1,
    against: Annotated[str | None, option("--against", "URL of a second server to compare with.")] = None,
    turns: Annotated[int, option("--turns", "Runs per server, with --against.", min=1)] = 3,
    json_file: Annotated[Path | None, option("--json", "File for all figures.")] = None,
    html_file: Annotated[Path | None, option("--html", "File for a page with curves.")] = None,
    seed: Annotated[int | None, option("--seed", "Seed of the prompts; a server may cache them.", min=0)] = None,
) -> None:
    if scale <= 0 or ttft_s <= 0 or tpot_s <= 0:
        raise ConfigError("--scale-tokens, --ttft, --tpot: expected more than 0")
    check_writable(json_file, html_file)
    servers = [url] if against is None else [url, against]
    if load is None:
        sent = steady(requests, prompt_tokens, output_tokens)
    else:
        sent = first(scaled(parse_load(load, requests, seed or 0), scale), requests)
    asked = parse_rates(rates)
    first_seed = int.from_bytes(os.urandom(2)) if seed is None else seed
    steps: list[float | None] = [*asked] or [None]
    steps *= 1 if against is None else turns
    runs, stopped = _all(sent, users, first_seed, servers, steps)
    found = [(run, figures(run, ttft_s, tpot_s)) for run in runs]
    seen = [figure for _, figure in found]
    compared = ratios(seen[::2], seen[1::2]) if against is not None else []
    rows = _rows(seen)
    _show(rows, compared, seen)
    if json_file is not None:
        saved: dict[str, Any] = {"objectives": {"ttft_s": ttft_s, "tpot_s": tpot_s}, "runs": seen, "ratios": compared}
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n")
    if html_file is not None:
        html_file.write_text(page(f"{sent.name}: {' and '.join(servers)}", rows, found, compared), "utf-8")
    if stopped:
        raise ConfigError(f"stopped after {len(runs)} of {len(steps) * len(servers)} runs: {stopped}")
    if all(figure.errors == figure.requests for figure in seen):
        raise ConfigError(f"no request was answered: {next(iter(seen[0].reasons), 'no reason was given')}")


def _all(
    load: Load, users: int, seed: int, servers: Sequence[str], rates: Sequence[float | None]
) -> tuple[list[Run], str]:
    """Run the load on each server at each rate, each time with prompts of its own: what one run has sent, no server
    answers from its cache. Returns the runs, and why they ended early, or "": a server that dies after an hour does not
    take with it what was measured. Raises ConfigError if nothing was."""
    asyncio.run(_reach(servers))
    runs: list[Run] = []
    seeds = itertools.count(seed + 1)
    for rate in rates:
        try:
            runs += [asyncio.run(_run(server, load, users, rate, Prompts(seed=next(seeds)))) for server in servers]
        except ConfigError as error:
            if not runs:
                raise
            return runs, str(error)
    return runs, ""


async def _reach(servers: Sequence[str]) -> None:
    """Ask each server once, before the first has been sent load for minutes. Raises MeasureError."""
    for server in servers:
        async with Target(server, api_key=os.environ.get(API_KEY, "")):
            pass


async def _run(server: str, load: Load, users: int, rate: float | None, prompts: Prompts) -> Run:
    async with Target(server, api_key=os.environ.get(API_KEY, "")) as target:
        # Connects, and has the server compile and allocate what its first requests take.
        warm = [prompts.make(_WARM_UP_TOKENS, own=1_000_000 + n) for n in range(_WARM_UP_REQUESTS)]
        await asyncio.gather(*(target.complete(prompt, 4) for prompt in warm))
        if rate is None:
            return await _run_with_progress(load, server, lambda done: closed_loop(target, load, users, prompts, done))
        faster = at_rate(load, rate)
        return await _run_with_progress(faster, server, lambda done: open_loop(target, faster, prompts, done))


async def _run_with_progress(load: Load, server: str, run: Callable[[Callable[[Sent], None]], Awaitable[Run]]) -> Run:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[now]}", markup=False), console=console(stderr=True)) as progress:
        task = progress.add_task(server, total=len(load.arrivals), now="")
        errors = 0

        def done(sent: Sent) -> None:
            nonlocal errors
            errors += sent.timing is None
            speed = progress.tasks[task].speed or 0.0
            last = f"TTFT {_time(sent.timing.ttft_s)}" if sent.timing is not None else sent.error[:60]
            progress.update(task, advance=1, now=f"{speed:.1f}/s, {last}" + (f", {errors} errors" if errors else ""))

        return await run(done)


def parse_rates(text: str | None) -> list[float]:
    if text is None:
        return []
    if not (found := positive_numbers(text)):
        raise ConfigError(f"--rate: expected numbers above 0 as in 2,4,8, got {text!r}")
    return found


def _rows(seen: Sequence[Figures]) -> list[list[str]]:
    """Names, then a row for each run."""
    names = ["server", "load", "asked", "requests/s", "errors", "goodput/s", "attained", "tokens/s", "cached"]
    names += ["TTFT P50", "TTFT P90", "TTFT P99", "TTFT max", "TPOT P50", "TPOT P90", "TPOT P99", "ITL P99"]
    names += ["client CPU per request"]
    rows = [names]
    for f in seen:
        asked = f"{f.rate:.3g}/s" if f.rate is not None else f"{f.users} users"
        row = [f.url, f.load, asked, f"{f.requests_per_s:.2f}", str(f.errors), f"{f.goodput:.2f}", f"{f.attained:.1%}"]
        row += [f"{f.output_tokens_per_s:.0f}", f"{f.cached:.0%}"]
        row += [_time(value) for value in (f.ttft.p50, f.ttft.p90, f.ttft.p99, f.ttft.max)]
        row += [_time(value) for value in (f.tpot.p50, f.tpot.p90, f.tpot.p99, f.itl.p99)]
        rows.append([*row, f"{f.client_cpu_ms:.2f} ms"])
    return rows


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"  # no request was answered
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _show(rows: list[list[str]], compared: list[Ratio], seen: Sequence[Figures]) -> None:
    """A column for each run: many figures, few runs."""
    servers, *lines = zip(*rows, strict=True)
    OUT.print(plain_table(servers, lines))
    if compared:
        names, *ratios_shown = ratio_rows(compared)
        OUT.print("\nfirst server over second", plain_table(names, ratios_shown), sep="\n")
    for f in seen:
        for reason, count in f.reasons.items():
            OUT.print(f"{count} errors: {reason}", style="yellow", highlight=False)
        if f.client_was_the_bottleneck:
            busy = f"{f.client_busy:.0%} of a core, {f.client_late_s:.2f} s late"
            OUT.print(
                f"{f.url}: the client was the bottleneck ({busy}): its times are not the server's", style="yellow"
            )
