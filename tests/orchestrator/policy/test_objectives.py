"""Which objective counts where many requests share one."""

import pytest

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.objectives import LATEST, LatestObjective, latest_tpot

FLEET_S = 2.0


def after(*brought, share=1 / 8):
    latest = LatestObjective(FLEET_S, share)
    for own_s in brought:
        latest.came(own_s)
    return latest.seconds


@pytest.mark.parametrize("share", [1 / 8, 1 / 2])
def test_a_tighter_objective_counts_where_its_share_of_the_latest_requests_has_it(share):
    enough = round(share * LATEST)
    assert after() == after(*[None] * LATEST) == FLEET_S
    assert after(*[0.3] * (enough - 1), share=share) == FLEET_S, "clients name theirs"
    assert after(*[0.3] * enough, share=share) == after(*[1e-6] * (enough - 1), 0.3, share=share) == 0.3
    assert after(*[0.3] * enough, *[None] * (LATEST - enough), share=share) == 0.3
    assert after(*[0.3] * enough, *[None] * (LATEST - enough + 1), share=share) == FLEET_S, "one is too long ago"


def test_a_looser_objective_does_not_count():
    assert after(*[30.0] * LATEST) == after(*[30.0] * LATEST, None) == FLEET_S


def test_the_tpot_objective_is_that_of_half_of_the_latest_requests():
    latest = latest_tpot(SLOConfig(tpot_s=0.1))
    for _ in range(LATEST // 2):
        assert latest.seconds == 0.1
        latest.came(0.05)
    assert latest.seconds == 0.05
