"""How many prompt tokens a prefill worker computes in a step beside sequences that it still decodes since it was a
decode worker, so that these get their next token within the objective.

A step lasts as long as the prompts in it take, and a prefill worker has more of them than one that decodes: in whole
batches each sequence there would wait for all prompts that it takes. What a decode worker prefills itself is chosen by
`placement`, which counts the harm, and is computed as vLLM does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.policy.predict.estimates import Smoothed

STEP_MARGIN = 0.95  # of the objective: steps vary
_WEIGHT = 0.1  # of a step in the mean of those without a prompt
_MEMORY_TOKENS = 1024.0  # of prompts in one step, after which what earlier steps said of their time weighs 1/e
_LEAST_S = 1e-9  # of a token
_SURPRISE = 2  # a step that takes less by more than this factor halves the weight of those before


def prompt_tokens_beside(tpot_s: float, beside_s: float, s_per_token: float) -> int:
    """Prompt tokens, at least one, for a step that without them takes `beside_s` for the sequences that decode in it.

    The step then lasts for `STEP_MARGIN` of the objective `tpot_s`; or for twice `beside_s`, where that is longer, so
    that a prompt takes at most twice as long as by itself: there the sequences are late, or nearly, without it.
    """
    return max(1, int(max(STEP_MARGIN * tpot_s - beside_s, beside_s) / max(s_per_token, _LEAST_S)))


def share_of(tokens: int, prompts: Sequence[int]) -> int:
    """The most that each of these prompts may have of a step for all of them to have `tokens`; all where they fit."""
    left = tokens
    for place, prompt in enumerate(sorted(prompts)):
        sharing = len(prompts) - place
        if prompt * sharing > left:
            return left // sharing
        left -= prompt
    return tokens


class StepTimes:
    """What the steps of one engine take, learned from those that have ended.

    A step takes its time without a prompt, and so much for each prompt token: the line of least squares, in which a
    step weighs by the square of its prompt tokens. One with a few of them tells next to nothing of what they take.
    Where that keeps steps short that take much less, it is soon forgotten: an engine's first prompt may have waited
    for a compiler.
    """

    def __init__(self, tpot_s: float) -> None:
        """`tpot_s`: the objective; 0: none."""
        self._tpot_s = tpot_s
        self._beside_s = Smoothed(0.0, _WEIGHT)
        self._tokens_x_s = self._tokens_squared = 0.0  # sums over steps in which earlier ones count less

    def ended(self, prompt_tokens: int, sequences: int, seconds: float) -> None:
        """A step has ended, in which so many sequences decoded."""
        if prompt_tokens:
            kept = math.exp(-((prompt_tokens / _MEMORY_TOKENS) ** 2))
            took_s = seconds - self._beside_s.value
            expected_s = prompt_tokens * self._s_per_token
            if expected_s > max(self._beside_s.value, _SURPRISE * took_s):
                kept = min(kept, 0.5)
            self._tokens_x_s = self._tokens_x_s * kept + prompt_tokens * took_s
            self._tokens_squared = self._tokens_squared * kept + prompt_tokens**2
        elif sequences:
            self._beside_s.observe(seconds)

    def prompt_tokens(self) -> int | None:
        """For the next step, if sequences decode in it; None: as many as fit, until a step with a prompt has ended."""
        if not (self._tpot_s and self._tokens_squared):
            return None
        return prompt_tokens_beside(self._tpot_s, self._beside_s.value, self._s_per_token)

    @property
    def _s_per_token(self) -> float:
        return self._tokens_x_s / self._tokens_squared if self._tokens_squared else 0.0
