"""Balance among the ranks of a group that steps together: each step lasts as long as that of the rank with most tokens.

Which rank of the chosen group gets a request (`assign_longest_first`, as NVIDIA's ADP balance strategy has it, in
TensorRT-LLM's blog post 10), and how many prompt tokens each rank computes in a step (`level_chunks`, this project's).
NVIDIA's strategy also holds prompts until each rank has one; cutting them into level chunks takes the place of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.policy.predict.estimates import FIT_MEMORY, MIN_FIT_SAMPLES, LineFit

DRAIN_STEPS = 32  # in which the prompts of all ranks should be computed, where many sequences decode
LEAST_ALONE = 512  # prompt tokens of a rank in a step in which none decodes: each step takes a time of its own
_GROWTH = 2  # of chunks beyond what steps have had of late: more tokens may take longer than a line says


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


def pace(
    backlog: int, generating: Sequence[int], full: bool, steps_left: int, worth: int = 0, each: int = 1
) -> tuple[int, int]:
    """A rank's floor for `level_chunks`, and the steps that are then left for its prompts, to pass with the next call.

    Its prompts are computed within so many steps as sequences on a rank (the mean) wait for them, at most
    `DRAIN_STEPS`, although the other ranks may have none: where few wait, little is gained by a later first token. Of
    the tokens that are `generating` each sequence has `each`.
    Where its batch is `full` prompts wait for a place anyway, and only the number of them that all ranks compute
    counts: no floor but `worth`, the tokens that are worth a step (`ChunkWorth`). Where none decodes the floor is
    `LEAST_ALONE`.
    """
    if not any(generating):
        return min(backlog, LEAST_ALONE), 0
    if not backlog or full:
        return min(backlog, worth), 0
    most = max(1, min(DRAIN_STEPS, -(-sum(generating) // (each * len(generating)))))
    left = min(steps_left, most) or most
    return max(-(-backlog // left), min(backlog, worth)), left - 1


class ChunkWorth:
    """The fewest tokens of a prompt that are worth a step, learned from those that have ended.

    A prompt takes a step more for each time that it is cut. For that its sequence waits, and all sequences wait for
    what a step takes for having any prompt. They are spared what the chunk takes, on those ranks that compute as many
    tokens in that step. So little is spared where steps take hardly longer for more tokens, and prompts are whole
    there, but not at once: no chunk makes a step longer by more than `_GROWTH` times what prompts have of late.
    """

    def __init__(self, ranks: int, each: int = 1) -> None:
        """`each`: the tokens that a sequence decodes in a step, its drafts included."""
        self._ranks, self._each, self._longest = ranks, each, 0.0
        # By tokens, of steps without prompts; by those that prompts make the step longer, what it takes beyond that.
        self._without, self._beyond = LineFit(0.0, 1.0), LineFit(0.0)

    def ended(self, generating: Sequence[int], chunks: Sequence[int], seconds: float) -> None:
        """A step has, in which the ranks decoded so many tokens, and computed so many of prompts."""
        most = max(generating)
        if not any(chunks):
            self._without.observe(most, seconds)
        elif self._without.samples >= MIN_FIT_SAMPLES:
            longest = max(decode + chunk for decode, chunk in zip(generating, chunks, strict=True))
            self._beyond.observe(longest - most, seconds - self._without.at(most))
            self._longest = max(longest - most, self._longest * (1 - 1 / FIT_MEMORY))

    def tokens(self, generating: int) -> int:
        """Beside so many tokens to decode on all ranks; 0 until that is known."""
        if not (generating and self._beyond.samples >= MIN_FIT_SAMPLES):
            return 0
        sequences = generating / self._each
        waits_s = self._without.at(generating / self._ranks) / sequences + max(0.0, self._beyond.intercept)
        spared_s, most = self._beyond.slope * (1 - 1 / self._ranks), _GROWTH * self._longest
        return int(min(waits_s / spared_s, most) if spared_s > 0 else most)
