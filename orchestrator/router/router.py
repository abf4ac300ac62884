"""The life of a request: placed, queued or sent, bound to a decode worker, streamed, retried, ended.

Stands where an engine core client would: takes engine requests, gives engine outputs. What to do is decided in
`decider` and carried out by `dispatch`, which moves exist is said in `request`, who is there in `fleet`. It never looks
inside an engine request or output beyond what `Codec` says of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from orchestrator import metrics
from orchestrator.config.settings import Config
from orchestrator.fleet.prefixes import PrefixView
from orchestrator.fleet.queue_view import PrefillLink
from orchestrator.fleet.view import Fleet
from orchestrator.policy.candidate import DecodeChoice
from orchestrator.policy.placement import Reject, Remote
from orchestrator.policy.predict import Predictor
from orchestrator.router.codec import Batch, Codec
from orchestrator.router.decider import Decider
from orchestrator.router.dispatch import Dispatch
from orchestrator.router.first_token import FirstToken
from orchestrator.router.learning import Learning
from orchestrator.router.request import ActiveRequest, State
from orchestrator.router.request_log import log_ended
from orchestrator.wire.messages import Claimed, MessageError, Outputs, Prefilled, PrefillFailed, Rejected, ToFrontend
from orchestrator.wire.transport import FrontendTransport

log = logging.getLogger("pd.router")

# How long a request that was accepted already waits between looks for a decode worker to continue on.
REPLACE_INTERVAL_S = 0.1
STALL_CHECK_S = 1.0
# vLLM's FinishReason: an engine that ends a request this way has not answered it.
FINISH_ABORT, FINISH_ERROR = 2, 3


class Overloaded(Exception):
    """The fleet cannot take this request now. `status` is 429 (full) or 503 (nobody to answer)."""

    def __init__(self, reason: str, retry_after_s: float, status: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.status = status


class Router:
    """One per frontend process. All methods run on one event loop; none blocks."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        transport: FrontendTransport,
        prefill: PrefillLink,
        prefixes: PrefixView,
        codec: Codec,
        choose: DecodeChoice,
    ) -> None:
        self._routing, self._fleet, self._codec, self._prefixes = config.routing, fleet, codec, prefixes
        self._first_token = FirstToken(codec, config.routing.first_token == "prefill")
        self.learning = Learning(Predictor(prior_s_per_token=config.queue.seconds_per_token), choose)
        self._decider = Decider(config, fleet, prefill, prefixes, choose, self.learning)
        self._dispatch = Dispatch(
            *(fleet, transport, prefill, self._decider, config.routing.claim_timeout_s),
            on_unclaimed=lambda active: self._retry(active, "claim_timeout"),
        )
        self.requests: dict[str, ActiveRequest] = {}
        self.batches: asyncio.Queue[Batch] = asyncio.Queue()

    # ---- what the server calls ---------------------------------------------------------------------------------

    def admit(self) -> None:
        """Refuse early, before a response has begun. Raises Overloaded."""
        decision = self._decider.probe()
        if isinstance(decision, Reject):
            self._count_rejected(decision)
            self.learning.turned_away()
            raise _overloaded(decision)

    async def submit(self, request: Any) -> None:
        """Take a request; its outputs appear in `batches`. Raises Overloaded, and what the codec raises."""
        info, resumable, label = self._codec.describe(request)
        now = time.monotonic()
        active = ActiveRequest(info, self._codec.encode(request), resumable, label, accepted_at=now, last_heard_at=now)
        active.early_wanted = self._first_token.wanted(request, active)
        if not self._prefixes.empty:
            active.keys = self._codec.prefix_keys(request, self._fleet.block_size)
        self.requests[info.id] = active
        try:
            rejected = await self._place(active, deadline=None)
        except BaseException:
            self.abort([info.id])  # the client left while its request was being placed, or placing it met a defect
            raise
        if rejected is not None:
            self._count_rejected(rejected)
            self._end(active, State.REJECTED)
            raise _overloaded(rejected)

    def abort(self, request_ids: Iterable[str], to: State = State.ABORTED) -> None:
        """The client no longer wants these, or (`to` FINISHED) has all it needs, a stop string having been met.
        Unknown ids are ignored."""
        for request_id in request_ids:
            if active := self.requests.get(request_id):
                self._dispatch.withdraw(active)
                self._end(active, to)

    async def run(self) -> None:
        """Ends requests that stall. Runs until cancelled."""
        while True:
            await asyncio.sleep(STALL_CHECK_S)
            self._check_claimers()
            oldest = time.monotonic() - self._routing.stall_timeout_s
            for active in list(self.requests.values()):
                waits_for_worker = active.state in (State.TRANSFERRING, State.LOCAL, State.DECODING)
                if waits_for_worker and active.last_heard_at < oldest:
                    self._retry(active, "stalled", avoid=active.decode_worker)

    # ---- placing -----------------------------------------------------------------------------------------------

    async def _place(self, active: ActiveRequest, deadline: float | None) -> Reject | None:
        """Move a PLACING request on. With a deadline it waits for room until then and fails; without, the rejection is
        returned to the caller, who has not told the client anything yet."""
        while active.state is State.PLACING:
            decision = self._decider.decide(active)
            if isinstance(decision, Reject):
                if deadline is None:
                    return decision
                if time.monotonic() >= deadline:
                    self._fail(active, f"no decode worker took it over within its deadline ({decision.reason})")
                    return None
                await asyncio.sleep(REPLACE_INTERVAL_S)
                continue
            if isinstance(decision, Remote):
                placed = await self._dispatch.enqueue(active, decision.reason)
            else:
                placed = self._dispatch.send(active, decision.worker_id, State.LOCAL, "local", decision.reason)
                metrics.prefix_hit_tokens.labels("local").inc(active.cached_tokens if placed else 0)
            if placed:
                metrics.placements.labels(active.decision, active.reason).inc()
        return None

    # ---- what workers say --------------------------------------------------------------------------------------

    def handle(self, worker_id: str, message: ToFrontend, payload: list[bytes], now: float) -> None:
        """One message from a worker. Late, duplicate and unknown ones are dropped and their sender told to forget."""
        if isinstance(message, Outputs):
            self._on_outputs(worker_id, message, payload, now)
        elif isinstance(message, (Claimed, Prefilled, PrefillFailed, Rejected)):
            active = self.requests.get(message.request_id)
            if active is None or active.attempt != message.attempt:
                self._dispatch.drop_stale(worker_id, message.request_id, message.attempt)
            elif isinstance(message, Claimed):
                self._on_claimed(active, message)
            elif isinstance(message, Prefilled):
                self._on_prefilled(active, message, payload, now)
            elif isinstance(message, PrefillFailed):
                if active.state in (State.QUEUED, State.TRANSFERRING):
                    self._retry(active, "prefill_failed")
            elif worker_id == active.decode_worker:
                log.warning("worker %s rejected request %s: %s", worker_id, active.label, message.why)
                if message.why.startswith("invalid"):  # it would be so anywhere
                    self._dispatch.withdraw(active)
                    self._fail(active, message.why)
                else:
                    self._retry(active, "rejected", avoid=worker_id)

    def _on_claimed(self, active: ActiveRequest, claimed: Claimed) -> None:
        if active.state is not State.QUEUED:
            if active.prefill_worker != claimed.worker_id:  # not a duplicate of what is known already
                self._dispatch.drop_stale(claimed.worker_id, claimed.request_id, claimed.attempt)
            return
        active.prefill_worker, active.kv_source = claimed.worker_id, claimed.kv_source
        active.queued_s = claimed.queued_s
        metrics.queue_wait_s.observe(claimed.queued_s)
        self.learning.claimed(active, claimed.queued_s)
        # Bound only now, on load as fresh as the last engine step: no decode block is held while a job waits.
        while (chosen := self._decider.bind(active)) is not None:
            if self._dispatch.send(active, chosen.worker_id, State.TRANSFERRING, active.decision, active.reason):
                metrics.prefix_hit_tokens.labels("decode").inc(chosen.cached_tokens)
                return
        self._retry(active, "no_decode_worker")

    def _on_prefilled(self, active: ActiveRequest, message: Prefilled, payload: list[bytes], now: float) -> None:
        active.prefilled_at, active.prefill_s = now, message.prefill_s
        active.cached_tokens = message.cached_tokens
        metrics.prefix_hit_tokens.labels("prefill").inc(message.cached_tokens)
        metrics.prefill_s.observe(message.prefill_s)
        self.learning.prefilled(active, message.cached_tokens, self._fleet.workers.get(message.worker_id))
        if (batch := self._first_token.of_prefill(active, message, payload, now)) is not None:
            self.batches.put_nowait(batch)

    def _on_outputs(self, worker_id: str, message: Outputs, payload: list[bytes], now: float) -> None:
        try:
            batch = self._codec.decode_outputs(payload, message.sent_at, now)
        except MessageError as error:
            self._on_lost_outputs(worker_id, error)
            return
        current = []
        for output, attempt in zip(batch.outputs, message.attempts, strict=True):
            active = self.requests.get(output.request_id)
            if active is None or active.attempt != attempt or active.decode_worker != worker_id:
                if output.finish_reason is None:
                    self._dispatch.drop_stale(worker_id, output.request_id, attempt)
                continue
            if output.finish_reason in (FINISH_ABORT, FINISH_ERROR):
                # Nobody here asked for it: the engine gave up, so another one continues.
                self._retry(active, "engine_abort" if output.finish_reason == FINISH_ABORT else "engine_error")
                continue
            active.last_heard_at = now
            if output.new_token_ids and active.state is not State.DECODING:
                if not self._first_token.agreed(active, output):
                    self._diverged(active)
                    continue
                self._decoding(active, now)
                if not output.new_token_ids and output.finish_reason is None:
                    continue  # the client has it from prefill
            active.tokens.extend(output.new_token_ids)
            current.append(output)
            if output.finish_reason is not None:
                self._end(active, State.FINISHED)
        if current:
            batch.outputs = current
            self.batches.put_nowait(batch)

    def _on_lost_outputs(self, worker_id: str, error: MessageError) -> None:
        """Whose tokens these were cannot be read, and an answer with a gap is a wrong one: all of them move on."""
        metrics.dropped.labels("corrupt").inc()
        log.error("worker %s sent outputs that cannot be read: %s", worker_id, error)
        for active in list(self.requests.values()):
            if active.decode_worker == worker_id:
                self._retry(active, "corrupt_outputs")

    def _decoding(self, active: ActiveRequest, now: float) -> None:
        """Decode's first token has come."""
        if active.decoding_at is None:
            active.decoding_at = now
            self.learning.first_token(active, now)
            if active.state is State.TRANSFERRING and active.prefilled_at is not None:
                metrics.kv_exposed_s.observe(now - active.prefilled_at)
        active.first_token_at = active.first_token_at or now
        active.move(State.DECODING)

    # ---- when something is lost --------------------------------------------------------------------------------

    def worker_lost(self, worker_id: str) -> None:
        """Continue elsewhere what the worker was decoding. What it was prefilling is recomputed by the decode worker
        that waits for it (it watches membership too), so nobody need claim it again; what it had claimed without our
        knowing is returned to the queue by another prefill worker that sees it die, else by its lease."""
        self.learning.predictor.forget(worker_id)
        for active in list(self.requests.values()):
            if active.decode_worker == worker_id:
                self._retry(active, "decode_worker_lost", avoid=worker_id)
            elif active.prefill_worker == worker_id and active.state is State.TRANSFERRING:
                if active.prefilled_at is None:
                    metrics.retries.labels("prefill_worker_lost").inc()
                    active.retries.append("prefill_worker_lost")
                    self._dispatch.take_back(active)
        self._check_claimers()

    def queue_lost(self) -> None:
        """Redis is away: nothing that waits in it can be claimed."""
        self._leave_queue("queue_unavailable")

    def _check_claimers(self) -> None:
        if not self._fleet.claims():
            self._leave_queue("no_prefill_worker")

    def _leave_queue(self, why: str) -> None:
        """Whoever waits in the queue would wait there for its claim deadline: prefilled locally instead."""
        for active in list(self.requests.values()):
            if active.state is State.QUEUED:
                self._retry(active, why)

    def _retry(self, active: ActiveRequest, why: str, avoid: str | None = None) -> None:
        """Give the current attempt up and start the next. What went wrong remotely is done locally then."""
        if active.ended:
            return
        self._give_up(active, why)
        if active.tokens and not active.resumable:
            self._fail(active, f"its worker was lost ({why}) and its output cannot be continued elsewhere")
            return
        if active.attempt >= self._routing.max_attempts:
            self._fail(active, f"{active.attempt} attempts failed: {', '.join(active.retries)}")
            return
        if avoid is not None:
            active.avoid.add(avoid)
        self._next_attempt(active, why)
        self._dispatch.background(self._replace(active))

    def _diverged(self, active: ActiveRequest) -> None:
        """Decode sampled another first token than the client has: it goes on after that one, if it can where it is,
        since the prompt's KV is cached there. No fault of anybody's, so no attempt is counted against it."""
        worker_id, decision, reason = active.decode_worker, active.decision, active.reason
        self._give_up(active, "first_token_mismatch")
        self._next_attempt(active, "first_token_mismatch")
        if worker_id in self._fleet.workers and self._dispatch.send(active, worker_id, State.LOCAL, decision, reason):
            return
        self._dispatch.background(self._replace(active))

    def _give_up(self, active: ActiveRequest, why: str) -> None:
        metrics.retries.labels(why).inc()
        active.retries.append(why)
        self._dispatch.withdraw(active)

    def _next_attempt(self, active: ActiveRequest, why: str) -> None:
        active.move(State.PLACING)
        active.attempt += 1
        if active.info.local_only is None:
            active.info = msgspec.structs.replace(active.info, local_only=why)
        active.decode_worker = active.prefill_worker = active.kv_source = active.prefilled_at = active.early = None
        active.cached_tokens = 0

    async def _replace(self, active: ActiveRequest) -> None:
        try:
            await self._place(active, deadline=time.monotonic() + self._routing.placement_timeout_s)
        except Exception:
            log.exception("request %s could not be placed again", active.label)
            if not active.ended:  # nobody else would ever end it
                self._fail(active, "placing it again met a defect")

    def _fail(self, active: ActiveRequest, why: str) -> None:
        log.error("request %s failed: %s", active.label, why)
        self.batches.put_nowait(Batch([self._codec.failure(active.info.id)], time.monotonic()))
        self._end(active, State.FAILED)

    # ---- endings -----------------------------------------------------------------------------------------------

    def _end(self, active: ActiveRequest, state: State) -> None:
        if state is State.FINISHED:
            self.learning.finished(active, time.monotonic())
        active.move(state)
        del self.requests[active.info.id]
        metrics.requests.labels(state.value).inc()
        log_ended(active, time.monotonic())

    def _count_rejected(self, rejected: Reject) -> None:
        metrics.placements.labels("reject", rejected.reason).inc()


def _overloaded(rejected: Reject) -> Overloaded:
    return Overloaded(rejected.reason, rejected.retry_after_s, 503 if rejected.reason == "no_decode_worker" else 429)
