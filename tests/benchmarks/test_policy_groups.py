"""Fleets of lockstep groups, simulated: every request is answered, and ours loses less to imbalance than in turns."""

import functools
import math
from statistics import fmean

import pytest

from benchmarks import policy_groups
from benchmarks.policy_groups import WAYS, Fleet, Job, Rank
from orchestrator.policy import claims
from orchestrator.policy.choices import ranks
from orchestrator.policy.choices.ranks import LEAST_ALONE
from orchestrator.simulator.loads import synthetic
from orchestrator.simulator.trace import Load, at_rate
from workers import claims as live

ORDER = ("idle", "ahead", "busy")


@functools.cache
def chats() -> Load:
    return at_rate(synthetic("chat", 1_500, 0), 250.0)


@pytest.mark.parametrize("way", WAYS)
def test_every_request_ends(way: str) -> None:
    fleet = Fleet(chats(), way).run()
    assert all(job.arrival.at < job.first_at <= job.done_at < math.inf for job in fleet.jobs)
    assert all(not rank.used and not rank.promised for group in fleet.decode for rank in group.ranks)
    assert fleet.attained > 0 and not any(fleet._there.values())
    for groups in (fleet.prefill, fleet.decode):
        assert 0 <= fleet.least(groups) <= fleet.lost(groups)


def test_ours_loses_less_to_imbalance() -> None:
    ours, in_turns = (Fleet(chats(), way).run() for way in ("ours", "round_robin"))
    assert ours.lost(ours.decode) < 0.3 * in_turns.lost(in_turns.decode)


def test_a_short_prompt_waits_for_no_long_one_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that may be long, at half the load that the fleet bears."""
    load, mean_s = at_rate(chats(), 110.0), []
    for alone in (LEAST_ALONE, policy_groups.MAX_TOKENS):
        monkeypatch.setattr(ranks, "LEAST_ALONE", alone)
        mean_s.append(fmean(job.first_at - job.arrival.at for job in Fleet(load, "ours").run().counted))
    assert mean_s[0] < 0.9 * mean_s[1]


def test_prefill_ranks_claim_what_fills_their_next_step_before_it_begins() -> None:
    """While prompts wait."""
    fleet = Fleet(at_rate(chats(), 500.0), "ours", 2_048).run()
    assert fleet.lost(fleet.prefill) < 0.05


def test_a_job_goes_to_an_idle_rank_and_else_to_the_one_that_is_done_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it comes, at half the load that the fleet bears; a rank that claims ahead then waits behind idle ones."""
    fleet, seen = Fleet(at_rate(chats(), 110.0), "ours", 2_048), set()
    of_prefill = [rank for group in fleet.prefill for rank in group.ranks]

    def noted(rank: Rank, jobs: list[Job]) -> None:
        if jobs[0].arrival.at == fleet.now:
            first = min(of_prefill, key=lambda other: (ORDER.index(fleet._claimer(other)), other.done_at))
            assert fleet._claimer(rank) == fleet._claimer(first) == "idle" or rank.done_at == first.done_at
            seen.add(fleet._claimer(rank))
        give(rank, jobs)

    give = fleet._give
    monkeypatch.setattr(fleet, "_give", noted)
    fleet.run()
    assert seen == {"idle", "ahead"}


def test_the_simulation_and_the_fleet_have_the_same_deciders() -> None:
    for name in ("choose_claims", "claim_budget", "claims_as", "takes_any_size"):
        assert getattr(policy_groups, name) is getattr(live, name) is getattr(claims, name)
