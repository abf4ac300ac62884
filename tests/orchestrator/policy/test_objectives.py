"""Which objective counts where many requests share one."""

import pytest

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.policies import latest_tpot
from orchestrator.policy.predict.estimates import LATEST, LatestObjective
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.types import EngineSpeed

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
    latest = latest_tpot(SLOConfig(tpot_s=0.1), Predictor())
    for _ in range(LATEST // 2):
        assert latest.seconds == 0.1
        latest.came(0.05)
    assert latest.seconds == 0.05 < latest.of_all_s
    for _ in range(LATEST // 2):
        assert latest.of_all_s == 0.1
        latest.came(0.04)
    assert (latest.seconds, latest.of_all_s) == (0.04, 0.05)


def test_a_tpot_objective_that_a_sequence_alone_misses_does_not_count():
    predictor = Predictor()
    predictor.set_prior(EngineSpeed(prefill_s_per_token=1e-4, step_s=0.008, step_s_per_sequence=0.0001))
    latest = latest_tpot(SLOConfig(tpot_s=0.1), predictor)
    for own_s, counts in ((0.001, False), (0.0085, False), (0.0095, True)):
        for _ in range(LATEST):
            latest.came(own_s)
        assert latest.seconds == latest.of_all_s == (own_s if counts else 0.1)
    for _ in range(LATEST // 2):
        latest.came(0.001)
    assert latest.seconds == 0.0095 < latest.of_all_s, "those of the others count beside it"
