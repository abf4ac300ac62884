"""Lockstep ranks, simulated: the gate, and what it brings beside the deciders of fleets."""

import pytest

from benchmarks import policy_adp
from benchmarks.policy_adp import AdpSettings, GateState, RankView, gate, simulate_adp
from orchestrator.policy.choices import ranks
from workers.load import board

BUSY = RankView(generating=5, waiting_prompts=1, has_room=True)
DRY = RankView(generating=5, waiting_prompts=0, has_room=True)


def test_the_gate_holds_prompts_until_every_rank_has_one():
    go, state = gate([BUSY, DRY], GateState())
    assert not go and state.held == 1
    assert gate([BUSY, BUSY], state, batching_wait_iters=0) == (True, GateState())


def test_the_gate_opens_after_its_timeout_or_when_a_rank_has_nothing_to_generate():
    assert gate([BUSY, DRY], GateState(held=50))[0]
    assert gate([BUSY, RankView(0, 0, True)], GateState())[0]
    assert gate([BUSY, DRY], GateState(), timeout_iters=0)[0]


def test_batching_waits_for_more_prompts_but_not_for_ever():
    state = GateState()
    held = 0
    while not (result := gate([BUSY, BUSY], state, batching_wait_iters=10))[0]:
        state, held = result[1], held + 1
    assert held == 10


def test_level_chunks_cost_time_to_the_first_token_and_less_in_the_order_of_engines():
    small = {"ranks": 4, "requests": 2000, "concurrency": 192, "max_batch": 64, "mean_in": 400, "mean_out": 80}
    whole = simulate_adp(AdpSettings(**small))
    as_they_come, in_order = (
        simulate_adp(AdpSettings(strategy="level", in_order=way, **small)) for way in (False, True)
    )
    assert whole.ttft_p50_s < in_order.ttft_p50_s < 0.9 * as_they_come.ttft_p50_s
    assert in_order.tokens_per_s > 0.98 * as_they_come.tokens_per_s > whole.tokens_per_s


@pytest.mark.parametrize("prompt_s", [0.0015, 0.01])
def test_prompts_are_whole_where_steps_take_hardly_longer_for_them(prompt_s):
    """As on a small engine on a CPU: level chunks would let each prompt take several steps and spare none anything."""
    engine = {"ranks": 2, "requests": 1500, "concurrency": 96, "max_batch": 64, "max_tokens": 2048}
    engine |= {
        "mean_in": 400,
        "mean_out": 80,
        "fixed_s": 0.035,
        "token_s": 1e-5,
        "prompt_s": prompt_s,
        "in_order": True,
    }
    level, whole = (simulate_adp(AdpSettings(strategy=way, **engine)) for way in ("level", "least_tokens"))
    assert level.tokens_per_s > 0.99 * whole.tokens_per_s and level.ttft_p50_s < 1.5 * whole.ttft_p50_s


def test_prompts_in_turns_leave_more_to_gain():
    small = {"ranks": 2, "requests": 1500, "concurrency": 200, "mean_in": 400, "mean_out": 80, "in_turns": True}
    plain, level = (simulate_adp(AdpSettings(strategy=way, **small)) for way in ("round_robin", "level"))
    assert level.balance > 1.3 * plain.balance and level.tokens_per_s > 1.05 * plain.tokens_per_s


def test_level_beats_the_gate_and_the_gate_the_baseline():
    small = {"requests": 1500, "concurrency": 640, "max_batch": 64, "mean_out": 400}
    plain = simulate_adp(AdpSettings(**small))
    gated = simulate_adp(AdpSettings(strategy="gate", batching_wait_iters=10, **small))
    level = simulate_adp(AdpSettings(strategy="level", **small))
    assert plain.tokens_per_s < gated.tokens_per_s < level.tokens_per_s
    assert level.ttft_p50_s < gated.ttft_p50_s and level.balance > plain.balance


@pytest.mark.parametrize(("size", "users"), [(2, 96), (4, 192)])
def test_ranks_that_know_alike_are_better_balanced_than_those_that_hear_late(size, users):
    few = {"ranks": size, "concurrency": users, "requests": 6 * users, "max_batch": 64, "max_tokens": 2048}
    few |= {"strategy": "level", "mean_in": 400, "mean_out": 80, "fixed_s": 0.015, "token_s": 2.5e-4}
    late, alike = (simulate_adp(AdpSettings(late=late, **few)) for late in (True, False))
    assert alike.balance > 1.05 * late.balance and alike.tokens_per_s > 1.05 * late.tokens_per_s


@pytest.mark.slow
def test_the_published_setting_is_balanced():
    """16,000 requests, 8 ranks."""
    level = simulate_adp(AdpSettings(strategy="level"))
    assert level.balance >= 0.91
    assert level.tokens_per_s > 1.3 * simulate_adp(AdpSettings()).tokens_per_s


def test_the_simulation_and_the_fleet_have_the_same_deciders():
    assert policy_adp.level_chunks is ranks.level_chunks and board.level is ranks.level
    assert policy_adp.pace is board.pace is ranks.pace
    assert policy_adp.ChunkWorth is board.ChunkWorth is ranks.ChunkWorth
    assert policy_adp.assign_longest_first is ranks.assign_longest_first
