"""From two looks at a fleet to the load between them, as `ratio` wants it: how much came, how much one worker can do.

Pure but for what it learns of step times and sequence lengths; whoever looks (controller or simulator) owns the clock.
"""

from __future__ import annotations

import msgspec

from orchestrator.policy.predict import LineFit, Predictor
from orchestrator.policy.ratio import LoadSample
from orchestrator.types import Offered

# What decode memory is filled to: sequences grow. Prefill needs no such room, since prompts can go local.
TARGET_USAGE = 0.8
MEAN_PROMPT_TOKENS = 1024  # where none came
_CONTEXT_WEIGHT = 0.3


class Look(msgspec.Struct, frozen=True):
    """The fleet at one moment."""

    at: float  # unix seconds
    offered: Offered  # since it began to be counted
    queued_prefill_tokens: int
    holding: int  # sequences with KV on decode workers
    waiting: int  # sequences that wait for room there
    held_tokens: int  # of the KV in use on decode workers
    worker_tokens: int  # that one decode worker's KV pool holds
    worker_sequences: int  # at most in one decode worker's batch


class LoadSampler:
    """Feed it steps; each look gives the load since the last one."""

    def __init__(self, tpot_slo_s: float, prior_step_s: float = 0.0) -> None:
        self._tpot_slo_s = tpot_slo_s
        self._step_s = LineFit(0.0, prior_step_s)  # by sequences decoding
        self._context_tokens = 0.0  # per sequence
        self._last: Look | None = None

    def observe_step(self, sequences: int, seconds: float) -> None:
        """A decode step without any prefill in it: that work is counted as prefill."""
        if sequences > 0 and seconds > 0:
            self._step_s.observe(sequences, seconds)

    def sample(self, look: Look, predictor: Predictor) -> LoadSample | None:
        """None for the first look."""
        last, self._last = self._last, look
        if look.holding:
            mean_tokens = look.held_tokens / look.holding
            weight = _CONTEXT_WEIGHT if self._context_tokens else 1.0
            self._context_tokens += weight * (mean_tokens - self._context_tokens)
        if last is None or look.at <= last.at:
            return None
        requests = look.offered.requests - last.offered.requests
        tokens = look.offered.prefill_tokens - last.offered.prefill_tokens
        prompt_tokens = max(1, tokens // requests) if requests > 0 else MEAN_PROMPT_TOKENS
        concurrency = self._concurrency(look)
        step_s = self._step_s.at(concurrency)
        return LoadSample(
            at=look.at,
            period_s=look.at - last.at,
            offered_requests=requests,
            offered_prefill_tokens=tokens,
            offered_output_tokens=look.offered.output_tokens - last.offered.output_tokens,
            queued_prefill_tokens=look.queued_prefill_tokens,
            decode_held=(look.holding + look.waiting) / concurrency,
            prefill_s_per_token=predictor.prefill_s(prompt_tokens) / prompt_tokens,
            decode_tokens_per_s=concurrency / step_s if step_s > 0 else 0.0,
        )

    def _concurrency(self, look: Look) -> float:
        """Sequences that keep one decode worker full: its batch, its memory, or its steps at the TPOT objective."""
        room = TARGET_USAGE * look.worker_tokens / max(1.0, self._context_tokens)
        fit = self._step_s
        in_time = (self._tpot_slo_s - fit.intercept) / fit.slope if fit.slope > 0 else room
        return max(1.0, min(look.worker_sequences, room, in_time))


def offered_since(before: dict[str, Offered], now: dict[str, Offered]) -> Offered:
    """What came to all frontends between two readings of their counts. A new one's all came since."""
    total = Offered()
    for name, count in now.items():
        total += count - before.get(name, Offered())
    return total
