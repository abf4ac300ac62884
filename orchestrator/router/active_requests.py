"""The requests of one frontend that have not ended: what their clients get, and how they end.

Both engines sample the first token of a remote prefill. Where the client gets the prefill engine's token at once, the
decode engine's own is removed if it is the same. If it differs, the attempt is given up, since a sent token cannot be
taken back. Each end is a log line, logger `pd.request`, with the times that explain a slow request. Sends nothing.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from typing import Any

import msgspec

from orchestrator.policy.placement import Reject
from orchestrator.policy.prefix_index import PrefixIndex
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.process.telemetry.requests import RequestLine
from orchestrator.router.learning import Learning
from orchestrator.router.request import ActiveRequest, Answer, Batch, Codec, Failure, State
from orchestrator.types import FinishReason
from orchestrator.wire.messages import MessageError, Prefilled

log = logging.getLogger("pd.router")
ended_log = logging.getLogger("pd.request")


class OutputAction(enum.Enum):
    """What to do with one output of a decode worker."""

    DELIVER = enum.auto()
    KNOWN = enum.auto()  # the client has all of it from the prefill engine
    DIVERGED = enum.auto()  # decode sampled another first token than the client has


class ActiveRequests:
    """Writes the `answer` of requests."""

    def __init__(
        self,
        codec: Codec,
        early_first_token: bool,
        learning: Learning,
        prefixes: PrefixIndex,
        metrics: Metrics,
    ) -> None:
        """`early_first_token`: `routing.first_token` is `prefill`."""
        self._codec, self._early_first_token, self._metrics = codec, early_first_token, metrics
        self._learning, self._prefixes = learning, prefixes
        self.by_id: dict[str, ActiveRequest] = {}
        self._by_worker: dict[str, dict[str, ActiveRequest]] = {}
        self.batches: asyncio.Queue[Batch] = asyncio.Queue()

    def add(self, active: ActiveRequest) -> None:
        self.by_id[active.id], active.by_worker = active, self._by_worker

    def all(self) -> list[ActiveRequest]:
        """A copy, so that a loop over it may end requests."""
        return list(self.by_id.values())

    def of(self, *worker_ids: str) -> list[ActiveRequest]:
        """Those that one of these workers prefills, has prefilled or decodes. A copy too."""
        found: dict[str, ActiveRequest] = {}
        for worker_id in worker_ids:
            found |= self._by_worker.get(worker_id, {})
        return list(found.values())

    def current(self, request_id: str, attempt: int) -> ActiveRequest | None:
        """The request, if it has not ended and this attempt is its current one; else None."""
        active = self.by_id.get(request_id)
        return active if active is not None and active.attempt == attempt else None

    def fail(self, active: ActiveRequest, failure: Failure) -> None:
        """End a request as failed, and send the reason to its client."""
        log.log(
            logging.WARNING if failure.by_client else logging.ERROR,
            "request %s failed: %s",
            active.parsed.label,
            failure.why,
        )
        self._tell(active, failure)
        self.end(active, State.FAILED)

    def refuse(self, active: ActiveRequest, rejected: Reject) -> None:
        """End a request that was accepted, and of which its client has no token, as refused."""
        self._metrics.placements.labels("reject", rejected.reason).inc()
        self._tell(active, Failure(rejected.reason, rejected=rejected))
        self.end(active, State.REJECTED)

    def _tell(self, active: ActiveRequest, failure: Failure) -> None:
        self.batches.put_nowait(Batch([self._codec.failure(active.parsed, failure)], time.monotonic()))

    def end(self, active: ActiveRequest, state: State) -> None:
        """End a request, and count it. Raises IllegalTransition."""
        active.move(state)
        del self.by_id[active.id]
        active.leave_workers()
        self._prefixes.expected.settled(active.id)
        try:
            self._count(active, state, time.monotonic())
        except Exception:  # its client gets its end all the same
            log.exception("request %s ended as %s, and was not counted", active.parsed.label, state.value)

    def _count(self, active: ActiveRequest, state: State, now: float) -> None:
        """Log it, and pass its figures to learning."""
        if state is State.FINISHED:
            self._learning.finished(active, now)
        self._learning.ended(active, state, now)
        self._metrics.requests.labels(state.value).inc()
        line = describe(active, now)
        self._learning.recent.ended(line, now)
        if ended_log.isEnabledFor(logging.INFO):
            ended_log.info("%s", msgspec.json.encode(line).decode())
        if active.parsed.on_request_ended is not None:
            active.parsed.on_request_ended(line)

    # ---- what clients get --------------------------------------------------------------------------------------

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
        batch.outputs = [self._codec.as_first(output)]  # if that fails, nothing is noted that the client has not got
        answer = active.answer
        answer.early_token, answer.first_token_at = token, now
        answer.tokens.append(token)
        self._learning.came_early(active, now)
        return batch

    def _may_come_early(self, active: ActiveRequest) -> bool:
        """Whether decode will sample the same token, more tokens follow, and nothing was sent yet."""
        parsed = active.parsed
        return (
            self._early_first_token
            and parsed.early_token
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
            self._codec.drop_told(output, 1)
            answer.decoding_at = answer.decoding_at or now
            if not output.new_token_ids and output.finish_reason is None:
                return OutputAction.KNOWN
        elif active.resumed:
            self._codec.drop_told(output, 0)
        if output.new_token_ids and not answer.tokens and (prefill := active.prefill) is not None:
            if prefill.ended_at is not None or answer.held_since:
                # Without `Prefilled` the counts are unknown, and a cache hit must not be counted as created.
                self._codec.count_prompt(output, prefill.cached_tokens, prefill.created_cache_tokens)
        if output.new_token_ids:
            answer.decoding_at = answer.decoding_at or now
            answer.first_token_at = answer.first_token_at or now
            answer.tokens.extend(output.new_token_ids)
        return OutputAction.DELIVER


def describe(request: ActiveRequest, now: float) -> RequestLine:
    """The line of a request that has just ended. `now`: the router's monotonic clock, seconds."""
    parsed, answer = request.parsed, request.answer
    placed, prefill, decode = request.placed, request.prefill, request.decode
    first, decoding = answer.first_token_at, answer.decoding_at
    ended = prefill.ended_at if prefill is not None else None
    local_prefill_s = first - decode.at if first and decode is not None else None
    accepted_at = time.time() - (now - request.accepted_at)  # unix seconds
    received_at = parsed.received_at or accepted_at
    return RequestLine(
        id=parsed.label,
        outcome=request.state.value,
        decision=placed.decision if placed is not None else "",
        reason=placed.reason if placed is not None else "",
        prompt_tokens=parsed.info.prompt_tokens,
        output_tokens=len(answer.tokens),
        attempts=request.attempt,
        decode_worker=request.decode_worker,
        prefill_worker=request.prefill_worker,
        total_ms=_ms(now - request.accepted_at) or 0.0,
        ttft_ms=_ms(first - request.accepted_at) if first else None,
        queued_ms=_ms(prefill.queued_s) if prefill is not None else None,
        claim_ms=_ms(prefill.claim_s) if prefill is not None else None,
        prefill_ms=_ms(prefill.compute_s if prefill is not None else local_prefill_s),
        exposed_ms=_ms(decoding - ended) if decoding and ended else None,
        decode_ms=_ms(now - first) if first else None,
        cached_tokens=request.cached_tokens,
        retries=request.retries,
        arrived_at=round(received_at, 3),
        frontend_ms=_ms(accepted_at - received_at),
        sent_ms=_ms(decode.at - request.accepted_at) if decode is not None else None,
        chunks_ms=[_ms(end_s) or 0.0 for end_s in prefill.chunk_ends_s] if prefill is not None else [],
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds) * 1e3, 2)
