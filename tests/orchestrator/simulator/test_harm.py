"""What a prompt that is prefilled where others decode does to those: it is worth it only where remote is full."""

import pytest

from orchestrator.config.settings import SLOConfig
from orchestrator.simulator.loads import synthetic
from orchestrator.simulator.profile import PROFILES, load_profile
from orchestrator.simulator.report import Report, report
from orchestrator.simulator.settings import SHIPPED, Settings, changed, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import at_rate

ALL_REMOTE = changed(SHIPPED, {"routing": {"remote_prefill_min_tokens": 1}})
WARM_UP = 0.1


def run(half: int, rate: float, config=SHIPPED, policy: str = "ours:fixed") -> Report:
    """Chats beside documents on H100s."""
    settings = Settings(
        prefill=half,
        decode=half,
        profile=load_profile(PROFILES / "h100-llama-8b.json"),
        stack=stack(policy, config),
        slo=SLOConfig(ttft_s=1.0, tpot_s=0.05),
    )
    return report(Simulation(settings, at_rate(synthetic("documents", 1500), rate)).run(), WARM_UP)


@pytest.mark.parametrize(("half", "rate"), [(1, 1.0), (1, 2.0), (2, 8.0), (4, 8.0), (4, 24.0)])
def test_streams_are_as_even_as_with_all_prompts_remote(half, rate):
    ours, remote = run(half, rate), run(half, rate, ALL_REMOTE)
    assert ours.itl_p99_s <= 1.1 * remote.itl_p99_s
    assert ours.attained >= remote.attained


@pytest.mark.parametrize(("half", "rate"), [(1, 6.0), (2, 12.0)])
def test_full_prefill_workers_leave_prompts_to_those_that_decode(half, rate):
    ours, remote = run(half, rate), run(half, rate, ALL_REMOTE)
    assert ours.attained > remote.attained
    assert ours.ttft_p99_s < remote.ttft_p99_s and ours.tpot_p99_s < 0.05
