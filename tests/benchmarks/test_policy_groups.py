"""Fleets of lockstep groups, simulated: every request is answered, and ours loses less to imbalance than in turns."""

import math

import pytest

from benchmarks import policy_groups
from benchmarks.policy_groups import WAYS, Fleet
from orchestrator.policy import claims
from orchestrator.simulator.loads import synthetic
from orchestrator.simulator.trace import at_rate
from workers import claims as live

LOAD = at_rate(synthetic("chat", 1_500, 0), 250.0)


@pytest.mark.parametrize("way", WAYS)
def test_every_request_ends(way: str) -> None:
    fleet = Fleet(LOAD, way).run()
    assert all(job.arrival.at < job.first_at <= job.done_at < math.inf for job in fleet.jobs)
    assert all(not rank.used and not rank.promised for group in fleet.decode for rank in group.ranks)
    assert fleet.attained > 0 and not any(fleet._there.values())
    for groups in (fleet.prefill, fleet.decode):
        assert 0 <= fleet.least(groups) <= fleet.lost(groups)


def test_ours_loses_less_to_imbalance() -> None:
    ours, in_turns = (Fleet(LOAD, way).run() for way in ("ours", "round_robin"))
    assert ours.lost(ours.decode) < 0.3 * in_turns.lost(in_turns.decode)


def test_prefill_ranks_claim_what_fills_their_next_step_before_it_begins() -> None:
    """While prompts wait."""
    fleet = Fleet(at_rate(LOAD, 500.0), "ours", 2_048).run()
    assert fleet.lost(fleet.prefill) < 0.05


def test_the_simulation_and_the_fleet_have_the_same_deciders() -> None:
    for name in ("choose_claims", "claim_budget", "claims_as_idle"):
        assert getattr(policy_groups, name) is getattr(live, name) is getattr(claims, name)
