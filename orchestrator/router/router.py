"""The life of a request: placed, queued or sent, bound to a decode worker, streamed, retried, ended.

Replaces an engine core client: takes engine requests and returns engine outputs. `decider` chooses where a request
goes, `dispatch` sends it there, again if need be, `active_requests` chooses what the client gets, and `request` has the
states and their transitions. The router reads engine requests and outputs through `Codec` only.
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
from orchestrator.router.active_requests import ActiveRequests, OutputAction
from orchestrator.router.decider import Decider
from orchestrator.router.dispatch import Dispatch
from orchestrator.router.learning import Learning
from orchestrator.router.overdue import Overdue
from orchestrator.router.request import ActiveRequest, Batch, Codec, Failure, Overloaded, Prefilling, State
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
        early = config.routing.first_token == "prefill"
        self._requests = ActiveRequests(codec, early, self.learning, prefixes, metrics)
        self._dispatch = Dispatch(
            config.routing, self._decider, fleet, transport, queue, prefixes, self._requests, metrics
        )
        self._overdue = Overdue(config, fleet, queue, self._requests, self._decider, self._dispatch, self.learning)
        self.requests, self.batches = self._requests.by_id, self._requests.batches

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
            self._requests.end(active, State.REJECTED)
            raise Overloaded(rejected)

    def abort(self, request_ids: Iterable[str], to: State = State.ABORTED) -> None:
        """End requests that the client has left or, with `to` FINISHED, that met a stop string. Ignores unknown ids."""
        for request_id in request_ids:
            if active := self.requests.get(request_id):
                with self._dispatch.guarding(active):
                    self._dispatch.withdraw(active)
                    self._end(active, to)

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
            self._release_late,  # first: `overdue` may retry a request whose last tokens are held back
            self._overdue.check,
            lambda _: self.learning.predictor.set_prior(self._fleet.speed),
            lambda _: self._overdue.check_claimers(),
            self._decider.look,
            self._overdue.recall,
            self._dispatch.check,
        )
        for part in parts:
            with self._turns.turn():  # a defect that lasts in one of them must not keep the others off
                part(now)

    async def check_queue(self, now: float) -> None:
        """The same for requests whose job was lost, or whose prefill worker does not report. A defect is logged."""
        with self._turns.turn():
            if not self._fleet.pause.frozen:
                await self._overdue.check_queue(now)

    # ---- what workers say --------------------------------------------------------------------------------------

    def handle(self, worker_id: str, message: ToFrontend, payload: list[bytes], now: float) -> None:
        """Handle one message from a worker. The sender of a late, duplicate or unknown one is told to abort."""
        if isinstance(message, Outputs):
            self._on_outputs(worker_id, message, payload, now)
        elif isinstance(message, EngineCrashed):
            self._dispatch.engine_crashed(worker_id, message)
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
        elif (batch := self._requests.from_prefill(active, said, payload, now)) is not None:
            self.batches.put_nowait(batch)

    def _prefill_failed(self, active: ActiveRequest, by: str = "", refused: bool = False, ended: bool = False) -> None:
        """`by`: who says so; empty: the queue. Another worker that computes it goes on. `ended`: by its engine."""
        if active.state is not State.QUEUED and (active.state is not State.TRANSFERRING or active.prefill_worker != by):
            return
        self._dispatch.retry(active, "prefill_refused" if refused else "engine_error" if ended else "prefill_failed")

    def _on_rejected(self, active: ActiveRequest, by: str, rejected: Rejected) -> None:
        log.warning("worker %s rejected request %s: %s", by, active.parsed.label, rejected.why)
        if rejected.final:  # every worker would refuse this request
            self._dispatch.fail_withdrawn(active, Failure(rejected.why, by_client=True))
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
            self.outputs_lost(worker_id)
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
        if active.state is not State.DECODING:
            return self._begin(active, output, now)
        if output.new_token_ids:
            self.learning.streamed(len(output.new_token_ids), now - active.answer.last_output_at)
        self._requests.record_output(active.answer, output, now)
        if output.finish_reason is not None:
            self._end(active, State.FINISHED)
        return True

    def _begin(self, active: ActiveRequest, output: Any, now: float) -> bool:
        """The same, for the first outputs of an attempt."""
        began = bool(output.new_token_ids)
        first = began and active.answer.decoding_at is None
        computed = self._codec.computed_alone(output) if first else None  # before what it says of that is dropped
        had_first = active.answer.first_token_at is not None
        action = self._requests.from_decode(active, output, now)
        if action is OutputAction.DIVERGED:
            self._dispatch.diverged(active)
            return False
        self.learning.began(active, len(output.new_token_ids), had_first, now)
        if first:
            self._prefixes.expected.settled(active.id)
            link = self._fleet.places.link(active.prefill_worker, active.decode_worker)
            self.learning.first_token(active, link, now, computed)
        if began:
            active.move(State.DECODING)
            self._dispatch.clear_suspect(active)
        if action is OutputAction.DELIVER and output.finish_reason is not None:
            self._end(active, State.FINISHED)
        return action is OutputAction.DELIVER

    # ---- when something is lost --------------------------------------------------------------------------------

    def worker_lost(self, *lost: str) -> None:
        """Retry the requests of workers that are gone. Those that they decoded continue on another worker; the prompts
        that they were computing, or had claimed unheard, are prefilled locally. Where one had ended, its KV may be
        there already: `overdue` waits a moment. Call it once for all that go together."""
        self._leave("lost", frozenset(lost), frozenset(lost))
        for worker_id in lost:
            self.learning.forget(worker_id)

    def worker_quiet(self, *quiet: str) -> None:
        """Move requests away from workers that are slow, stopped or cut off: of all that become so together."""
        self._leave("quiet", frozenset(quiet), frozenset(filter(self._fleet.has_other_decode_worker, quiet)))

    def _leave(self, how: str, away: frozenset[str], decoding: frozenset[str]) -> None:
        lost = how == "lost"
        for active in self._requests.of(*away):
            with self._dispatch.guarding(active):
                prefills = active.computing_worker if lost else active.prefill_worker
                if active.decode_worker in decoding:
                    self._dispatch.retry(active, f"decode_worker_{how}", avoid=active.decode_worker, charge=lost)
                elif active.state is State.TRANSFERRING and prefills in away:
                    self._dispatch.retry(active, f"prefill_worker_{how}", charge=False)
        self._dispatch.background(self._overdue.leave_claimers(away, f"prefill_worker_{how}"))
        self._overdue.check_claimers()

    def connection_reset(self, worker_id: str) -> None:
        """A worker's connection was made again: requests or tokens may be lost with the old one."""
        self._retry_decoding(worker_id, "connection_reset", charge=False)

    def outputs_lost(self, worker_id: str) -> None:
        """A message of a worker is lost, and whose tokens it had is unknown."""
        self._retry_decoding(worker_id, "corrupt_outputs", avoid=worker_id)

    def _retry_decoding(self, worker_id: str, why: str, charge: bool = True, avoid: str | None = None) -> None:
        """Retry all requests that a worker decodes: an answer must not have a gap."""
        for active in self._requests.of(worker_id):
            with self._dispatch.guarding(active):
                if active.decode_worker == worker_id:
                    self._dispatch.retry(active, why, avoid=avoid, charge=charge)

    def queue_lost(self) -> None:
        """Take all requests out of the queue: while Redis is away no worker can claim their jobs."""
        self._dispatch.leave_queue("queue_unavailable")

    def job_failed(self, request_id: str, attempt: int) -> None:
        """The queue gave this job up, because too many workers that had claimed it died."""
        if (active := self._requests.current(request_id, attempt)) is not None:
            with self._dispatch.guarding(active):
                self._prefill_failed(active)

    def _end(self, active: ActiveRequest, state: State) -> None:
        self._requests.end(active, state)
        self._dispatch.clear_suspect(active)
