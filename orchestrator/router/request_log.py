"""One structured line per ended request, logger `pd.request`: enough to explain a slow one."""

from __future__ import annotations

import logging

import msgspec

from orchestrator.router.request import ActiveRequest

log = logging.getLogger("pd.request")


class RequestLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stages in milliseconds. `exposed_ms`: from the end of prefill compute to decode's first token."""

    id: str
    outcome: str
    decision: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    attempts: int
    decode_worker: str | None
    prefill_worker: str | None
    total_ms: float
    ttft_ms: float | None = None
    queued_ms: float | None = None
    prefill_ms: float | None = None
    exposed_ms: float | None = None
    decode_ms: float | None = None
    cached_tokens: int = 0  # of the prompt, where it was prefilled: believed if locally, counted if remotely
    retries: list[str] = []


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds) * 1e3, 2)


def describe(request: ActiveRequest, now: float) -> RequestLine:
    """The line of a request that has just ended. `now`: the router's monotonic clock, seconds."""
    asked, answer = request.asked, request.answer
    placed, prefill, decode = request.placed, request.prefill, request.decode
    first, decoding = answer.first_token_at, answer.decoding_at
    ended = prefill.ended_at if prefill is not None else None
    local_prefill_s = first - decode.at if first and decode is not None else None
    return RequestLine(
        id=asked.label,
        outcome=request.state.value,
        decision=placed.decision if placed is not None else "",
        reason=placed.reason if placed is not None else "",
        prompt_tokens=asked.info.prompt_tokens,
        output_tokens=len(answer.tokens),
        attempts=request.attempt,
        decode_worker=request.decode_worker,
        prefill_worker=request.prefill_worker,
        total_ms=_ms(now - request.accepted_at) or 0.0,
        ttft_ms=_ms(first - request.accepted_at) if first else None,
        queued_ms=_ms(prefill.queued_s) if prefill is not None else None,
        prefill_ms=_ms(prefill.compute_s if prefill is not None else local_prefill_s),
        exposed_ms=_ms(decoding - ended) if decoding and ended else None,
        decode_ms=_ms(now - first) if first else None,
        cached_tokens=request.cached_tokens,
        retries=request.retries,
    )


def log_ended(request: ActiveRequest, now: float) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s", msgspec.json.encode(describe(request, now)).decode())
