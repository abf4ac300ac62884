"""Rate matching: from measured loads to xPyD."""

import msgspec
import pytest

from orchestrator.config.settings import RatioConfig
from orchestrator.policy.ratio import LoadSample, demand, desired_ratio
from orchestrator.types import DesiredRatio

SAMPLE = LoadSample(at=100.0, period_s=10.0, offered_requests=100, offered_prefill_tokens=100_000,
                    offered_output_tokens=20_000, queued_prefill_tokens=0, filled_decode_workers=0.0,
                    prefill_s_per_token=0.0006, decode_tokens_per_s=1000.0)  # fmt: skip
EVEN = DesiredRatio(4, 4, set_at=-1000.0)


def test_demand_is_rate_matching():
    need = demand([SAMPLE])
    assert need.prefill == pytest.approx(6.0) and need.decode == pytest.approx(2.0)
    # P/D = C_dec * TTFT / (OSL * TPOT): 10 requests/s, TTFT 0.6 s, OSL 200, C_dec/TPOT = 1000/s
    assert need.prefill / need.decode == pytest.approx(1000 * 0.6 / 200)


def test_the_split_follows_demand_in_bounded_steps():
    assert desired_ratio([SAMPLE], EVEN, max_step=8).prefill == 6
    step = desired_ratio([SAMPLE], EVEN)
    assert (step.prefill, step.decode) == (5, 3)


def test_a_side_is_never_emptied():
    only_decode = msgspec.structs.replace(SAMPLE, offered_prefill_tokens=0, offered_output_tokens=40_000)
    assert desired_ratio([only_decode], EVEN, max_step=8).prefill == 1
    assert desired_ratio([SAMPLE], DesiredRatio(1, 1, set_at=-1000.0)) is None


def test_hysteresis_and_cool_down():
    assert desired_ratio([SAMPLE], DesiredRatio(6, 2, set_at=-1000.0)) is None
    nearly = msgspec.structs.replace(SAMPLE, prefill_s_per_token=0.00022)  # 2.2 against 2 workers
    assert desired_ratio([nearly], EVEN) is None
    assert desired_ratio([SAMPLE], DesiredRatio(4, 4, set_at=70.0)) is None


def test_offered_load_counts_even_when_nothing_is_served_and_backlogs_too():
    waiting = msgspec.structs.replace(SAMPLE, offered_prefill_tokens=0, queued_prefill_tokens=300_000)
    assert demand([waiting]).prefill == pytest.approx(6.0)
    held = msgspec.structs.replace(SAMPLE, offered_output_tokens=0, filled_decode_workers=3.5)
    assert demand([held]).decode == 3.5
    assert (
        desired_ratio([msgspec.structs.replace(SAMPLE, offered_prefill_tokens=0, offered_output_tokens=0)], EVEN)
        is None
    )
    assert desired_ratio([], EVEN) is None


def test_a_burst_is_no_reason_to_move():
    calm = msgspec.structs.replace(SAMPLE, prefill_s_per_token=0.0001, at=60.0)  # one prefill worker's worth
    even = msgspec.structs.replace(calm, offered_output_tokens=10_000)
    burst = msgspec.structs.replace(even, offered_prefill_tokens=900_000, at=100.0)
    assert desired_ratio([burst] * 6, EVEN) is not None
    assert desired_ratio([even] * 3 + [burst] * 3, EVEN) is None


def test_decode_gives_workers_away_only_while_it_has_room_to_spare():
    # Decode has two workers' worth of load, which fills half of its four.
    assert desired_ratio([SAMPLE], EVEN, overflow=True, max_step=8) is None
    idle = msgspec.structs.replace(SAMPLE, offered_output_tokens=5_000)
    assert desired_ratio([idle], EVEN, overflow=True, max_step=8).decode == 1


def test_a_fleet_that_is_not_busy_is_left_alone():
    light = msgspec.structs.replace(SAMPLE, prefill_s_per_token=0.0002, offered_output_tokens=1_000)  # 2.0 and 0.1 of 4
    assert desired_ratio([light], EVEN) is None
    assert desired_ratio([light], EVEN, RatioConfig(busy=0.3)) is not None


def test_prefill_that_can_overflow_is_left_overfull_for_a_busier_decode_side_only():
    # 3.0 and 4.8 of eight workers: either split leaves one side about full.
    sample = msgspec.structs.replace(SAMPLE, prefill_s_per_token=0.0003, offered_output_tokens=48_000)
    three = DesiredRatio(3, 5, set_at=-1000.0)
    assert desired_ratio([sample], three) is None
    assert desired_ratio([sample], three, overflow=True) is None  # prefill is the busier side: 1.0 against 0.96
    less = msgspec.structs.replace(sample, prefill_s_per_token=0.00025)
    assert desired_ratio([less], three) is None
    moved = desired_ratio([less], three, overflow=True)
    assert (moved.prefill, moved.decode) == (2, 6)
    # Prefill is the busier side now, and gets nothing back.
    back = msgspec.structs.replace(moved, set_at=-1000.0)
    assert desired_ratio([less], back, overflow=True) is None
