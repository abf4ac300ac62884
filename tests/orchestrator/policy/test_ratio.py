"""Rate matching: from measured loads to xPyD."""

import msgspec
import pytest

from orchestrator.policy.ratio import LoadSample, RatioLimits, demand, desired_ratio
from orchestrator.types import DesiredRatio

SAMPLE = LoadSample(at=100.0, period_s=10.0, offered_requests=100, offered_prefill_tokens=100_000,
                    offered_output_tokens=20_000, queued_prefill_tokens=0, decode_held=0.0,
                    prefill_s_per_token=0.0006, decode_tokens_per_s=1000.0)  # fmt: skip
EVEN = DesiredRatio(4, 4, set_at=-1000.0)


def test_demand_is_rate_matching():
    need = demand([SAMPLE])
    assert need.prefill == pytest.approx(6.0) and need.decode == pytest.approx(2.0)
    # P/D = C_dec * TTFT / (OSL * TPOT): 10 requests/s, TTFT 0.6 s, OSL 200, C_dec/TPOT = 1000/s
    assert need.prefill / need.decode == pytest.approx(1000 * 0.6 / 200)


def test_the_split_follows_demand_in_bounded_steps():
    assert desired_ratio([SAMPLE], EVEN, RatioLimits(max_step=8)).prefill == 6
    step = desired_ratio([SAMPLE], EVEN)
    assert (step.prefill, step.decode) == (5, 3)


def test_a_side_is_never_emptied():
    only_decode = msgspec.structs.replace(SAMPLE, offered_prefill_tokens=0)
    assert desired_ratio([only_decode], EVEN, RatioLimits(max_step=8)).prefill == 1
    assert desired_ratio([SAMPLE], DesiredRatio(1, 1, set_at=-1000.0)) is None


def test_hysteresis_and_cool_down():
    assert desired_ratio([SAMPLE], DesiredRatio(6, 2, set_at=-1000.0)) is None
    nearly = msgspec.structs.replace(SAMPLE, prefill_s_per_token=0.00022)  # 2.2 against 2 workers
    assert desired_ratio([nearly], EVEN) is None
    assert desired_ratio([SAMPLE], DesiredRatio(4, 4, set_at=70.0)) is None


def test_offered_load_counts_even_when_nothing_is_served_and_backlogs_too():
    waiting = msgspec.structs.replace(SAMPLE, offered_prefill_tokens=0, queued_prefill_tokens=300_000)
    assert demand([waiting]).prefill == pytest.approx(6.0)
    held = msgspec.structs.replace(SAMPLE, offered_output_tokens=0, decode_held=3.5)
    assert demand([held]).decode == 3.5
    assert (
        desired_ratio([msgspec.structs.replace(SAMPLE, offered_prefill_tokens=0, offered_output_tokens=0)], EVEN)
        is None
    )
    assert desired_ratio([], EVEN) is None
