"""Feeds the predictor with what requests measured: each stage of a request's life, as it ends.

Reads requests, decides nothing. Times are the router's monotonic clock, seconds.
"""

from __future__ import annotations

from orchestrator.policy.predict import Predictor
from orchestrator.request import ActiveRequest, State


class Learning:
    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def claimed(self, request: ActiveRequest, queued_s: float) -> None:
        self.predictor.observe_wait(request.info.prompt_tokens, request.backlog_s, queued_s)

    def prefilled(self, request: ActiveRequest, worker_id: str, cached_tokens: int, seconds: float) -> None:
        computed = request.info.prompt_tokens - cached_tokens
        if computed > 0:
            self.predictor.observe_prefill(worker_id, computed, seconds)

    def first_token(self, request: ActiveRequest, now: float) -> None:
        """Call before the request moves on to decoding."""
        if request.decode_worker is None or request.submitted_at is None or request.attempt > 1:
            return  # a retry's times are not those of a healthy request
        if request.state is State.LOCAL:
            tokens = request.info.prompt_tokens + request.ahead_tokens
            self.predictor.observe_local(request.decode_worker, tokens, now - request.submitted_at)
        elif request.state is State.TRANSFERRING and request.prefilled_at is not None:
            self.predictor.observe_transfer(request.info.prompt_tokens, max(0.0, now - request.prefilled_at))

    def finished(self, request: ActiveRequest, now: float) -> None:
        count = len(request.tokens)
        if count == 0:
            return
        self.predictor.observe_output(count)
        if count > 1 and request.decoding_at is not None and request.decode_worker and request.attempt == 1:
            self.predictor.observe_itl(request.decode_worker, (now - request.decoding_at) / (count - 1))
