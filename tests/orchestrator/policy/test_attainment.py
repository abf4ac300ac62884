"""What each split bears: both sides' limits, and where neither side should be apart."""

import math

import msgspec
import pytest

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.attainment import MOST_HEADROOM, Traffic, headroom, most_busy, tpot_s

SLO = SLOConfig(ttft_s=1.0, tpot_s=0.05)
# Ten requests a second: half a worker's worth of prefill, prompts of equal length.
EVEN = Traffic(
    requests_per_s=10.0,
    prefill_s=0.05,
    prefill_s2=0.0025,
    local_s=0.05,
    local_s2=0.0025,
    output_tokens=200.0,
    step_s=0.01,
    step_s_per_sequence=0.0001,
    max_sequences=256,
)


def bears(traffic: Traffic, prefill: int, decode: int, slo: SLOConfig = SLO) -> float:
    return headroom(traffic, prefill, decode, slo)


def of_prompts(seconds: float, squares: float, **changes) -> Traffic:
    """Prompts that take as long anywhere."""
    return msgspec.structs.replace(
        EVEN, prefill_s=seconds, prefill_s2=squares, local_s=seconds, local_s2=squares, **changes
    )


def best(traffic: Traffic, workers: int = 8, slo: SLOConfig = SLO) -> int:
    return max(range(workers), key=lambda prefill: (bears(traffic, prefill, workers - prefill, slo), -prefill))


def test_a_decode_step_is_as_long_as_littles_law_says():
    # 2000 tokens/s on one worker: TPOT = 0.01 + 0.0001 * (2000 * TPOT)
    assert tpot_s(EVEN, 1.0, taken=1.0, decode=1) == pytest.approx(0.0125)
    assert tpot_s(EVEN, 1.0, taken=0.0, decode=1) > 0.0125 / (1 - 0.5), "prefill takes half of its time"
    assert tpot_s(EVEN, 2.1, taken=0.0, decode=1) == math.inf, "more than all of it"
    full = msgspec.structs.replace(EVEN, max_sequences=20)
    assert tpot_s(full, 1.0, taken=1.0, decode=1) == math.inf


def test_more_workers_bear_more_and_nobody_decodes_without_decode_workers():
    assert bears(EVEN, 4, 0) == 0
    assert bears(EVEN, 2, 6) > bears(EVEN, 2, 3) > bears(EVEN, 1, 1) > 0
    assert bears(msgspec.structs.replace(EVEN, requests_per_s=0.0), 4, 4) == MOST_HEADROOM


def test_long_prompts_want_prefill_workers_and_long_answers_want_none():
    code = of_prompts(0.1, 0.02, output_tokens=20.0)
    stories = of_prompts(0.005, 0.00005, output_tokens=2000.0)
    assert best(code) >= 5
    assert best(stories) <= 1
    assert best(stories, workers=2) == 0, "a whole worker for prompts would be half of two"


def test_what_decode_workers_have_cached_is_best_prefilled_there():
    code = of_prompts(0.1, 0.02, output_tokens=20.0)
    sessions = msgspec.structs.replace(code, local_s=0.01, local_s2=0.0002)
    assert best(sessions) == 0 < best(code)


def test_prefill_workers_get_the_longest_prompts_so_that_few_of_them_take_most_of_the_lumps():
    steady = msgspec.structs.replace(EVEN, local_s2=0.0)

    def lumps_s(taken: float) -> float:
        return tpot_s(EVEN, 1.0, taken, decode=2) - tpot_s(steady, 1.0, taken, decode=2)

    assert 0 < lumps_s(0.25) < lumps_s(0.0) / 2 * 1.1, "half of the work is a quarter of the second moment"
    assert lumps_s(0.5) == 0


def test_what_a_prefill_worker_may_be_busy_falls_with_the_spread_of_lengths_and_rises_with_their_number():
    wild = msgspec.structs.replace(EVEN, prefill_s2=0.1)
    assert most_busy(1, wild, 1.0) < most_busy(1, EVEN, 1.0) <= 0.95
    assert most_busy(1, wild, 1.0) < most_busy(8, wild, 1.0)
    assert most_busy(2, wild, 0.2) < most_busy(2, wild, 5.0)
