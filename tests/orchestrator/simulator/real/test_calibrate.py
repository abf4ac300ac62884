"""Profiles from measurements, and real runs compared with simulated ones."""

import asyncio

import pytest
from support_openai import Server

from orchestrator.cli.trial.compare import comparison, profile_command
from orchestrator.config.settings import ConfigError
from orchestrator.simulator.profile import PROFILES, load_profile
from orchestrator.simulator.real import calibrate
from orchestrator.simulator.real.calibrate import Measured, fit_profile
from orchestrator.simulator.real.client import MeasureError, Target
from orchestrator.simulator.real.drive import open_loop
from orchestrator.simulator.real.prompts import Prompts
from orchestrator.simulator.report import report
from orchestrator.simulator.settings import Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import Arrival, Load

BASE = load_profile(PROFILES / "h100-llama-8b.json")


def test_known_coefficients_are_found_again():
    ttft = [(n, 0.012 + 0.0004 * n + 1e-8 * n * n) for n in (32, 128, 512, 1024, 2048)]
    batches = [(n, 0.01 + 0.002 * n) for n in (1, 2, 4, 8)]
    contexts = [(50, 0.012 + 50e-7), (2050, 0.012 + 2050e-7)]
    profile = fit_profile(Measured(ttft, batches, contexts), BASE, "x", "made up")
    assert profile.prefill_s_per_token == pytest.approx(0.0004, rel=0.01)
    assert profile.attention_s == pytest.approx(2e-8, rel=0.02)
    assert profile.decode_s_per_seq == pytest.approx(0.002, rel=0.01)
    assert profile.kv_s_per_token == pytest.approx(1e-7, rel=0.01)
    assert profile.step_s + profile.router_s == pytest.approx(0.012, rel=0.01)


def test_noise_never_makes_a_coefficient_negative():
    measured = Measured([(32, 0.05), (512, 0.03), (1024, 0.06)], [(1, 0.02), (8, 0.015)], [(50, 0.02), (1000, 0.018)])
    profile = fit_profile(measured, BASE, "x", "made up")
    assert min(profile.attention_s, profile.decode_s_per_seq, profile.kv_s_per_token, profile.router_s) >= 0
    assert profile.prefill_s_per_token > 0 and profile.step_s > 0


async def test_replayed_load_is_compared_with_simulation():
    load = Load("tiny", [Arrival(i / 50, 600, 5, (i % 2,)) for i in range(10)], unit_tokens=512)
    async with Server() as server, Target(server.url) as target:
        run = await open_loop(target, load, Prompts())
    timings = [sent.timing for sent in run.sent]
    assert [timing and timing.output_tokens for timing in timings] == [5] * 10
    predicted = report(Simulation(Settings(prefill=1, decode=1, profile=BASE, stack=stack("ours")), load).run())
    result = comparison(predicted, [*timings, None])
    assert result["failed"] == 1 and result["requests"] == 11
    shares = ("p50", "p90", "p99")
    assert set(result["figures"]) == {f"{name}_{share}" for name in ("ttft", "itl", "tpot") for share in shares}
    for name, figure in result["figures"].items():
        assert figure["simulated"] == getattr(predicted, f"{name}_s")
        assert (1 + figure["error"]) * figure["real"] == pytest.approx(figure["simulated"] if figure["real"] else 0.0)
    with pytest.raises(MeasureError, match="no real request"):
        comparison(predicted, [None])


@pytest.mark.parametrize("lengths", ["a,b", "100", "0,5"])
def test_bad_lengths_are_refused(lengths, tmp_path):
    with pytest.raises(ConfigError, match="--lengths"):
        profile_command("http://127.0.0.1:9", tmp_path / "out.json", lengths=lengths)


async def test_quick_measurements_are_repeated_and_slow_ones_are_not(monkeypatch):
    calls: list[float] = []

    async def measure() -> list[float]:
        calls.append(0.0)
        await asyncio.sleep(0.001)
        return [float(len(calls))]

    monkeypatch.setattr(calibrate, "MEASURE_S", 0.1)
    assert await calibrate._median(measure) == (len(calls) + 1) / 2 and len(calls) > 3
    calls.clear()
    monkeypatch.setattr(calibrate, "MEASURE_S", 0.0)
    assert await calibrate._median(measure, 3) == 2.0 and len(calls) == 3
    calls.clear()
    assert await calibrate._median(measure) == 1.0 and len(calls) == 1
