"""The ways that are tried, the best of them, and the least number of workers."""

from orchestrator.config.settings import SLOConfig
from orchestrator.simulator.engine.profile import PROFILES, load_profile
from orchestrator.simulator.plan import (
    FIXED,
    FleetOption,
    Outcome,
    Question,
    best,
    fewest,
    fleet_options,
    outcome,
    splits,
)
from orchestrator.simulator.settings import SHIPPED
from orchestrator.simulator.trace import Arrival, Load

CPU = load_profile(PROFILES / "cpu-smollm2-135m.json")
PROMPTS = Load("prompts", [Arrival(i / 4, 1500, 20) for i in range(200)])  # of 3 s each


def question(load=PROMPTS) -> Question:
    return Question(load, CPU, SLOConfig(ttft_s=8.0, tpot_s=0.2), SHIPPED)


def test_every_split_and_every_policy_is_tried():
    assert splits(4) == [0, 1, 2, 3] and splits(1) == [0]
    assert len(splits(64)) == 17 and (splits(64)[0], splits(64)[-1]) == (0, 63)
    named = [str(option) for option in fleet_options(4)]
    assert named[:5] == ["0P4D (aggregated)", "1P3D", "2P2D", "3P1D", "automatic, from 2P2D"]
    assert {"dynamo_cost, 2P2D", "dynamo_conditional, 2P2D"} <= set(named)
    assert [str(option) for option in fleet_options(1)] == ["0P1D (aggregated)", "automatic, from 0P1D"]


def test_best_option_is_ours_and_automatic_wins_ties():
    found = [outcome(question(), option, 0.5) for option in fleet_options(2)]
    assert {one.score for one in found if one.option.policy.startswith("ours")} == {1.0}
    assert best(found).option.policy == "ours"


def test_a_goodput_is_found_for_each_share():
    found = outcome(question(), FleetOption(1, 1, FIXED), None)
    assert list(found.goodput) == [0.9, 0.95, 0.99] and found.score > 0


def test_fewest_workers_attain_and_one_fewer_does_not():
    simulated = []
    option = fewest(question(), 1.0, 0.9, 16, 0.0, lambda: simulated.append(1))
    assert option is not None and option.prefill == 0 and 1 < option.decode < 16 and len(simulated) <= 5
    less = Outcome(option, at=question().run(FleetOption(0, option.decode - 1, FIXED), 1.0))
    assert less.score < 0.9 <= question().run(option, 1.0).attained
    assert fewest(question(), 1.0, 0.9, 1, 0.0, lambda: None) is None
