"""What is measured of requests: feeds the predictor, the metrics and the dashboard's figures with the times of each
stage, when the stage ends, and counts who met their objectives. Each end is a log line, logger `pd.request`, of which
the request's frontend is told.

Reads requests and decides nothing. Times are seconds of the router's monotonic clock.
"""

from __future__ import annotations

import logging
import time

import msgspec

from orchestrator.config.settings import SLOConfig
from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import WorkerView
from orchestrator.policy.decode_choice import DecodeChoice
from orchestrator.policy.policies import haste, latest_tpot
from orchestrator.policy.predict.estimates import LatePairs
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.policy.prefix_keys import ReuseCounter
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.process.telemetry.requests import Recent, RequestLine
from orchestrator.router.request import ActiveRequest, Prefilling, State, Submitted
from orchestrator.types import Link, Offered

ended_log = logging.getLogger("pd.request")


class Learning:
    def __init__(self, fleet: Fleet, choose: DecodeChoice, slo: SLOConfig, metrics: Metrics) -> None:
        self.predictor, self.recent = Predictor(), Recent()
        self._fleet, self._choose, self._slo, self._metrics = fleet, choose, slo, metrics
        self.offered, self.reuse, self.tpot = Offered(), ReuseCounter(), latest_tpot(slo, self.predictor)
        self.late = LatePairs()
        # By decode worker, the prefill workers from which KV has come. Not a set of pairs: a large fleet has 10,000s.
        self._connected: dict[str, set[str]] = {}

    def arrived(self, request: ActiveRequest, block_size: int) -> None:
        """Count a request that was placed or refused. Call it once per request."""
        info, placed = request.parsed.info, request.placed
        shared = self.reuse.arrived(info.prompt_tokens, request.parsed.prefix_keys, block_size, request.accepted_at)
        self.tpot.came(info.tpot_slo_s)
        expected = self.predictor.output_tokens
        output_tokens = min(info.max_new_tokens, expected) if info.max_new_tokens else expected
        most = max(1, info.prompt_tokens - shared)
        at_prefill = min(most, placed.at_prefill_tokens) if placed is not None else most
        at_decode = min(most, placed.at_decode_tokens) if placed is not None else most
        self.offered += Offered.one(at_prefill, at_decode, output_tokens, haste(info.ttft_slo_s, self._slo))

    def refused_unread(self, slo_class: str) -> None:
        """Count a request that was refused before it was read, as one of mean size. `slo_class`: as its client says."""
        self._judge(slo_class if slo_class in self._slo.classes else "", late_first=True, late_tokens=None)
        so_far = self.offered
        count = max(1, so_far.requests)
        refused = Offered(ended=1, late_first=1, late=1)
        self.offered += refused + Offered.one(
            so_far.prefill_tokens // count, so_far.local_tokens // count, self.predictor.output_tokens
        )

    def ended(self, request: ActiveRequest, state: State, now: float) -> None:
        """Count it, and write its line. Call it once for each request that was taken or refused."""
        if state is State.FINISHED:
            self._finished(request, now)
        if state not in (State.ABORTED, State.INVALID):  # which say nothing about the fleet
            self._judge_ended(request, state, now)
        self._metrics.requests.labels(state.value).inc()
        line = describe(request, now)
        self.recent.ended(line, now)
        if ended_log.isEnabledFor(logging.INFO):
            ended_log.info("%s", msgspec.json.encode(line).decode())
        if request.parsed.on_request_ended is not None:
            request.parsed.on_request_ended(line)

    def _judge_ended(self, request: ActiveRequest, state: State, now: float) -> None:
        late_first, late_tokens = True, False
        first, count = request.answer.first_token_at, len(request.answer.tokens)
        if state is State.FINISHED and first is not None:
            own = request.parsed.info
            late_first = first - request.accepted_at > (own.ttft_slo_s or self._slo.ttft_s)
            late_tokens = count > 1 and (now - first) / (count - 1) > (own.tpot_slo_s or self._slo.tpot_s)
        late = late_first or late_tokens
        self._judge(request.parsed.info.slo_class, late_first, late_tokens if count > 1 else None)
        self.offered += Offered(ended=1, late_first=int(late_first), late_tokens=int(late_tokens), late=int(late))

    def _judge(self, slo_class: str, late_first: bool, late_tokens: bool | None) -> None:
        """`late_tokens` is None where there was no second token."""
        self._metrics.objectives.labels(slo_class, "ttft", str(not late_first).lower()).inc()
        if late_tokens is not None:
            self._metrics.objectives.labels(slo_class, "tpot", str(not late_tokens).lower()).inc()
        self.recent.judged[slo_class] += 1
        self.recent.met[slo_class] += not (late_first or late_tokens)

    def claimed(self, request: ActiveRequest) -> None:
        assert request.prefill is not None
        placed, queued_s = request.placed, request.prefill.queued_s
        self._metrics.queue_wait_s.observe(queued_s)
        self.recent.queue_wait.add(queued_s)
        if placed is not None:
            self.predictor.observe_wait(placed.uncached_tokens, placed.backlog_s, queued_s)

    def prefilled(self, request: ActiveRequest, worker: WorkerView | None) -> None:
        """Record a prefill by the worker's own rate: a request's time includes the other prompts of its batch."""
        assert request.prefill is not None
        self._metrics.prefill_s.observe(request.prefill.compute_s)
        self._metrics.prefix_hit_tokens.labels("prefill").inc(request.prefill.cached_tokens)
        tokens_per_s = worker.load.prefill_tokens_per_s if worker is not None and worker.load is not None else 0.0
        computed = request.parsed.info.prompt_tokens - request.cached_tokens
        if worker is not None and computed > 0 and tokens_per_s > 0:
            self.predictor.observe_prefill(worker.info.id, computed, computed / tokens_per_s)

    def came_early(self, request: ActiveRequest, now: float) -> None:
        """The client gets the prefill engine's token. The outputs of the decode engine will not have it."""
        self._metrics.first_tokens_early.inc()
        self.recent.ttft.add(now - request.accepted_at)
        self.recent.output_tokens += 1

    def began(self, request: ActiveRequest, tokens: int, had_first: bool, now: float) -> None:
        """The first outputs of an attempt, of so many tokens. `had_first`: the client had a token before."""
        if not had_first and request.answer.first_token_at is not None:
            self.recent.ttft.add(now - request.accepted_at)
        self.recent.output_tokens += tokens

    def streamed(self, tokens: int, gap_s: float) -> None:
        """The client gets so many tokens, so long after those before."""
        self.recent.itl.add(gap_s)
        self.recent.output_tokens += tokens

    def first_token(self, request: ActiveRequest, link: Link, now: float, computed: int | None) -> None:
        """Record the decode engine's first token. Call it before the request moves to DECODING. `link`: over which the
        KV of a remote prefill came. `computed`: so many tokens of the prompt the engine says to have computed, since
        none came: but the last one where its own cache has the rest. A prefix that was to be fetched may not have."""
        decode, prompt_tokens, prefill = request.decode, request.parsed.info.prompt_tokens, request.prefill
        if prefill is not None and prefill.ended_at is not None:
            self._metrics.kv_exposed_s.observe(now - prefill.ended_at)
        if prefill is not None and decode is not None:
            if computed is not None and computed > 1:
                self._late(prefill, decode, now)
                return  # how long this took says nothing of the link
            self.recent.transferred[f"{prefill.worker_id} {decode.worker_id}"] += prompt_tokens
            self.late.came(prefill.worker_id, decode.worker_id)
        if decode is None or request.attempt > 1:
            return  # a retry's times are not those of a healthy request
        if request.state is State.LOCAL:
            own_tokens = prompt_tokens - request.cached_tokens if computed is None else computed
            tokens = max(1, own_tokens) + decode.ahead_tokens
            tokens += request.placed.adapter_tokens if request.placed is not None else 0
            self.predictor.observe_local(decode.worker_id, tokens, now - decode.at)
        else:
            self._transferred(request, link, now)

    def kv_late(self, request: ActiveRequest, link: Link, now: float) -> None:
        """The attempt is given up, because its KV has not come by now. It takes longer than this: a link too slow for
        all prompts would never be known as such by those whose KV comes."""
        decode, prefill = request.decode, request.prefill
        if decode is None or prefill is None or not self._late(prefill, decode, now):
            return
        self._transferred(request, link, now)

    def given_up(self, request: ActiveRequest, why: str, now: float) -> None:
        """The engine has ended it. One without pixels does so where their KV has not come, before any token."""
        decode, prefill = request.decode, request.prefill
        without_pixels = request.state is State.TRANSFERRING and request.parsed.frames_with_kv is not None
        if without_pixels and why == "engine_error" and decode is not None and prefill is not None:
            self._late(prefill, decode, now)

    def _late(self, prefill: Prefilling, decode: Submitted, now: float) -> bool:
        """Whether it counts. The KV of a worker that has gone lacks for that reason alone."""
        return not self._has_gone(prefill) and self.late.late(prefill.worker_id, decode.worker_id, now)

    def _has_gone(self, prefill: Prefilling) -> bool:
        """Its worker has been forgotten, and nothing would forget it again; another process may have its id."""
        view = self._fleet.workers.get(prefill.worker_id)
        return view is None or view.info.kv.engine_id != prefill.source.endpoint.engine_id

    def _transferred(self, request: ActiveRequest, link: Link, now: float) -> None:
        """Record how long the KV has taken after the end of its prefill."""
        decode, prefill, prompt_tokens = request.decode, request.prefill, request.parsed.info.prompt_tokens
        if (
            decode is None
            or prefill is None
            or prefill.ended_at is None
            or request.attempt > 1
            or self._has_gone(prefill)
        ):
            return
        connected = self._connected.setdefault(decode.worker_id, set())
        if prefill.worker_id in connected:
            exposed_s = max(0.0, now - prefill.ended_at)
            self.predictor.observe_transfer(prompt_tokens, exposed_s)
            self.predictor.links.observe(link, decode.lacking_tokens, exposed_s)
        connected.add(prefill.worker_id)  # the first waits for the connection, and none after it does

    def forget(self, worker_id: str) -> None:
        """The worker is gone: what was measured of it says nothing about another."""
        self.predictor.forget(worker_id)
        self.late.forget(worker_id)
        self._connected.pop(worker_id, None)
        for connected in self._connected.values():
            connected.discard(worker_id)

    def _finished(self, request: ActiveRequest, now: float) -> None:
        answer = request.answer
        count = len(answer.tokens)
        if count == 0:
            return
        self.predictor.observe_output(count)
        self._choose.expect_output(self.predictor.output_tokens)
        if count > 1 and answer.decoding_at is not None and request.decode_worker and request.attempt == 1:
            tpot_s = (now - answer.decoding_at) / (count - 1)
            concurrent_requests = request.decode.concurrent_requests if request.decode is not None else 0
            self.predictor.observe_itl(request.decode_worker, tpot_s, concurrent_requests + 1)


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
