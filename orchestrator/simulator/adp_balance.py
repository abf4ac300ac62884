"""Attention data parallelism (ADP): when lockstep ranks may start prompts, and which rank takes which prompt.

In each iteration all ranks wait for the slowest, so a prompt on one rank delays the ranks that only decode. `gate` and
`assign_longest_first` follow NVIDIA's ADP balance strategy (TensorRT-LLM tech blog 10). `level_chunks` is our own: it
does not hold prompts until all ranks have one, but cuts them so that every rank computes the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class RankView(msgspec.Struct, frozen=True):
    """One rank before an iteration."""

    generating: int  # sequences that decode one token each
    waiting_prompts: int  # assigned to this rank, not started
    has_room: bool  # for one more sequence in its batch


class GateState(msgspec.Struct, frozen=True):
    """Iterations for which prompts have been held."""

    held: int = 0  # until every rank has a prompt
    batched: int = 0  # until more prompts have arrived


def gate(
    ranks: Sequence[RankView], state: GateState, timeout_iters: int = 50, batching_wait_iters: int = 10
) -> tuple[bool, GateState]:
    """Whether prompts start in this iteration, and the next state. A `timeout_iters` of 0 never holds.

    When all ranks have room and a prompt, they start together; if all of them generate meanwhile, they wait for more
    prompts for up to `batching_wait_iters` first. Otherwise prompts are held, for up to `timeout_iters`, unless some
    rank generates nothing.
    """
    if timeout_iters <= 0 or not any(rank.waiting_prompts for rank in ranks):
        return True, GateState()
    all_generate = all(rank.generating for rank in ranks)
    if all(rank.has_room and rank.waiting_prompts for rank in ranks):
        if all_generate and state.batched < batching_wait_iters:
            return False, GateState(state.held, state.batched + 1)
        return True, GateState()
    if not all_generate or state.held >= timeout_iters:
        return True, GateState()
    return False, GateState(state.held + 1, state.batched)


def assign_longest_first(prompts: Sequence[int], tokens: Sequence[int], active: Sequence[int]) -> list[int]:
    """A rank for each of the new prompts (lengths in tokens): the longest first, onto the rank with the fewest tokens.

    `tokens` and `active` are each rank's tokens and sequences. No rank gets more than ceil((active + new) / ranks)
    sequences.
    """
    ranks = len(tokens)
    most = -(-(sum(active) + len(prompts)) // ranks)
    load, count = list(tokens), list(active)
    chosen = [0] * len(prompts)
    for index in sorted(range(len(prompts)), key=lambda i: -prompts[i]):
        open_ranks = [rank for rank in range(ranks) if count[rank] < most] or list(range(ranks))
        rank = min(open_ranks, key=lambda r: (load[r], count[r]))
        chosen[index] = rank
        load[rank] += prompts[index]
        count[rank] += 1
    return chosen


def level_chunks(generating: Sequence[int], backlog: Sequence[int], max_tokens: int, min_level: int) -> list[int]:
    """Prompt tokens for each rank to compute in this iteration, so that all ranks compute the same number of tokens.

    That number (the level) is `generating + backlog` of the rank with the least to do. It is at least `min_level`, and
    more than every rank's `generating`, so that a rank without prompts cannot stall the others; at most `max_tokens`.
    """
    if not any(backlog):
        return [0] * len(backlog)
    reach = [decode + prompt for decode, prompt in zip(generating, backlog, strict=True)]
    level = min(max_tokens, max(min(reach), min_level, max(generating) + 1))
    return [max(0, min(prompt, level - decode)) for decode, prompt in zip(generating, backlog, strict=True)]
