"""Ranks that step together: which one gets a request, and how many prompt tokens each computes."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.choices.ranks import (
    DRAIN_STEPS,
    LEAST_ALONE,
    ChunkWorth,
    assign_longest_first,
    level_chunks,
    pace,
)
from orchestrator.policy.decode_choice import Candidate, RankChoice, RequestInfo
from orchestrator.policy.shortlist import SHORTLIST_FROM, Shortlist

REQUEST = RequestInfo("r", prompt_tokens=100, max_new_tokens=50, arrived_at=0.0)


def rank(name: str, running: int = 0, free: int = 1000, group: str = "g", **more: int) -> Candidate:
    return Candidate(name, 1000, free, 16, running, waiting=0, waiting_tokens=0, group=group, **more)


def chosen(ranks: str, *candidates: Candidate, request: RequestInfo = REQUEST) -> str:
    found = RankChoice(decode_choice("kv_prefix"), ranks)(request, candidates)
    assert found is not None
    return found.worker_id


def test_longest_first_onto_the_rank_with_the_fewest_tokens() -> None:
    assert assign_longest_first([10, 100, 60], tokens=[0, 50], active=[0, 1]) == [0, 0, 1]


def test_no_rank_gets_more_than_its_share_of_sequences() -> None:
    placed = assign_longest_first([1] * 8, tokens=[0, 1000], active=[0, 0])
    assert placed.count(0) == placed.count(1) == 4


@given(st.lists(st.tuples(st.integers(0, 512), st.integers(0, 9000)), min_size=1, max_size=8), st.integers(0, 2000))
def test_level_chunks_never_exceed_the_backlog_or_the_batch_and_always_progress(
    ranks: list[tuple[int, int]], floor: int
) -> None:
    generating, backlog = [g for g, _ in ranks], [b for _, b in ranks]
    chunks = level_chunks(generating, backlog, [min(floor, b) for b in backlog], 8192)
    assert all(0 <= c <= b and (c == 0 or g + c <= 8192) for c, g, b in zip(chunks, generating, backlog, strict=True))
    assert all(c > 0 for c, b in zip(chunks, backlog, strict=True) if b), "a rank with prompts goes on with them"


@pytest.mark.parametrize(("decoding", "most"), [(1, 1), (10, 10), (200, DRAIN_STEPS)])
def test_a_lone_prompt_takes_as_many_steps_as_sequences_wait_for_it(decoding: int, most: int) -> None:
    """The ranks without prompts would let it be computed token by token."""
    left, steps_left, steps = 2048, 0, 0
    while left:
        floor, steps_left = pace(left, [decoding] * 8, False, steps_left)
        left -= level_chunks([decoding] * 8, [left] + [0] * 7, [floor] + [0] * 7, 8192)[0]
        steps += 1
    assert most - 2 <= steps <= most


def test_drafts_are_no_sequences_that_wait() -> None:
    """Ten sequences on each of two ranks, with three drafts each: what a step takes is spread over them alone."""
    assert pace(1000, [40, 40], False, 0, each=4) == pace(1000, [10, 10], False, 0) == (100, 9)
    plain, drafts = ChunkWorth(2), ChunkWorth(2, each=4)
    for at in range(100):
        chunk, decodes = 200 * (at % 3) * (at % 2), [10 + at % 7] * 2
        seconds = 0.01 + 1e-4 * chunk + 0.001 * (chunk > 0)
        plain.ended(decodes, [chunk, 0], seconds)
        drafts.ended([4 * decode for decode in decodes], [chunk, 0], seconds)
    assert plain.tokens(20) == pytest.approx((0.01 / 20 + 0.001) / (1e-4 / 2), abs=1)
    assert drafts.tokens(80) == pytest.approx(plain.tokens(20), abs=1)


def test_a_full_batch_has_no_floor() -> None:
    assert pace(1000, [8, 8], True, 5) == (0, 0)
    assert pace(1000, [0, 0], True, 0) == (LEAST_ALONE, 0)  # none decodes: a step of a few tokens is worth nothing


def learned(prompt_s: float, token_s: float, ranks: int = 2) -> ChunkWorth:
    """From steps that take 10 ms, so much more with prompts, and so much for each token."""
    worth = ChunkWorth(ranks)
    for at in range(50):
        decodes, chunk = [20 + 5 * (at % 7)] * ranks, 50 * (at % 3) * (at > 20)
        seconds = 0.01 + token_s * (decodes[0] + chunk) + prompt_s * (chunk > 0)
        worth.ended(decodes, [chunk, *[0] * (ranks - 1)], seconds)
    return worth


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_chunk_spares_what_it_costs(ranks: int) -> None:
    """A step, in which its sequence waits, and all wait for what a step takes for having any prompt."""
    worth, sequences = learned(prompt_s=0.002, token_s=1e-4, ranks=ranks), 50 * ranks
    costs_s = (0.01 + 1e-4 * 50) + sequences * 0.002
    spares_s = sequences * 1e-4 * (ranks - 1) / ranks
    assert worth.tokens(sequences) == pytest.approx(costs_s / spares_s, abs=1)
    assert pace(1000, [50] * ranks, False, 0, 400) == (400, 31) and pace(90, [50] * ranks, False, 0, 400) == (90, 31)
    assert pace(1000, [50] * ranks, True, 5, 400) == (400, 0)


def test_chunks_are_as_short_as_ever_where_steps_take_long_for_their_tokens_and_as_long_as_can_be_where_not() -> None:
    assert learned(prompt_s=0.0, token_s=1e-3).tokens(2000) <= 8
    free = learned(prompt_s=0.0, token_s=0.0)
    for _ in range(20):  # of prompts without end
        free.ended([50, 50], [free.tokens(100), 0], 0.01)
    assert free.tokens(100) > 1 << 25, "all that there are"
    assert ChunkWorth(2).tokens(100) == 0, "nothing is known"
    assert learned(prompt_s=0.0, token_s=1e-4).tokens(0) == 0, "nothing decodes"


@pytest.mark.parametrize("seed", range(10))
def test_chunks_grow_step_by_step_where_steps_seem_to_take_no_longer_for_them(seed: int) -> None:
    """They are as long up to 256 tokens, and not for a prompt of 6,000, which would take 300 ms at once."""
    chance, worth, longest_s = random.Random(seed), ChunkWorth(2), 0.0
    for _ in range(600):
        chunk = min(6000, max(chance.choice((0, 0, 8, 16, 32, 64)), worth.tokens(60))) * chance.randrange(2)
        took_s = max(0.015, 5e-5 * (30 + chunk)) + chance.uniform(0, 5e-4)
        longest_s = max(longest_s, took_s)
        worth.ended([30, 30], [chunk, 0], took_s)
    assert longest_s < 3 * 0.015


def test_adp_takes_the_rank_with_fewest_tokens_among_those_below_their_share_of_sequences() -> None:
    few_long, many_short = rank("g", running=2, free=500), rank("g.1", running=9, free=900)
    assert chosen("adp", few_long, many_short) == "g"
    assert chosen("least_tokens", few_long, many_short) == "g.1"


def test_tokens_that_a_rank_has_cached_count_for_it() -> None:
    assert chosen("adp", rank("g", free=998), rank("g.1", free=995, cached_tokens=96)) == "g.1"


def test_a_rank_without_room_for_the_prompt_is_left_out() -> None:
    assert chosen("adp", rank("g", running=1, free=2), rank("g.1", running=5, free=100)) == "g.1"


def test_round_robin_takes_the_ranks_in_turn() -> None:
    choose = RankChoice(decode_choice("kv_prefix"), "round_robin")
    ranks = [rank("g"), rank("g.1", free=10), rank("g.2", free=500)]
    assert sorted(choose(REQUEST, ranks).worker_id for _ in range(6)) == ["g", "g", "g.1", "g.1", "g.2", "g.2"]


def test_the_group_is_that_of_the_decode_choice() -> None:
    ranks = [rank("g", free=100), rank("g.1", free=100), rank("h", 3, 900, "h"), rank("h.1", 1, 800, "h")]
    assert chosen("adp", *ranks) == "h.1"


def test_a_request_goes_to_a_group_whose_steps_get_no_longer_by_it() -> None:
    one, many = [rank("g", 3, 400), rank("g.1", 2, 400)], [rank("h", 3, 900, "h"), rank("h.1", 3, 900, "h")]
    assert chosen("adp", *one, *many) == "g.1"
    assert chosen("least_tokens", *one, *many) in ("h", "h.1")
    even = [rank("g", 3, 400), rank("g.1", 3, 400)]
    full = [rank("g", 3, 400), rank("g.1", 2, 9)]  # room for the prompt, not for its answer
    cached = [rank("h", 3, 900, "h", cached_tokens=96), many[1]]
    for ranks in ([*even, *many], [*full, *many], [*one, *cached], [*one, rank("h", 0, 900, "")]):
        assert chosen("adp", *ranks).startswith("h")


@pytest.mark.parametrize("others", [0, 1])
def test_a_group_with_few_sequences_is_chosen_though_its_step_gets_longer(others: int) -> None:
    few = [rank("h", others, 900, "h"), rank("h.1", others, 900, "h")]
    assert chosen("adp", rank("g", 30, 500), rank("g.1", 29, 500), *few).startswith("h")


def test_a_group_whose_ranks_are_full_is_not_chosen_though_one_has_fewer_sequences() -> None:
    full = [rank("g", 74, 500, max_num_seqs=64), rank("g.1", 73, 500, max_num_seqs=64)]
    level = [rank("h", 74, 900, "h"), rank("h.1", 74, 900, "h")]
    assert chosen("adp", *full, *level).startswith("h")


@pytest.mark.parametrize("ranks", ["adp", "least_tokens", "round_robin"])
def test_workers_that_wait_for_no_other_are_chosen_as_ever(ranks: str) -> None:
    assert chosen(ranks, rank("w", 1, 900, ""), rank("v", 0, 800, "")) == "w"


def test_the_shortlist_brings_all_ranks_of_the_groups_that_it_picks() -> None:
    shortlist = Shortlist(decode_choice("kv_prefix").static_score)
    for at in range(2 * SHORTLIST_FROM):
        shortlist.update(rank(f"g{at // 8}.{at % 8}", free=100 * (at // 8) + at % 8, group=f"g{at // 8}"))
    picked = {candidate.worker_id for candidate in shortlist.pick({})}
    assert picked == {f"g7.{at}" for at in range(8)}
    for at in range(8):
        shortlist.remove(f"g7.{at}")
    assert {candidate.group for candidate in shortlist.pick({})} == {"g6"}
    moved = msgspec.structs.replace(rank("g6.0", free=606, group=""))
    shortlist.update(moved)
    assert {candidate.worker_id for candidate in shortlist.pick({"g6.0": 16})} >= {"g6.0"}
