"""Chooses the tokens that the client gets: the prefill engine's first token where it may be sent early, then decode's.

Both engines sample the first token of a remote prefill. Where the client gets the prefill engine's token at once, the
decode engine's own is removed if it is the same. If it differs, the attempt is given up, since a sent token cannot be
taken back. Sends nothing.
"""

from __future__ import annotations

import enum
import logging
from typing import Any

from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.router.codec import Batch, Codec
from orchestrator.router.request import ActiveRequest, Answer, State
from orchestrator.types import FinishReason
from orchestrator.wire.messages import MessageError, Prefilled

log = logging.getLogger("pd.router")


class OutputAction(enum.Enum):
    """What to do with one output of a decode worker."""

    DELIVER = enum.auto()
    KNOWN = enum.auto()  # the client has all of it from the prefill engine
    DIVERGED = enum.auto()  # decode sampled another first token than the client has


class Answers:
    """Writes the `answer` of requests."""

    def __init__(self, codec: Codec, early_first_token: bool, metrics: Metrics) -> None:
        """`early_first_token`: `routing.first_token` is `prefill`."""
        self._codec, self._early_first_token, self._metrics = codec, early_first_token, metrics

    def from_prefill(self, active: ActiveRequest, said: Prefilled, payload: list[bytes], now: float) -> Batch | None:
        """The first output of the answer, to deliver now; None if the client must wait for decode's."""
        if not payload or not self._may_come_early(active):
            return None
        try:
            batch = self._codec.decode_outputs(payload, said.sent_at, now)
        except MessageError as error:
            self._metrics.dropped.labels("corrupt").inc()
            log.error("worker %s sent a first token that cannot be read: %s", active.prefill_worker, error)
            return None
        (output,) = batch.outputs
        if output.finish_reason != FinishReason.LENGTH or not output.new_token_ids:
            return None  # the token is the last one, or was withheld. The decode engine reports the finish reason.
        (token,) = output.new_token_ids
        answer = active.answer
        answer.early_token, answer.first_token_at = token, now
        answer.tokens.append(token)
        self._metrics.first_tokens_early.inc()
        batch.outputs = [self._codec.as_first(output)]
        return batch

    def _may_come_early(self, active: ActiveRequest) -> bool:
        """Whether decode will sample the same token, more tokens follow, nothing was sent yet, and another attempt
        could continue if decode's token differs after all."""
        parsed = active.parsed
        return (
            self._early_first_token
            and parsed.early_token
            and parsed.resumable
            and parsed.info.max_new_tokens > 1
            and active.state is State.TRANSFERRING
            and not active.answer.tokens
        )

    def record_output(self, answer: Answer, output: Any, now: float) -> None:
        """Record an output after the attempt's first token."""
        answer.last_output_at = now
        answer.tokens.extend(output.new_token_ids)

    def from_decode(self, active: ActiveRequest, output: Any, now: float) -> OutputAction:
        """Record an output of the decode worker up to the attempt's first token. Removes the first token from `output`
        if the client has it already."""
        answer = active.answer
        answer.last_output_at = now
        if output.new_token_ids and answer.early_token is not None:
            if output.new_token_ids[0] != answer.early_token:
                self._metrics.first_token_mismatches.inc()
                return OutputAction.DIVERGED
            answer.early_token = None
            self._codec.drop_first(output)
            answer.decoding_at = answer.decoding_at or now
            if not output.new_token_ids and output.finish_reason is None:
                return OutputAction.KNOWN
        if output.new_token_ids and not answer.tokens and (prefill := active.prefill) is not None:
            if prefill.ended_at is not None or answer.held_since:
                # Without `Prefilled` the counts are unknown, and a cache hit must not be counted as created.
                self._codec.count_prompt(output, prefill.cached_tokens, prefill.created_cache_tokens)
        if output.new_token_ids:
            answer.decoding_at = answer.decoding_at or now
            answer.first_token_at = answer.first_token_at or now
            answer.tokens.extend(output.new_token_ids)
        return OutputAction.DELIVER
