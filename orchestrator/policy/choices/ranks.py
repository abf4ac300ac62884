"""Balance among the ranks of a group that steps together: each step lasts as long as that of the rank with most tokens.

Which rank of the chosen group gets a request (`assign_longest_first`, as NVIDIA's ADP balance strategy has it, in
TensorRT-LLM's blog post 10), and how many prompt tokens each rank computes in a step (`level_chunks`, this project's).
NVIDIA's strategy also holds prompts until each rank has one; cutting them into level chunks takes the place of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from orchestrator.policy.candidate import Candidate, DecodeChoice, RequestInfo, blocks_for

DRAIN_STEPS = 32  # in which the prompts of all ranks should be computed, where many sequences decode


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


def level_chunks(
    generating: Sequence[int], backlog: Sequence[int], floors: Sequence[int], max_tokens: int
) -> list[int]:
    """Prompt tokens for each rank to compute in this step, so that all ranks compute the same number of tokens."""
    to = level(generating, backlog, floors, max_tokens)
    return [max(0, min(prompt, to - decode)) for decode, prompt in zip(generating, backlog, strict=True)]


def level(generating: Sequence[int], backlog: Sequence[int], floors: Sequence[int], max_tokens: int) -> int:
    """How many tokens all ranks compute in this step, those that have so many.

    It is `generating + backlog` of the rank with the least to do, and at least what computes the prompts of all ranks
    in `DRAIN_STEPS` steps. It is more than every rank's `generating`, so that a rank without prompts cannot stall the
    others, and leaves room for each rank's `floors`, its fewest prompt tokens; it is at most `max_tokens`.
    """
    reach = [decode + prompt for decode, prompt in zip(generating, backlog, strict=True)]
    mean = math.ceil((sum(generating) + sum(backlog) / DRAIN_STEPS) / len(backlog))
    least = max(decode + floor for decode, floor in zip(generating, floors, strict=True))
    return min(max_tokens, max(min(reach), mean, least, max(generating) + 1))


def pace(backlog: int, generating: Sequence[int], full: bool, steps_left: int) -> tuple[int, int]:
    """A rank's floor for `level_chunks`, and the steps that are then left for its prompts, to pass with the next call.

    Its prompts are computed within so many steps as sequences `generating` on a rank (the mean) wait for them, at most
    `DRAIN_STEPS`, although the other ranks may have none: where few wait, little is gained by a later first token.
    Where its batch is `full` prompts wait for a place anyway, and only the number of them that all ranks compute
    counts: no floor.
    """
    if not backlog or full:
        return 0, 0
    most = max(1, min(DRAIN_STEPS, -(-sum(generating) // len(generating))))
    left = min(steps_left, most) or most
    return -(-backlog // left), left - 1


class RankChoice(DecodeChoice):
    """Chooses as another decode choice does, and then among the ranks of that worker's group which step together."""

    def __init__(self, choose: DecodeChoice, ranks: Literal["adp", "least_tokens", "round_robin"]) -> None:
        self._choose, self._ranks, self._turn = choose, ranks, 0

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        chosen = self._choose(request, candidates)
        if chosen is None or not chosen.group:
            return chosen
        group = [candidate for candidate in candidates if candidate.group == chosen.group]
        blocks = blocks_for(request.prompt_tokens, chosen.block_size)
        ranks = [rank for rank in group if blocks <= rank.blocks_free] or group
        if self._ranks == "round_robin":
            self._turn += 1
            return ranks[self._turn % len(ranks)]
        ranks.sort(key=lambda rank: rank is not chosen)  # the first of equal ones is taken
        active = [rank.running + rank.waiting for rank in ranks]
        if self._ranks == "least_tokens":
            active = [0] * len(ranks)
        # Of what a rank has cached, it computes and stores nothing.
        tokens = [_tokens(rank) - rank.cached_tokens for rank in ranks]
        return ranks[assign_longest_first([request.prompt_tokens], tokens, active)[0]]

    @property
    def static_score(self) -> Callable[[Candidate], float] | None:
        return self._choose.static_score

    def expect_output(self, tokens: float) -> None:
        self._choose.expect_output(tokens)


def _tokens(rank: Candidate) -> int:
    """The tokens that it holds, and those that it has yet to compute."""
    return (rank.blocks_total - rank.blocks_free) * rank.block_size + rank.waiting_tokens + rank.placed_tokens
