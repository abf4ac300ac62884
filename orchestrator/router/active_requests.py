"""The requests of one frontend that have not ended, their output queue, and how they end: each with a log line, logger
`pd.request`, with the times that explain a slow one."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from orchestrator.fleet.prefixes import PrefixView
from orchestrator.policy.placement import Reject
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.process.telemetry.recent import Recent
from orchestrator.process.telemetry.request_line import RequestLine
from orchestrator.router.codec import Batch, Codec
from orchestrator.router.learning import Learning
from orchestrator.router.request import ActiveRequest, Failure, State

log = logging.getLogger("pd.router")
ended_log = logging.getLogger("pd.request")


class ActiveRequests:
    def __init__(
        self, codec: Codec, learning: Learning, recent: Recent, prefixes: PrefixView, metrics: Metrics
    ) -> None:
        self._codec, self._learning, self._recent, self._prefixes = codec, learning, recent, prefixes
        self._metrics = metrics
        self.by_id: dict[str, ActiveRequest] = {}
        self.batches: asyncio.Queue[Batch] = asyncio.Queue()

    def add(self, active: ActiveRequest) -> None:
        self.by_id[active.id] = active

    def all(self) -> list[ActiveRequest]:
        """A copy, so that a loop over it may end requests."""
        return list(self.by_id.values())

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
        self.batches.put_nowait(Batch([self._codec.failure(active.id, failure)], time.monotonic()))

    def end(self, active: ActiveRequest, state: State) -> None:
        """End a request: count it, log it, and pass its figures to learning. Raises IllegalTransition."""
        now = time.monotonic()
        if state is State.FINISHED:
            self._learning.finished(active, now)
        self._learning.ended(active, state, now)
        active.move(state)
        del self.by_id[active.id]
        self._prefixes.index.expected.settled(active.id)
        self._metrics.requests.labels(state.value).inc()
        line = describe(active, now)
        self._recent.ended(line, now)
        if ended_log.isEnabledFor(logging.INFO):
            ended_log.info("%s", msgspec.json.encode(line).decode())
        if active.parsed.on_request_ended is not None:
            active.parsed.on_request_ended(line)


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
