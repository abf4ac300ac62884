"""Profiles from measurements, and real runs compared with simulated ones."""

import asyncio
import itertools
import time
from types import SimpleNamespace

import msgspec
import pytest
from support_openai import Server

from orchestrator.cli.trial.compare import comparison, profile_command
from orchestrator.config.settings import ConfigError
from orchestrator.simulator.engine.profile import PROFILES, load_profile
from orchestrator.simulator.real import calibrate
from orchestrator.simulator.real.calibrate import Measured, fit_profile
from orchestrator.simulator.real.client import MeasureError, Target, Timing
from orchestrator.simulator.real.drive import Prompts, open_loop
from orchestrator.simulator.report import report
from orchestrator.simulator.settings import Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import Arrival, Load

BASE = load_profile(PROFILES / "h100-llama-8b.json")


def test_known_coefficients_are_found_again():
    ttft = [(n, 0.012 + 0.0004 * n + 1e-8 * n * n) for n in (32, 128, 512, 1024, 2048)]
    batches = [(n, 0.01 + 0.002 * n) for n in (1, 2, 4, 8)]
    contexts = [(50, 0.012 + 50e-7), (2050, 0.012 + 2050e-7)]
    profile = fit_profile(Measured(ttft, batches, contexts, (0.0, 0.0)), BASE, "x", "made up")
    assert profile.prefill_s_per_token == pytest.approx(0.0004, rel=0.01)
    assert profile.attention_s == pytest.approx(2e-8, rel=0.02)
    assert profile.decode_s_per_seq == pytest.approx(0.002, rel=0.01)
    assert profile.kv_s_per_token == pytest.approx(1e-7, rel=0.01)
    assert profile.step_s + profile.router_s == pytest.approx(0.012, rel=0.01)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_steps_with_prompts_and_scheduled_steps_are_found_again(ahead):
    step_s, prompt_s, router_s = 0.004, 0.005, 0.002
    ttft = [(n, router_s + step_s + prompt_s + 2e-5 * n) for n in (32, 512, 2048)]
    batches = [(n, step_s) for n in (1, 8)]
    contexts = [(50, step_s), (2050, step_s)]
    mixed_s = step_s + prompt_s + 32 * 2e-5
    beside = (router_s + (0.5 + ahead) * step_s + mixed_s, mixed_s)
    profile = fit_profile(Measured(ttft, batches, contexts, beside), BASE, "x", "made up")
    assert profile.steps_ahead == ahead and profile.prompt_s == pytest.approx(prompt_s)
    assert profile.router_s == pytest.approx(router_s) and profile.step_s == pytest.approx(step_s)
    assert profile.speed.prefill_s == pytest.approx(step_s + prompt_s)
    assert profile.prefill_s_per_token == pytest.approx(2e-5)


def test_what_was_measured_while_all_workers_computed_is_told_apart():
    alone = [(n, 0.012 + 0.0004 * n) for n in (32, 512, 2048)]
    batches = [(n, 1.3 * (0.01 + 0.002 * n)) for n in (1, 2, 4, 8)]
    beside = (1.3 * (0.5 * 0.012 + 0.012 + 32 * 0.0004), 1.3 * (0.012 + 32 * 0.0004))
    measured = Measured(alone, batches, [(50, 0.012), (2050, 0.012)], beside, crowded=(1.02, 0.99, 1.3))
    profile = fit_profile(measured, BASE, "x", "made up")
    assert profile.slowed_beside == (1.02, 1.02, 1.3), "two cores are enough for two workers"
    assert profile.step_s == pytest.approx(0.01) and profile.decode_s_per_seq == pytest.approx(0.002)
    assert profile.prompt_s == pytest.approx(0.0, abs=1e-9) and profile.steps_ahead == 0
    noise = msgspec.structs.replace(measured, crowded=(1.02, 0.99, 1.04))
    assert fit_profile(noise, BASE, "x", "made up").slowed_beside == ()


class Engine:
    """Answers as `Target` does: a step takes 10 ms, one with a prompt 60 ms, and each ends with a token of all."""

    def __init__(self):
        self.asked: list[tuple[list[float], int, asyncio.Event]] = []
        self.mixed_s: list[float] = []  # gaps of running sequences that steps with a prompt made

    async def complete(self, prompt, output_tokens):
        began, stamps, done = time.perf_counter(), [], asyncio.Event()
        self.asked.append((stamps, output_tokens, done))
        await done.wait()
        gaps = [after - before for before, after in itertools.pairwise(stamps)]
        return Timing(len(prompt), output_tokens, stamps[0] - began, 0.0, gaps)

    async def run(self):
        while True:
            running = list(self.asked)
            prompt = any(not stamps for stamps, _, _ in running)
            await asyncio.sleep(0.06 if prompt else 0.01)
            now = time.perf_counter()
            for one in running:
                if prompt and one[0]:
                    self.mixed_s.append(now - one[0][-1])
                one[0].append(now)
                if len(one[0]) == one[1]:
                    self.asked.remove(one)
                    one[2].set()


