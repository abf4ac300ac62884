"""One structured log line per ended request, logger `pd.request`, with the times that explain a slow one."""

from __future__ import annotations

import logging
import time

import msgspec

from orchestrator.process.telemetry.request_line import RequestLine
from orchestrator.router.request import ActiveRequest

log = logging.getLogger("pd.request")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds) * 1e3, 2)


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


def log_ended(line: RequestLine) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s", msgspec.json.encode(line).decode())
