"""`orchestrator profile` measures a worker's profile from a running server; `orchestrator compare` runs one load for
real and in the simulator, and saves both side by side.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from orchestrator.cli.handle import ModelOption, check_writable, find_fleet, option
from orchestrator.cli.look.frontend import get
from orchestrator.cli.trial.bench import API_KEY
from orchestrator.cli.trial.live import with_engines_of
from orchestrator.cli.trial.simulate import objectives, parse_configuration, parse_fleet, parse_load, parse_profile
from orchestrator.config.access import OPERATOR_KEY
from orchestrator.config.settings import ConfigError
from orchestrator.simulator.engine.profile import PROFILES, Profile, load_profile
from orchestrator.simulator.real.calibrate import Measured, fit_profile, measure_profile
from orchestrator.simulator.real.client import MeasureError, Target, Timing
from orchestrator.simulator.real.drive import Prompts, open_loop
from orchestrator.simulator.report import Report, percentile, report
from orchestrator.simulator.settings import Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import Load, at_rate, scaled

UrlOption = Annotated[str, option("--url", "The server, as `orchestrator up` prints it.")]
app = typer.Typer()


@app.command("profile")
def profile_command(
    url: UrlOption,
    out: Annotated[Path, option("--out", "The JSON file to write.")],
    name: Annotated[str, option("--name", "Name of the profile.")] = "measured",
    lengths: Annotated[str, option("--lengths", "Prompt lengths to measure.")] = "32,128,256,512,1024",
) -> None:
    """Measure a worker's timing on a running server, for the simulator. Its workers need to be aggregated."""
    check_writable(out)
    try:
        sizes = sorted({int(length) for length in lengths.split(",")})
    except ValueError:
        raise ConfigError(f"--lengths: expected numbers as in 32,256,1024, got {lengths!r}") from None
    if len(sizes) < 2 or sizes[0] < 1:
        raise ConfigError(f"--lengths: expected at least two different lengths of 1 or more, got {lengths!r}")

    async def measure() -> tuple[Measured, Profile | None, str]:
        async with Target(url, api_key=os.environ.get(API_KEY, "")) as target:
            handle = find_fleet(None, None, url)
            fleet = await get(handle, handle.url or url, "/fleet") or {}
            engines = with_engines_of(url, fleet, default)
            workers = fleet.get("workers", ())
            decode = sum(worker["role"] == "decode" and worker["state"] == "ready" for worker in workers)
            return await measure_profile(target, sizes, typer.echo, max(1, decode)), engines, target.model

    default = load_profile(PROFILES / "h100-llama-8b.json")
    measured, engines, model = asyncio.run(measure())
    if engines is None:
        said = f"{url} does not tell what its engines have: memory, limits and link are those of {default.name}"
        typer.echo(f"{said}; change them in the file, or set {OPERATOR_KEY} for a fleet that asks for it", err=True)
    base = engines or msgspec.structs.replace(default, origin=f"memory, limits and link are those of {default.name}")
    origin = f"Measured by `orchestrator profile`: {model} on {platform.machine()} {platform.system()}; {base.origin}."
    fitted = fit_profile(measured, base, name, origin)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(fitted), indent=2) + b"\n")
    told = f"{fitted.step_s * 1e3:.2f} ms a step, {fitted.prefill_s_per_token * 1e6:.1f} us a token; {base.origin}"
    typer.echo(f"wrote {out}: {told}")


@app.command("compare")
def compare_command(
    url: UrlOption,
    trace: Annotated[str, option("--trace", "A trace file, or the name of a synthetic load.")],
    profile: Annotated[str, option("--profile", "A shipped name or a JSON file.")],
    rate: Annotated[float, option("--rate", "Requests per second.")],
    out: Annotated[Path, option("--out", "The JSON file to write.")],
    fleet: Annotated[str, option("--fleet", "The server's workers, as 1P1D.")] = "1P1D",
    config: Annotated[
        Path | None, option("--config", "The server's configuration file; default: the defaults.")
    ] = None,
    sets: Annotated[list[str] | None, option("--set", "Override a key, as on the server.")] = None,
    model: ModelOption = None,
    seconds: Annotated[float, option("--seconds", "Seconds of the load to run.")] = 600.0,
    scale: Annotated[float, option("--scale-tokens", "Factor on the lengths of prompts and outputs.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Run part of a load on a real fleet and in the simulator, and compare. Shows P50, P90 and P99."""
    if seconds <= 0 or rate <= 0 or scale <= 0:
        raise ConfigError("--seconds, --rate, --scale-tokens: expected more than 0")
    check_writable(out)
    load = at_rate(scaled(parse_load(trace, max(2, int(seconds * rate)), seed), scale), rate)
    prefill, decode = parse_fleet(fleet)
    worker, served = parse_profile(profile), parse_configuration(config, sets, model)
    settings = Settings(
        prefill=prefill,
        decode=decode,
        profile=worker,
        stack=stack("ours", served),
        seed=seed,
        slo=objectives(served if config else None, worker, None, None),
    )
    predicted = report(Simulation(settings, load).run())
    timings = asyncio.run(_replay(url, load))
    result = comparison(predicted, timings)
    out.write_text(json.dumps(result, indent=1) + "\n")
    for metric, row in result["figures"].items():
        typer.echo(
            f"{metric:12s} real {row['real']:.4f} s, simulated {row['simulated']:.4f} s, error {row['error']:+.1%}"
        )
    typer.echo(f"wrote {out}; {result['failed']} of {result['requests']} real requests failed")


async def _replay(url: str, load: Load) -> list[Timing | None]:
    async with Target(url, api_key=os.environ.get(API_KEY, "")) as target:
        run = await open_loop(target, load, Prompts())
        return [sent.timing for sent in run.sent]


def comparison(predicted: Report, timings: list[Timing | None]) -> dict[str, Any]:
    """Real and simulated P50, P90 and P99 of TTFT, of the gaps between tokens (ITL), and of each request's mean gap
    (TPOT), all in seconds, with the simulation's relative error."""
    answered = [timing for timing in timings if timing is not None]
    if not answered:
        raise MeasureError("no real request was answered; is the fleet up, and its model's context long enough?")
    ttft = sorted(timing.ttft_s for timing in answered)
    itl = sorted(gap for timing in answered for gap in timing.gaps_s)
    tpot = sorted(timing.tpot_s for timing in answered if timing.output_tokens > 1)
    figures = {}
    for metric, real in {"ttft": ttft, "itl": itl, "tpot": tpot}.items():
        for percent in (50, 90, 99):
            name, measured = f"{metric}_p{percent}", percentile(real, percent / 100)
            simulated = getattr(predicted, f"{name}_s")
            error = simulated / measured - 1 if measured else 0.0
            figures[name] = {"real": measured, "simulated": simulated, "error": error}
    return {
        "load": predicted.load,
        "rate": predicted.rate,
        "fleet": predicted.fleet,
        "profile": predicted.profile,
        "policy": predicted.policy,
        "requests": len(timings),
        "failed": len(timings) - len(answered),
        "mean_prompt_tokens": statistics.mean(timing.prompt_tokens for timing in answered),
        "figures": figures,
    }