async def test_a_prompt_is_measured_beside_a_running_sequence():
    engine = Engine()
    steps = asyncio.create_task(engine.run())
    first_s, step_s = await calibrate._beside(engine, [[1] * 32], [2] * 32, 0.2)
    steps.cancel()
    assert [step_s] == pytest.approx(engine.mixed_s), "the gap that ended with the prompt's first token"
    assert first_s >= 0.06


async def test_workers_are_measured_beside_each_other(monkeypatch):
    """Two workers that take 1.5 times as long while both compute."""
    computing = 0

    class Two:
        async def complete(self, prompt, output_tokens):
            nonlocal computing
            computing += 1
            await asyncio.sleep(0)  # until all that were sent together are there
            factor = 1.5 if computing > 1 else 1.0
            await asyncio.sleep(0)
            computing -= 1
            gaps = [0.01 * factor] * (output_tokens - 1)
            return Timing(len(prompt), output_tokens, 1e-4 * len(prompt), 0.0, gaps)

    monkeypatch.setattr(calibrate, "PAUSE_S", 0.0)
    monkeypatch.setattr(calibrate, "MEASURE_S", 0.0)
    measured = await calibrate.measure_profile(Two(), [32, 64], say=lambda line: None, workers=2)
    assert measured.crowded == (pytest.approx(1.5),)
    assert measured.batches == [(batch, pytest.approx(0.015)) for batch in calibrate.BATCHES]
    assert measured.contexts[0][1] == pytest.approx(0.01) and measured.ttft[1][1] == pytest.approx(0.0064)


async def test_workers_that_share_a_core_count_as_often_as_they_are_met(monkeypatch):
    """Four workers, two for each core, which are chosen in turn: of the pairs a third slows each other twice."""
    pairs = itertools.cycle([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
    waiting = []

    class TwoCores:
        async def complete(self, prompt, output_tokens):
            together = asyncio.get_running_loop().create_future()
            waiting.append(together)
            await asyncio.sleep(0)
            if not together.done():  # the first of those that were sent together
                chosen = next(pairs) if len(waiting) == 2 else range(len(waiting))
                busy = [worker % 2 for worker in chosen]
                for core, each in zip(busy, waiting, strict=True):
                    each.set_result(busy.count(core))
                waiting.clear()
            gaps = [0.01 * await together] * (output_tokens - 1)
            return Timing(len(prompt), output_tokens, 1e-4 * len(prompt), 0.0, gaps)

    monkeypatch.setattr(calibrate, "PAUSE_S", 0.0)
    monkeypatch.setattr(calibrate, "MEASURE_S", 0.0)
    measured = await calibrate.measure_profile(TwoCores(), [32, 64], say=lambda line: None, workers=4)
    # Two of three in the same way each time: the median would be 1 or 2.
    assert measured.crowded[0] == pytest.approx(4 / 3, abs=0.1)
    assert measured.crowded[1:] == (pytest.approx(5 / 3), pytest.approx(2.0))


async def test_an_answer_in_one_piece_is_refused(monkeypatch):
    """As from a server whose events a proxy holds back."""

    class Buffered:
        async def complete(self, prompt, output_tokens):
            return Timing(len(prompt), output_tokens, 0.01, 0.0, [])

    monkeypatch.setattr(calibrate, "PAUSE_S", 0.0)
    monkeypatch.setattr(calibrate, "MEASURE_S", 0.0)
    with pytest.raises(MeasureError, match="in one piece"):
        await calibrate.measure_profile(Buffered(), [32, 64], say=lambda line: None)
    with pytest.raises(MeasureError, match="in one piece"):
        await calibrate._beside(Buffered(), [[1] * 32], [2] * 32, 0.0)


def test_steps_too_quick_to_measure_are_no_error():
    """Events that arrive together have no gap between them."""
    profile = fit_profile(
        Measured([(32, 0.01), (64, 0.02)], [(1, 0.0), (8, 0.0)], [(50, 0.0), (90, 0.0)], (0.01, 0.0)),
        BASE,
        "x",
        "made up",
    )
    assert profile.step_s > 0


def test_noise_never_makes_a_coefficient_negative():
    ttft = [(32, 0.05), (512, 0.03), (1024, 0.06)]
    measured = Measured(ttft, [(1, 0.02), (8, 0.015)], [(50, 0.02), (1000, 0.018)], (0.01, 0.001))
    profile = fit_profile(measured, BASE, "x", "made up")
    assert profile.prompt_s == profile.steps_ahead == 0
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
        return [float(len(calls))]

    monkeypatch.setattr(calibrate, "PAUSE_S", 0.0)
    monkeypatch.setattr(calibrate, "MEASURE_S", 0.1)
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(monotonic=lambda: 0.03 * len(calls)))  # 30 ms each
    assert await calibrate._median(measure) == 2.5 and len(calls) == 4
    calls.clear()
    monkeypatch.setattr(calibrate, "MEASURE_S", 0.0)
    assert await calibrate._median(measure, 3) == 2.0 and len(calls) == 3
    calls.clear()
    assert await calibrate._median(measure) == 1.0 and len(calls) == 1
