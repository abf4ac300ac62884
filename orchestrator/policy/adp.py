"""Attention data parallelism: when lockstep ranks may start prompts, and which rank takes which.

Every rank waits for the slowest in each iteration, so a prompt on one rank while the others decode costs all of them.
`gate` and `assign_longest_first` follow NVIDIA's ADP balance strategy (TensorRT-LLM tech blog 10); `level_chunks` is
our own: instead of holding prompts back until all ranks have one, it cuts them so that every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class RankView(msgspec.Struct, frozen=True):
    """One rank before an iteration. Prompts wait there until they are started."""

    generating: int  # sequences that decode one token each
    waiting_prompts: int  # assigned here, not started
    has_room: bool  # for one more sequence in its batch


class GateState(msgspec.Struct, frozen=True):
    """How long prompts have been held (iterations), by reason."""

    held: int = 0
    batched: int = 0


def gate(
    ranks: Sequence[RankView], state: GateState, timeout_iters: int = 50, batching_wait_iters: int = 10
) -> tuple[bool, GateState]:
    """Whether prompts start in this iteration, and the next state. A `timeout_iters` of 0 never holds.

    All ranks have room and a prompt: start together, after waiting up to `batching_wait_iters` for more prompts if all
    of them generate meanwhile. Otherwise hold, but not beyond `timeout_iters`, nor while a rank generates nothing.
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
    """A rank for each new prompt (its length in tokens): the longest first, onto the rank with the fewest tokens.

    No rank gets more than ceil((active + new) / ranks) sequences. `tokens` and `active` are what each rank has.
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
    """Prompt tokens for each rank to compute in this iteration, so that ranks end up level: our variant.

    The level is what the rank with the least to do can reach, `generating + backlog`, but at least `min_level` while
    anything waits, so that a rank without prompts cannot stall the others; no rank exceeds `max_tokens` in all.
    """
    if not any(backlog):
        return [0] * len(backlog)
    reach = [decode + prompt for decode, prompt in zip(generating, backlog, strict=True)]
    level = min(max_tokens, max(min(reach), min_level, max(generating) + 1))
    return [max(0, min(prompt, level - decode)) for decode, prompt in zip(generating, backlog, strict=True)]
