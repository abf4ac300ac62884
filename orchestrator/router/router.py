"""The life of a request: placed, queued or sent, bound to a decode worker, streamed, retried, ended.

Stands where an engine core client would: takes engine requests, gives engine outputs. `decider` says where a request
goes, `dispatch` sends it there, `answer` says what the client gets, `request` which moves exist. The router knows of
an engine request or output what `Codec` says of it, and no more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

from orchestrator import metrics
from orchestrator.config.settings import Config
from orchestrator.fleet.prefixes import PrefixView
from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.view import Fleet
from orchestrator.policy.candidate import DecodeChoice
from orchestrator.policy.placement import Reject
from orchestrator.policy.predict import Predictor
from orchestrator.router.answer import Answers, Verdict
from orchestrator.router.codec import Batch, Codec
from orchestrator.router.decider import Decider
from orchestrator.router.dispatch import Dispatch
from orchestrator.router.learning import Learning
from orchestrator.router.request import ActiveRequest, Overloaded, Placed, Prefilling, State
from orchestrator.router.request_log import log_ended
from orchestrator.types import FinishReason
from orchestrator.wire.messages import Claimed, MessageError, Outputs, Prefilled, PrefillFailed, Rejected, ToFrontend
from orchestrator.wire.transport import FrontendTransport

log = logging.getLogger("pd.router")

# How long a request that was accepted waits before it asks again for a decode worker to continue on.
PLACE_AGAIN_INTERVAL_S = 0.1
STALL_CHECK_S = 1.0
WITH_A_WORKER = (State.TRANSFERRING, State.LOCAL, State.DECODING)
# An engine that ends a request this way has not answered it: another one continues.
GIVEN_UP = {FinishReason.ABORT: "engine_abort", FinishReason.ERROR: "engine_error"}


class Router:
    """One per frontend process. All methods run on one event loop; none blocks."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        transport: FrontendTransport,
        queue: QueueView,
        prefixes: PrefixView,
        codec: Codec,
        choose: DecodeChoice,
    ) -> None:
        self._routing, self._fleet, self._codec, self._prefixes = config.routing, fleet, codec, prefixes
        self._answers = Answers(codec, early_first_token=config.routing.first_token == "prefill")
        self.learning = Learning(Predictor(prior_s_per_token=config.queue.seconds_per_token), choose)
        self._decider = Decider(transport.frontend_id, config, fleet, queue, prefixes, choose, self.learning)
        self._dispatch = Dispatch(fleet, transport, queue)
        self.requests: dict[str, ActiveRequest] = {}
        self.batches: asyncio.Queue[Batch] = asyncio.Queue()

    # ---- what the server calls ---------------------------------------------------------------------------------

    def check_admission(self) -> None:
        """Refuse early, before a response has begun, when no request can be taken at all. Raises Overloaded."""
        if (rejected := self._decider.closed()) is not None:
            metrics.placements.labels("reject", rejected.reason).inc()
            self.learning.turned_away()
            raise Overloaded(rejected)

    async def submit(self, request: Any) -> None:
        """Take a request; its outputs appear in `batches`. Raises Overloaded, and what the codec raises."""
        asked = self._codec.read(request, 0 if self._prefixes.empty else self._fleet.block_size)
        active = self.requests[asked.info.id] = ActiveRequest(asked, accepted_at=time.monotonic())
        try:
            rejected = await self._place(active, deadline=None)
        except BaseException:
            self.abort([active.id])  # the client left while its request was being placed, or placing it met a defect
            raise
        uncached_tokens = active.placed.uncached_tokens if active.placed is not None else asked.info.prompt_tokens
        self.learning.arrived(asked.info, uncached_tokens)
        if rejected is not None:
            metrics.placements.labels("reject", rejected.reason).inc()
            self._end(active, State.REJECTED)
            raise Overloaded(rejected)

    def abort(self, request_ids: Iterable[str], to: State = State.ABORTED) -> None:
        """The client no longer wants these, or (`to` FINISHED) a stop string was met and it has all that it needs.
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
                if active.state in WITH_A_WORKER and active.heard_at < oldest:
                    self._retry(active, "stalled", avoid=active.decode_worker)

    async def settled(self) -> None:
        """Wait until nothing runs in the background."""
        await self._dispatch.settled()

    # ---- placing -----------------------------------------------------------------------------------------------

    async def _place(self, active: ActiveRequest, deadline: float | None) -> Reject | None:
        """Move a PLACING request on. With a deadline it waits for room until then and fails; without, the rejection is
        returned to the caller, who has not told the client anything yet."""
        while active.state is State.PLACING:
            placed = self._decider.decide(active)
            if isinstance(placed, Placed):
                active.placed = placed
                if await self._carry_out(active, placed):
                    metrics.placements.labels(placed.decision, placed.reason).inc()
            elif deadline is None:
                return placed
            elif time.monotonic() < deadline:
                await asyncio.sleep(PLACE_AGAIN_INTERVAL_S)
            else:
                self._fail(active, f"no decode worker took it over within its deadline ({placed.reason})")
        return None

    async def _carry_out(self, active: ActiveRequest, placed: Placed) -> bool:
        """False when the queue or the worker did not take it, which the next decision knows."""
        if placed.job is None:
            sent = self._dispatch.send(active, placed.worker_id, State.LOCAL)
            metrics.prefix_hit_tokens.labels("local").inc(placed.cached_tokens if sent else 0)
            return sent
        active.move(State.QUEUED)  # before the enqueue returns: a worker's claim may be here first
        refused = await self._dispatch.enqueue(placed.job)
        still_queued = active.state is State.QUEUED and active.attempt == placed.job.attempt
        if refused is not None:
            if still_queued:
                active.local_because = refused
                active.move(State.PLACING)
            return False
        if still_queued:
            active.set_deadline(self._routing.claim_timeout_s, lambda: self._retry(active, "claim_timeout"))
        elif active.ended:
            self._dispatch.cancel_job(active)
        return True

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
                self._on_prefill_failed(active)
            elif worker_id == active.decode_worker:
                self._on_rejected(active, message)

    def _on_claimed(self, active: ActiveRequest, claimed: Claimed) -> None:
        if active.state is not State.QUEUED:
            if active.prefill_worker != claimed.worker_id:  # not a duplicate of what is known already
                self._dispatch.drop_stale(claimed.worker_id, claimed.request_id, claimed.attempt)
            return
        active.prefill = Prefilling(claimed.worker_id, claimed.kv_source, claimed.queued_s)
        metrics.queue_wait_s.observe(claimed.queued_s)
        self.learning.claimed(active)
        # Bound only now, on load as fresh as the last engine step: no decode block is held while a job waits.
        while (chosen := self._decider.bind(active)) is not None:
            if self._dispatch.send(active, chosen.worker_id, State.TRANSFERRING):
                metrics.prefix_hit_tokens.labels("decode").inc(chosen.cached_tokens)
                return
        self._retry(active, "no_decode_worker")

    def _on_prefilled(self, active: ActiveRequest, said: Prefilled, payload: list[bytes], now: float) -> None:
        if active.prefill is None or active.prefill.worker_id != said.worker_id:
            return  # of a claim that another worker took over
        active.prefill = active.prefill.completed(said.prefill_s, said.cached_tokens, now)
        metrics.prefix_hit_tokens.labels("prefill").inc(said.cached_tokens)
        metrics.prefill_s.observe(said.prefill_s)
        self.learning.prefilled(active, self._fleet.workers.get(said.worker_id))
        if (batch := self._answers.from_prefill(active, said, payload, now)) is not None:
            self.batches.put_nowait(batch)

    def _on_prefill_failed(self, active: ActiveRequest) -> None:
        if active.state in (State.QUEUED, State.TRANSFERRING):
            self._retry(active, "prefill_failed")

    def _on_rejected(self, active: ActiveRequest, rejected: Rejected) -> None:
        log.warning("worker %s rejected request %s: %s", rejected.worker_id, active.asked.label, rejected.why)
        if rejected.final:  # every worker would refuse it
            self._dispatch.withdraw(active)
            self._fail(active, rejected.why)
        else:
            self._retry(active, "rejected", avoid=rejected.worker_id)

    def _on_outputs(self, worker_id: str, message: Outputs, payload: list[bytes], now: float) -> None:
        try:
            batch = self._codec.decode_outputs(payload, message.sent_at, now)
        except MessageError as error:
            self._on_lost_outputs(worker_id, error)
            return
        delivered = []
        for output, attempt in zip(batch.outputs, message.attempts, strict=True):
            active = self.requests.get(output.request_id)
            if active is None or active.attempt != attempt or active.decode_worker != worker_id:
                if output.finish_reason is None:
                    self._dispatch.drop_stale(worker_id, output.request_id, attempt)
            elif output.finish_reason in GIVEN_UP:
                self._retry(active, GIVEN_UP[output.finish_reason])
            elif self._take(active, output, now):
                delivered.append(output)
                if output.finish_reason is not None:
                    self._end(active, State.FINISHED)
        if delivered:
            batch.outputs = delivered
            self.batches.put_nowait(batch)

    def _take(self, active: ActiveRequest, output: Any, now: float) -> bool:
        """Whether the output goes to the client."""
        began = active.state is not State.DECODING and bool(output.new_token_ids)
        first = began and active.answer.decoding_at is None
        verdict = self._answers.from_decode(active, output, now)
        if verdict is Verdict.DIVERGED:
            self._diverged(active)
            return False
        if first:
            self.learning.first_token(active, now)
            if active.prefill is not None and active.prefill.ended_at is not None:
                metrics.kv_exposed_s.observe(now - active.prefill.ended_at)
        if began:
            active.move(State.DECODING)
        return verdict is Verdict.DELIVER

    def _on_lost_outputs(self, worker_id: str, error: MessageError) -> None:
        """Nobody can read whose tokens these were, and an answer with a gap is a wrong one: all of them move on."""
        metrics.dropped.labels("corrupt").inc()
        log.error("worker %s sent outputs that cannot be read: %s", worker_id, error)
        for active in list(self.requests.values()):
            if active.decode_worker == worker_id:
                self._retry(active, "corrupt_outputs")

    # ---- when something is lost --------------------------------------------------------------------------------

    def worker_lost(self, worker_id: str) -> None:
        """Continue elsewhere what the worker was decoding.

        What it was prefilling is recomputed by the decode worker that waits for it, which watches membership too, so
        nobody need claim it again. What it had claimed without our knowing returns to the queue when another prefill
        worker sees it die, else when its lease ends.
        """
        self.learning.predictor.forget(worker_id)
        for active in list(self.requests.values()):
            if active.decode_worker == worker_id:
                self._retry(active, "decode_worker_lost", avoid=worker_id)
            elif active.state is State.TRANSFERRING and active.prefill is not None:
                if active.prefill.worker_id == worker_id and active.prefill.ended_at is None:
                    metrics.retries.labels("prefill_worker_lost").inc()
                    active.retries.append("prefill_worker_lost")
                    self._dispatch.cancel_job(active)
        self._check_claimers()

    def queue_lost(self) -> None:
        """Redis is away: nothing that waits in it can be claimed."""
        self._leave_queue("queue_unavailable")

    def job_failed(self, request_id: str, attempt: int) -> None:
        """The queue has given this job up: its claims died too often."""
        active = self.requests.get(request_id)
        if active is not None and active.attempt == attempt:
            self._on_prefill_failed(active)

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
        if active.answer.tokens and not active.asked.resumable:
            self._fail(active, f"its worker was lost ({why}) and its output cannot be continued elsewhere")
            return
        if active.attempt >= self._routing.max_attempts:
            self._fail(active, f"{active.attempt} attempts failed: {', '.join(active.retries)}")
            return
        if avoid is not None:
            active.avoid.add(avoid)
        active.next_attempt(why)
        self._dispatch.background(self._place_again(active))

    def _diverged(self, active: ActiveRequest) -> None:
        """Continue after the token that the client has, if possible where the prompt's KV is cached now. It is nobody's
        fault, so `max_attempts` does not apply."""
        worker_id, placed = active.decode_worker, active.placed
        self._give_up(active, "first_token_mismatch")
        active.next_attempt("first_token_mismatch")
        if worker_id in self._fleet.workers and self._dispatch.send(active, worker_id, State.LOCAL):
            active.placed = placed
            return
        self._dispatch.background(self._place_again(active))

    def _give_up(self, active: ActiveRequest, why: str) -> None:
        metrics.retries.labels(why).inc()
        active.retries.append(why)
        self._dispatch.withdraw(active)

    async def _place_again(self, active: ActiveRequest) -> None:
        try:
            await self._place(active, deadline=time.monotonic() + self._routing.placement_timeout_s)
        except Exception:
            log.exception("request %s could not be placed again", active.asked.label)
            if not active.ended:  # nobody else would ever end it
                self._fail(active, "placing it again met a defect")

    # ---- endings -----------------------------------------------------------------------------------------------

    def _fail(self, active: ActiveRequest, why: str) -> None:
        log.error("request %s failed: %s", active.asked.label, why)
        self.batches.put_nowait(Batch([self._codec.failure(active.id)], time.monotonic()))
        self._end(active, State.FAILED)

    def _end(self, active: ActiveRequest, state: State) -> None:
        now = time.monotonic()
        if state is State.FINISHED:
            self.learning.finished(active, now)
        active.move(state)
        del self.requests[active.id]
        metrics.requests.labels(state.value).inc()
        log_ended(active, now)
