"""From observations of a fleet to load samples."""

import msgspec
import pytest

from orchestrator.policy.predict import Predictor
from orchestrator.policy.ratio import MEAN_PROMPT_TOKENS, LoadSampler, Observation, offered_since
from orchestrator.types import Offered

FIRST = Observation(
    at=100.0,
    offered=Offered(50, 9000, 900.0),
    queued_prefill_tokens=700,
    holding=4,
    waiting=0,
    held_tokens=4000,
    worker_tokens=100_000,
    worker_sequences=64,
)


def later(seconds=10.0, requests=10, tokens=20_000, output=1500.0, **changes):
    offered = FIRST.offered + Offered(requests, tokens, output)
    return msgspec.structs.replace(FIRST, at=FIRST.at + seconds, offered=offered, **changes)


def test_a_sample_is_what_came_between_two_observations():
    sampler = LoadSampler(tpot_slo_s=0.1, prior_step_s=0.02)
    assert sampler.sample(FIRST, Predictor(0.0005)) is None
    sample = sampler.sample(later(), Predictor(0.0005))
    assert (sample.at, sample.period_s) == (110.0, 10.0)
    assert (sample.offered_requests, sample.offered_prefill_tokens, sample.offered_output_tokens) == (10, 20_000, 1500)
    assert sample.queued_prefill_tokens == 700
    assert sample.prefill_s_per_token == pytest.approx(0.0005)


def test_a_clock_that_was_set_back_gives_no_sample():
    sampler = LoadSampler(0.1)
    sampler.sample(FIRST, Predictor())
    assert sampler.sample(later(seconds=-5.0), Predictor()) is None
    assert sampler.sample(later(seconds=5.0), Predictor()).period_s == 10.0


@pytest.mark.parametrize(
    ("changes", "concurrency"),
    [
        ({}, 64),  # its batch
        ({"worker_tokens": 40_000}, 32),  # its memory, a fifth of it kept free, at 1000 tokens each
        ({"worker_sequences": 7}, 7),
    ],
)
def test_a_worker_is_full_by_its_batch_or_its_memory(changes, concurrency):
    sampler = LoadSampler(0.1, prior_step_s=0.02)
    sampler.sample(FIRST, Predictor())
    sample = sampler.sample(later(waiting=60, **changes), Predictor())
    assert sample.filled_decode_workers == pytest.approx(64 / concurrency)
    assert sample.decode_tokens_per_s == pytest.approx(concurrency / 0.02)


def test_a_worker_is_full_when_its_steps_reach_the_objective():
    sampler = LoadSampler(tpot_slo_s=0.05)
    for sequences in range(1, 40):
        sampler.observe_step(sequences, 0.01 + 0.002 * sequences)
    sampler.observe_step(0, 9.0)  # no step at all
    sampler.sample(FIRST, Predictor())
    sample = sampler.sample(later(holding=40, held_tokens=40_000), Predictor())
    assert sample.filled_decode_workers == pytest.approx(2.0, rel=0.01)
    assert sample.decode_tokens_per_s == pytest.approx(20 / 0.05, rel=0.01)


def test_an_idle_fleet_is_sampled_too():
    sampler = LoadSampler(0.1, prior_step_s=0.02)
    idle = msgspec.structs.replace(FIRST, holding=0, held_tokens=0)
    sampler.sample(idle, Predictor(0.001))
    sample = sampler.sample(msgspec.structs.replace(idle, at=101.0), Predictor(0.001))
    assert sample.offered_requests == 0 and sample.filled_decode_workers == 0
    assert sample.prefill_s_per_token == pytest.approx(0.001), f"of a prompt of {MEAN_PROMPT_TOKENS} tokens"


def test_offered_load_is_summed_over_frontends_that_come_and_go():
    before = {"a": Offered(5, 500, 50.0), "gone": Offered(7, 700, 70.0)}
    now = {"a": Offered(8, 900, 80.0), "new": Offered(1, 10, 1.0)}
    assert offered_since(before, now) == Offered(4, 410, 31.0)
