"""From observations of a fleet to load samples."""

import msgspec
import pytest

from orchestrator.policy.predict.predictor import Predictor
from orchestrator.policy.ratio.load import LoadSampler, Observation, offered_since, residence_s, traffic
from orchestrator.types import EngineSpeed, Offered

FIRST = Observation(
    at=100.0,
    offered=Offered(50, 9000, 900.0, prefill_tokens2=1.0e6),
    holding=4,
    waiting=2,
    held_tokens=4000,
    worker_tokens=100_000,
    worker_sequences=64,
)


def later(seconds=10.0, **changes):
    offered = FIRST.offered + Offered(10, 20_000, 1500.0, prefill_tokens2=4.0e7)
    return msgspec.structs.replace(FIRST, at=FIRST.at + seconds, offered=offered, **changes)


def test_sample_is_difference_of_two_observations():
    sampler = LoadSampler()
    assert sampler.sample(FIRST, Predictor(0.0005)) is None
    sample = sampler.sample(later(), Predictor(0.0005))
    assert (sample.at, sample.period_s, sample.sequences) == (110.0, 10.0, 6)
    assert sample.offered == Offered(10, 20_000, 1500.0, prefill_tokens2=4.0e7)
    assert sample.prefill_s_per_token == pytest.approx(0.0005)


def test_answers_that_prefill_workers_still_decode_have_not_ended():
    """Half of the sequences are on a worker that changes its role, and the answers are as long as before."""
    sampler, enough = LoadSampler(), Offered(100, 20_000, 1500.0, generated_tokens=10_000)
    sampler.sample(FIRST, Predictor(0.0005))
    window = [
        sampler.sample(later(seconds, holding=holding, waiting=0, former=former), Predictor(0.0005))
        for seconds, holding, former in ((10.0, 60, 0), (20.0, 20, 40))
    ]
    window = [msgspec.structs.replace(sample, offered=enough) for sample in window]
    arriving = traffic(window)
    assert arriving.output_tokens == pytest.approx(100)
    assert residence_s(window, arriving) == pytest.approx(60 / arriving.requests_per_s)


def test_prefill_times_never_spread_less_than_equal_ones():
    sampler, patient = LoadSampler(), Offered(100, 200_000, 1500.0, prefill_tokens2=1.0)
    sampler.sample(FIRST, Predictor(0.0005))
    now = msgspec.structs.replace(FIRST, at=FIRST.at + 10, offered=FIRST.offered + patient)
    arriving = traffic([sampler.sample(now, Predictor(0.0005))])
    assert arriving.prefill_s2 == pytest.approx(arriving.prefill_s**2)


def test_link_is_told_in_seconds_of_prefill():
    """A link that carries a token's KV in a tenth of the time in which it is computed; unknown before the first KV."""
    sampler, enough = LoadSampler(), Offered(100, 20_000, 1500.0)
    sampler.sample(FIRST, Predictor(0.0005))
    window = [
        sampler.sample(later(seconds, link_s_per_token=known), Predictor(0.0005))
        for seconds, known in ((10.0, 0.0), (20.0, 5e-5))
    ]
    window = [msgspec.structs.replace(sample, offered=enough) for sample in window]
    assert traffic(window[:1]).link_share == 0
    assert traffic(window).link_share == pytest.approx(0.1)


def test_a_clock_that_was_set_back_gives_no_sample():
    sampler = LoadSampler()
    sampler.sample(FIRST, Predictor())
    assert sampler.sample(later(seconds=-5.0), Predictor()) is None
    assert sampler.sample(later(seconds=5.0), Predictor()).period_s == 10.0


@pytest.mark.parametrize(
    ("changes", "sequences", "by_memory"),
    [
        ({}, 64, 80),  # its batch
        ({"worker_tokens": 40_000}, 32, 32),  # its memory, a fifth of it kept free, at 1000 tokens each
        ({"worker_sequences": 7}, 7, 80),
    ],
)
def test_a_worker_is_full_by_its_batch_or_its_memory(changes, sequences, by_memory):
    sampler = LoadSampler()
    sampler.sample(FIRST, Predictor())
    sample = sampler.sample(later(**changes), Predictor())
    assert (sample.max_sequences, sample.memory_sequences) == pytest.approx((sequences, by_memory))


def test_a_host_tier_makes_a_worker_cache_more_and_batch_no_more():
    sampler = LoadSampler()
    sampler.sample(FIRST, Predictor())
    samples = [
        sampler.sample(later(10.0 * n, host_tokens=size), Predictor()) for n, size in ((1, 0), (2, 10), (3, 10**6))
    ]
    assert [sample.worker_tokens for sample in samples] == [100_000, 100_000, 10**6]
    assert len({sample.max_sequences for sample in samples}) == 1


def test_step_time_before_any_measurement_is_itl_of_workers_that_decode_now():
    """A worker that went to prefill keeps the ITL of the time when more workers shared its sequences."""
    sampler, predictor = LoadSampler(), Predictor()
    for worker_id, itl_s in (("d0", 0.03), ("d1", 0.05), ("prefills-now", 0.01)):
        predictor.observe_itl(worker_id, itl_s)
    sampler.sample(FIRST, predictor)
    sample = sampler.sample(later(decode_workers=("d0", "d1", "new")), predictor)
    assert sample.step == (pytest.approx(0.04), 0.0)


def test_step_times_are_learned_from_engine_measurement_on():
    sampler, predictor = LoadSampler(), Predictor(prior_itl_s=0.03)
    sampler.sample(FIRST, predictor)
    assert sampler.sample(later(1.0), predictor).step == (0.03, 0.0), "nothing is known"
    for sequences in [*range(1, 40)] * 40:
        sampler.observe_step(sequences, 0.01 + 0.002 * sequences)
    sampler.observe_step(0, 9.0)  # no step at all
    assert sampler.sample(later(2.0), predictor).step == (pytest.approx(0.01, rel=0.02), pytest.approx(0.002, rel=0.02))


def test_step_time_per_sequence_excludes_fixed_time():
    """The number of sequences varies little, and their contexts vary much: a line fitted to both would be wrong."""
    sampler, predictor = LoadSampler(), Predictor()
    predictor.set_prior(EngineSpeed(0.01, 0.0001, 0.01, 0.001))
    sampler.sample(FIRST, predictor)
    assert sampler.sample(later(1.0), predictor).step == (0.01, 0.001), "as measured at start, with short contexts"
    for n in range(2000):
        sampler.observe_step(24 + n % 2, 0.01 + 24.5 * (0.0015 if n % 4 < 2 else 0.0005))
    assert sampler.sample(later(2.0), predictor).step == (0.01, pytest.approx(0.001, rel=0.05))


def test_offered_load_is_summed_over_frontends_that_come_and_go():
    before = {"a": Offered(5, 500, 50.0), "gone": Offered(7, 700, 70.0)}
    now = {"a": Offered(8, 900, 80.0), "again": Offered(100_000, 1_000_000, 1.0)}  # as after a loss of Redis' data
    assert offered_since(before, now) == Offered(3, 400, 30.0)
