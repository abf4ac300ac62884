"""Balance among the ranks of a group that steps together: each step lasts as long as that of the rank with most tokens.

Which rank of the chosen group gets a request (`assign_longest_first`, as NVIDIA's ADP balance strategy has it, in
TensorRT-LLM's blog post 10), and how many prompt tokens each rank computes in a step (`level_chunks`, this project's).
NVIDIA's strategy also holds prompts until each rank has one; cutting them into level chunks takes the place of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

DRAIN_STEPS = 32  # in which the prompts of all ranks should be computed, where many sequences decode
LEAST_ALONE = 512  # prompt tokens of a rank in a step in which none decodes: each step takes a time of its own


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
    in `DRAIN_STEPS` steps. Where no rank decodes, as in a prefill group, it is at least their mean: a short prompt then
    waits for no long one beside it, and while all have much to do steps are as long as ever. It is more than every
    rank's `generating`, so that a rank without prompts cannot stall the others, and leaves room for each rank's
    `floors`, its fewest prompt tokens; it is at most `max_tokens`.
    """
    reach = [decode + prompt for decode, prompt in zip(generating, backlog, strict=True)]
    steps = DRAIN_STEPS if any(generating) else 1
    mean = math.ceil((sum(generating) + sum(backlog) / steps) / len(backlog))
    least = max(decode + floor for decode, floor in zip(generating, floors, strict=True))
    return min(max_tokens, max(min(reach), mean, least, max(generating) + 1))


def pace(backlog: int, generating: Sequence[int], full: bool, steps_left: int) -> tuple[int, int]:
    """A rank's floor for `level_chunks`, and the steps that are then left for its prompts, to pass with the next call.

    Its prompts are computed within so many steps as sequences `generating` on a rank (the mean) wait for them, at most
    `DRAIN_STEPS`, although the other ranks may have none: where few wait, little is gained by a later first token.
    Where its batch is `full` prompts wait for a place anyway, and only the number of them that all ranks compute
    counts: no floor. Where none decodes the floor is what is worth a step.
    """
    if not any(generating):
        return min(backlog, LEAST_ALONE), 0
    if not backlog or full:
        return 0, 0
    most = max(1, min(DRAIN_STEPS, -(-sum(generating) // len(generating))))
    left = min(steps_left, most) or most
    return -(-backlog // left), left - 1
