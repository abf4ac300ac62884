"""Lockstep ranks: the gate, the assignment, and our level chunks."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.policy_adp import (
    AdpSettings,
    GateState,
    RankView,
    assign_longest_first,
    gate,
    level_chunks,
    simulate_adp,
)

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


def test_longest_first_onto_the_rank_with_the_fewest_tokens():
    assert assign_longest_first([10, 100, 60], tokens=[0, 50], active=[0, 1]) == [0, 0, 1]


def test_no_rank_gets_more_than_its_share_of_sequences():
    chosen = assign_longest_first([1] * 8, tokens=[0, 1000], active=[0, 0])
    assert chosen.count(0) == chosen.count(1) == 4


@given(st.lists(st.tuples(st.integers(0, 512), st.integers(0, 9000)), min_size=1, max_size=8), st.integers(0, 2000))
def test_level_chunks_never_exceed_the_backlog_or_the_batch_and_always_progress(ranks, level):
    generating, backlog = [g for g, _ in ranks], [b for _, b in ranks]
    chunks = level_chunks(generating, backlog, 8192, level)
    assert all(0 <= c <= b and (c == 0 or g + c <= 8192) for c, g, b in zip(chunks, generating, backlog, strict=True))
    busiest = max(generating)
    if any(b and (g < busiest or g < level) for g, b in ranks):
        assert sum(chunks) > 0


def test_level_beats_the_gate_and_the_gate_the_baseline():
    small = {"requests": 1500, "concurrency": 640, "max_batch": 64, "mean_out": 400}
    plain = simulate_adp(AdpSettings(**small))
    gated = simulate_adp(AdpSettings(strategy="gate", batching_wait_iters=10, **small))
    level = simulate_adp(AdpSettings(strategy="level", **small))
    assert plain.tokens_per_s < gated.tokens_per_s < level.tokens_per_s
    assert level.ttft_p50_s < gated.ttft_p50_s and level.balance > plain.balance
