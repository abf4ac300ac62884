"""Feeds the predictor with what requests measured: each stage of a request's life, as it ends.

Reads requests, decides nothing. Times are the router's monotonic clock, seconds.
"""

from __future__ import annotations

from orchestrator.fleet.view import WorkerView
from orchestrator.policy.candidate import DecodeChoice
from orchestrator.policy.predict import Predictor
from orchestrator.router.request import ActiveRequest, State
from orchestrator.types import Offered, RequestInfo


class Learning:
    def __init__(self, predictor: Predictor, choose: DecodeChoice) -> None:
        self.predictor, self._choose = predictor, choose
        self.offered = Offered()

    def arrived(self, info: RequestInfo, uncached_tokens: int) -> None:
        """Once for each request, whatever becomes of it."""
        expected = self.predictor.output_tokens
        output_tokens = min(info.max_new_tokens, expected) if info.max_new_tokens else expected
        self.offered += Offered(1, max(1, uncached_tokens), output_tokens)

    def turned_away(self) -> None:
        """A request was refused before anything was known of it: counted as one like those before it."""
        so_far = self.offered
        mean_tokens = so_far.prefill_tokens // so_far.requests if so_far.requests else 0
        self.offered += Offered(1, mean_tokens, self.predictor.output_tokens)

    def claimed(self, request: ActiveRequest, queued_s: float) -> None:
        self.predictor.observe_wait(request.info.prompt_tokens, request.backlog_s, queued_s)

    def prefilled(self, request: ActiveRequest, cached_tokens: int, worker: WorkerView | None) -> None:
        """At the worker's own rate: of prompts that one batch computes together each would show the time of all."""
        tokens_per_s = worker.load.prefill_tokens_per_s if worker is not None and worker.load is not None else 0.0
        computed = request.info.prompt_tokens - cached_tokens
        if worker is not None and computed > 0 and tokens_per_s > 0:
            self.predictor.observe_prefill(worker.info.id, computed, computed / tokens_per_s)

    def first_token(self, request: ActiveRequest, now: float) -> None:
        """Call before the request moves on to decoding."""
        if request.decode_worker is None or request.submitted_at is None or request.attempt > 1:
            return  # a retry's times are not those of a healthy request
        if request.state is State.LOCAL:
            tokens = max(1, request.info.prompt_tokens - request.cached_tokens) + request.ahead_tokens
            self.predictor.observe_local(request.decode_worker, tokens, now - request.submitted_at)
        elif request.state is State.TRANSFERRING and request.prefilled_at is not None:
            self.predictor.observe_transfer(request.info.prompt_tokens, max(0.0, now - request.prefilled_at))

    def finished(self, request: ActiveRequest, now: float) -> None:
        count = len(request.tokens)
        if count == 0:
            return
        self.predictor.observe_output(count)
        self._choose.expect_output(self.predictor.output_tokens)
        if count > 1 and request.decoding_at is not None and request.decode_worker and request.attempt == 1:
            self.predictor.observe_itl(request.decode_worker, (now - request.decoding_at) / (count - 1))
