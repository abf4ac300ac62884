"""The life of a request: placed, queued or sent, bound to a decode worker, streamed, retried, ended.

Replaces an engine core client: takes engine requests and returns engine outputs. `decider` chooses where a request
goes, `dispatch` sends it there, again if need be, and ends it, `lost` knows what it has lost, and `request` has the
states and their transitions. The router reads engine requests and outputs through `Codec` only.

Both engines sample the first token of a remote prefill. Where the client gets prefill's at once, decode's own is
removed if it is the same. If it differs, the attempt is given up, since a sent token cannot be taken back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from orchestrator.config.settings import Config
from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.view import Fleet
from orchestrator.policy.decode_choice import DecodeChoice
from orchestrator.policy.prefix_index import PrefixIndex
from orchestrator.process.tasks import Turns, ticks
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.router.decider import Decider
from orchestrator.router.dispatch import Dispatch
from orchestrator.router.learning import Learning
from orchestrator.router.lost import Lost
from orchestrator.router.request import (
    ActiveRequest,
    ActiveRequests,
    Batch,
    Codec,
    Failure,
    Overloaded,
    Prefilling,
    State,
)
from orchestrator.types import FinishReason
from orchestrator.wire.messages import (
    Claimed,
    EngineCrashed,
    MessageError,
    Outputs,
    Prefilled,
    PrefillFailed,
    Rejected,
    ToFrontend,
)
from orchestrator.wire.transport import FrontendTransport

log = logging.getLogger("pd.router")

CHECK_S = 0.5
HELD_S = 0.5  # how long decode's outputs wait for `Prefilled`, which was sent before the KV was complete
# Finish reasons of a request that the engine did not complete: another engine continues it.
GIVEN_UP = {FinishReason.ABORT: "engine_abort", FinishReason.ERROR: "engine_error"}


class Router:
    """One per frontend process. All methods run on one event loop; none blocks."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        transport: FrontendTransport,
        queue: QueueView,
        prefixes: PrefixIndex,
        codec: Codec,
        choose: DecodeChoice,
        metrics: Metrics,
    ) -> None:
        self._metrics, self._turns = metrics, Turns(log, "the deadlines of requests")
        self._routing, self._fleet, self._codec, self._prefixes = config.routing, fleet, codec, prefixes
        self.learning = Learning(fleet, choose, config.slo, metrics)
        self._decider = Decider(transport.frontend_id, config, fleet, queue, prefixes, choose, self.learning)
        self._requests = requests = ActiveRequests()
        self._dispatch = Dispatch(
            config.routing, self._decider, fleet, transport, queue, prefixes, requests, codec, self.learning, metrics
        )
        self.lost = Lost(config, fleet, queue, requests, self._decider, self._dispatch, self.learning)
        self.requests, self.batches = requests.by_id, self._dispatch.batches

    # ---- what the server calls ---------------------------------------------------------------------------------

    def check_admission(self, slo_class: str = "") -> None:
        """Raises Overloaded when no request at all can be taken, so that the server can refuse before it responds."""
        if (rejected := self._decider.fleet_rejection()) is not None and not self._decider.is_temporary(rejected):
            self._metrics.placements.labels("reject", rejected.reason).inc()
            self._metrics.requests.labels(State.REJECTED.value).inc()
            self.learning.refused_unread(slo_class)
            raise Overloaded(rejected)

    async def submit(self, request: Any) -> None:
        """Take an engine request; its outputs appear in `batches`. Raises Overloaded and what `Codec.read` raises."""
        parsed = self._codec.read(request, self._fleet.block_size if len(self._prefixes) else 0)
        active = ActiveRequest(parsed, accepted_at=time.monotonic())
        self._requests.add(active)
        try:
            rejected = await self._dispatch.place(active)
            self.learning.arrived(active, self._fleet.block_size)
        except BaseException:
            self.abort([active.id])  # the client left while its request was being placed, or placing it failed
            raise
        if rejected is not None:
            self._metrics.placements.labels("reject", rejected.reason).inc()
            self._dispatch.end(active, State.REJECTED)
            raise Overloaded(rejected)

    def abort(self, request_ids: Iterable[str], to: State = State.ABORTED) -> None:
        """End requests that the client has left or, with `to` FINISHED, that met a stop string. Ignores unknown ids."""
        for request_id in request_ids:
            if active := self.requests.get(request_id):
                with self._dispatch.guarding(active):
                    self._dispatch.withdraw(active)
                    self._dispatch.end(active, to)

    async def run(self) -> None:
        """Enforce the deadlines of all states. Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(self.check_queue(time.monotonic()))
            async for late_s in ticks(CHECK_S):
                with self._turns.turn():
                    if late_s > CHECK_S:
                        self._fleet.pause.stood_still(time.monotonic(), late_s)
                    self.check(time.monotonic())
                if looking.done():  # else Redis does not answer, for which no deadline waits
                    looking = tasks.create_task(self.check_queue(time.monotonic()))

    def check(self, now: float) -> None:
        """Start another attempt of each request whose state has lasted too long. `now`: monotonic seconds.

        Time in which this process stood still does not count, and deadlines start again when a pause of the fleet ends.
        """
        if self._fleet.pause.frozen:
            return
        parts: tuple[Callable[[float], None], ...] = (
            self._release_late,  # first: `lost` may retry a request whose last tokens are held back
            self.lost.check,
            lambda _: self.learning.predictor.set_prior(self._fleet.speed),
            lambda _: self.lost.check_claimers(),
            self._decider.look,
            self.lost.recall,
            self.lost.check_suspects,
        )
        for part in parts:
            with self._turns.turn():  # a defect that lasts in one of them must not keep the others off
                part(now)

    async def check_queue(self, now: float) -> None:
        """The same for requests whose job was lost, or whose prefill worker does not report. A defect is logged."""
        with self._turns.turn():
            if not self._fleet.pause.frozen:
                await self.lost.check_queue(now)

    # ---- what workers say --------------------------------------------------------------------------------------

    def handle(self, worker_id: str, message: ToFrontend, payload: list[bytes], now: float) -> None:
        """Handle one message from a worker. The sender of a late, duplicate or unknown one is told to abort."""
        if isinstance(message, Outputs):
            self._on_outputs(worker_id, message, payload, now)
        elif isinstance(message, EngineCrashed):
            self.lost.engine_crashed(worker_id, message)
        elif isinstance(message, (Claimed, Prefilled, PrefillFailed, Rejected)):
            active = self._requests.current(message.request_id, message.attempt)
            if active is None:
                self._dispatch.drop_stale(worker_id, message.request_id, message.attempt)
            elif isinstance(message, Claimed):
                self._on_claimed(active, worker_id, message, now)
            elif isinstance(message, Prefilled):
                if worker_id == active.prefill_worker:  # else another one has taken the claim over
                    self._on_prefilled(active, message, payload, now)
            elif isinstance(message, PrefillFailed):
                self._prefill_failed(active, worker_id, message.refused, message.by_engine)
            elif worker_id == active.decode_worker:
                self._on_rejected(active, worker_id, message)

    def _on_claimed(self, active: ActiveRequest, worker_id: str, claimed: Claimed, now: float) -> None:
        if active.state is not State.QUEUED:
            # Not a duplicate of what is known; and an abort would end what it decodes, which once was a decode worker.
            if worker_id not in (active.prefill_worker, active.decode_worker):
                self._dispatch.drop_stale(worker_id, claimed.request_id, claimed.attempt)
            return
        claim_s = max(0.0, now - active.moved_at - claimed.queued_s)
        active.give_to(Prefilling(worker_id, claimed.kv_source, claimed.queued_s, claim_s), active.decode)
        self.learning.claimed(active)
        if claimed.cached_tokens is not None:
            self._dispatch.fetch(active, worker_id, self._decider.holder(active, worker_id, claimed.cached_tokens))
        # The decode worker is chosen only now, on its latest load: no decode block is held while a job waits.
        others_failed = False  # no decode worker is left that has not refused it
        while not others_failed and (chosen := self._decider.bind(active, claimed.domain)) is not None:
            others_failed = chosen.worker_id in active.avoid
            if self._dispatch.send(active, chosen.worker_id, State.TRANSFERRING, hit_tokens=chosen.cached_tokens):
                self._metrics.prefix_hit_tokens.labels("decode").inc(chosen.cached_tokens)
                self.learning.late.tried(worker_id, chosen.worker_id, now)
                return
        self._dispatch.unbound(active)

    def _on_prefilled(self, active: ActiveRequest, said: Prefilled, payload: list[bytes], now: float) -> None:
        assert active.prefill is not None
        active.prefill = active.prefill.completed(said, now)
        self.learning.prefilled(active, self._fleet.workers.get(active.prefill.worker_id))
        if active.answer.held:
            self._release_held(active, now)
        elif payload and self._may_come_early(active):
            self._give_early(active, said, payload, now)

    def _may_come_early(self, active: ActiveRequest) -> bool:
        """Whether decode will sample the same token, more tokens follow, and nothing was sent yet."""
        return (
            self._routing.first_token == "prefill"
            and active.parsed.early_token
            and active.parsed.info.max_new_tokens > 1
            and active.state is State.TRANSFERRING
            and not active.answer.tokens
        )

    def _give_early(self, active: ActiveRequest, said: Prefilled, payload: list[bytes], now: float) -> None:
        """Give the client the prefill engine's token."""
        try:
            batch = self._codec.decode_outputs(payload, said.sent_at, now)
        except MessageError as error:
            self._metrics.dropped.labels("corrupt").inc()
            log.error("worker %s sent a first token that cannot be read: %s", active.prefill_worker, error)
            return
        (output,) = batch.outputs
        if output.finish_reason != FinishReason.LENGTH or not output.new_token_ids:
            return  # the token is the last one, or was withheld. The decode engine reports the finish reason.
        (token,) = output.new_token_ids
        batch.outputs = [self._codec.as_first(output)]  # if that fails, nothing is noted that the client has not got
        active.answer.early_token, active.answer.first_token_at = token, now
        active.answer.tokens.append(token)
        self.learning.came_early(active, now)
        self.batches.put_nowait(batch)

    def _prefill_failed(self, active: ActiveRequest, by: str, refused: bool, ended: bool) -> None:
        """`by`: who says so. Another worker that computes it goes on. `ended`: by its engine."""
        if active.state is not State.QUEUED and (active.state is not State.TRANSFERRING or active.prefill_worker != by):
            return
        self._dispatch.retry(active, "prefill_refused" if refused else "engine_error" if ended else "prefill_failed")

    def _on_rejected(self, active: ActiveRequest, by: str, rejected: Rejected) -> None:
        log.warning("worker %s rejected request %s: %s", by, active.parsed.label, rejected.why)
        if rejected.final:  # every worker would refuse this request
            self._dispatch.withdraw(active)
            self._dispatch.fail(active, Failure(rejected.why, by_client=True))
        elif rejected.late:
            self._dispatch.retry(active, "not_ready", by, said=rejected.why)
        else:
            self._dispatch.retry(active, "rejected", by, not rejected.leaving, rejected.why)

    def _on_outputs(self, worker_id: str, message: Outputs, payload: list[bytes], now: float) -> None:
        try:
            batch = self._codec.decode_outputs(payload, message.sent_at, now)
            each = list(zip(batch.outputs, message.attempts, strict=True))
        except (MessageError, ValueError) as error:  # ValueError: there are not as many of both
            self._metrics.dropped.labels("corrupt").inc()
            log.error("worker %s sent outputs that cannot be read: %s", worker_id, error)
            self.lost.outputs_lost(worker_id)
            return
        batch.outputs = [output for output, attempt in each if self._delivers(worker_id, output, attempt, now)]
        if batch.outputs:
            self.batches.put_nowait(batch)

    def _delivers(self, worker_id: str, output: Any, attempt: int, now: float) -> bool:
        """Whether the output goes to its client now."""
        active = self._requests.current(output.request_id, attempt)
        try:
            if active is None or active.decode_worker != worker_id:
                if output.finish_reason is None:
                    self._dispatch.drop_stale(worker_id, output.request_id, attempt)
            elif output.finish_reason in GIVEN_UP:
                self.learning.given_up(active, GIVEN_UP[output.finish_reason], now)
                self._dispatch.retry(active, GIVEN_UP[output.finish_reason])
            elif active.state is not State.DECODING and self._precedes_prefill(active, output):
                active.answer.hold(output, now)
            else:
                return self._take(active, output, now)
        except Exception:  # a defect that one request meets must not cost the others of this step their tokens
            self._dispatch.fail_defective(active, output.request_id)
        return False

    def _precedes_prefill(self, active: ActiveRequest, output: Any) -> bool:
        """Whether the output arrived before `Prefilled`, which has the cached token count and another connection."""
        prefill, answer = active.prefill, active.answer
        unsaid = prefill is not None and prefill.ended_at is None and prefill.worker_id in self._fleet.workers
        return bool(answer.held) or (unsaid and bool(output.new_token_ids) and not answer.tokens)

    def _release_late(self, now: float) -> None:
        for active in self._requests.all():
            if active.answer.held and now - active.answer.held_since > HELD_S:
                self._release_held(active, now)

    def _release_held(self, active: ActiveRequest, now: float) -> None:
        held, active.answer.held = active.answer.held, []
        with self._dispatch.guarding(active):
            if outputs := [output for output in held if self._take(active, output, now)]:
                self.batches.put_nowait(Batch(outputs, now))

    def _take(self, active: ActiveRequest, output: Any, now: float) -> bool:
        """Whether the output goes to the client."""
        answer, tokens = active.answer, output.new_token_ids
        if active.state is not State.DECODING:
            return self._begin(active, output, now)
        if tokens:
            self.learning.streamed(len(tokens), now - answer.last_output_at)
        answer.last_output_at = now
        answer.tokens.extend(tokens)
        if output.finish_reason is not None:
            self._dispatch.end(active, State.FINISHED)
        return True

    def _begin(self, active: ActiveRequest, output: Any, now: float) -> bool:
        """The same, for outputs up to the attempt's first token, which the client may have already."""
        answer, prefill, began = active.answer, active.prefill, bool(output.new_token_ids)
        first, had_first = began and answer.decoding_at is None, answer.first_token_at is not None
        computed = self._codec.computed_alone(output) if first else None  # before what it says of that is dropped
        answer.last_output_at = now
        if began and answer.early_token is not None:
            if output.new_token_ids[0] != answer.early_token:
                self._metrics.first_token_mismatches.inc()
                self._dispatch.diverged(active)
                return False
            answer.early_token = None
            self._codec.drop_told(output, 1)
        elif active.resumed:
            self._codec.drop_told(output, 0)
        known = began and not output.new_token_ids and output.finish_reason is None
        if output.new_token_ids and not answer.tokens and prefill is not None:
            if prefill.ended_at is not None or answer.held_since:
                # Without `Prefilled` the counts are unknown, and a cache hit must not be counted as created.
                self._codec.count_prompt(output, prefill.cached_tokens, prefill.created_cache_tokens)
        if began:
            answer.decoding_at = answer.decoding_at or now
            answer.first_token_at = answer.first_token_at or now
            answer.tokens.extend(output.new_token_ids)
        self.learning.began(active, len(output.new_token_ids), had_first, now)
        if first:
            self._prefixes.expected.settled(active.id)
            link = self._fleet.places.link(active.prefill_worker, active.decode_worker)
            self.learning.first_token(active, link, now, computed)
        if began:
            active.move(State.DECODING)
            self._dispatch.clear_suspect(active)
        if output.finish_reason is not None:
            self._dispatch.end(active, State.FINISHED)
        return not known
