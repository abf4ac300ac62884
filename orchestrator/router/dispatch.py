"""Carries out the attempts at a request: each goes where the decider sends it, into the prefill queue or to a decode
worker; one that failed is withdrawn, and the next one begins on another worker, or the request fails.

A retry waits for room on a worker, since the request was accepted already. With `routing.fallback: refuse` it is
refused all the same where only a local prefill is left and the client has no token. What has failed say `router` and
`lost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

from orchestrator.config.settings import RoutingConfig
from orchestrator.config.values import strict_label
from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.view import Fleet
from orchestrator.policy.decode_choice import Holder
from orchestrator.policy.placement import RETRY_AFTER_S, Reject
from orchestrator.policy.prefix_index import PrefixIndex
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.router.decider import Decider
from orchestrator.router.learning import Learning
from orchestrator.router.quarantine import TRIAL_S, Quarantine
from orchestrator.router.request import (
    ActiveRequest,
    ActiveRequests,
    Batch,
    Codec,
    Failure,
    Placed,
    State,
    Submitted,
)
from orchestrator.types import KVSource, Role
from orchestrator.wire.messages import Abort, Fetch, Lend, Prefix, Submit, engine_key
from orchestrator.wire.sockets import Sent
from orchestrator.wire.transport import FrontendTransport

log = logging.getLogger("pd.router")

# How long a request waits before it asks again for a decode worker; of thousands each asks so seldom that all together
# take a tenth of a core.
PLACE_AGAIN_INTERVAL_S, PLACE_AGAIN_S_EACH = 0.1, 4e-4
MAX_ATTEMPTS = 4  # after which a request fails
SOUND_TOKENS = 1024  # an attempt that has made so many was none of a request that fails everywhere
LEAVING_S = 0.1  # pause before a worker that gave the same request back twice is asked again
_DEFECT = Failure("it met a defect")


class Dispatch:
    def __init__(
        self,
        routing: RoutingConfig,
        decider: Decider,
        fleet: Fleet,
        transport: FrontendTransport,
        queue: QueueView,
        prefixes: PrefixIndex,
        requests: ActiveRequests,
        codec: Codec,
        learning: Learning,
        metrics: Metrics,
    ) -> None:
        self._routing, self._decider, self._fleet, self._transport = routing, decider, fleet, transport
        self._queue, self._prefixes, self._requests, self._metrics = queue, prefixes, requests, metrics
        self._codec, self._learning, self.quarantine = codec, learning, Quarantine(fleet.pause)
        self.batches: asyncio.Queue[Batch] = asyncio.Queue()  # what clients get
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = 0  # requests that will ask again

    async def place(self, active: ActiveRequest, wait_for_room: bool = False) -> Reject | None:
        """Returns why this attempt could not be placed; None once it is not PLACING any more, for whatever reason."""
        self._prefixes.expected.settled(active.id)  # an attempt before this one computes nothing any more
        attempt = active.attempt
        while active.state is State.PLACING and active.attempt == attempt:  # the next one is placed by who began it
            placed = self._decider.decide(active)
            if isinstance(placed, Placed):
                active.placed = placed
                others_failed = placed.worker_id in active.avoid  # chosen because no other worker is left
                if await self._carry_out(active, placed):
                    self._metrics.placements.labels(placed.decision, placed.reason).inc()
                    continue
                if placed.job is not None or not others_failed:
                    continue
                placed = Reject("no_decode_worker", RETRY_AFTER_S)
            waited_s = self._fleet.pause.waited_s(active.moved_at, time.monotonic())
            patience_s = max(self._routing.placement_timeout_s, self._decider.recall_s())
            waits = (wait_for_room and not placed.no_fallback) or self._decider.is_temporary(placed)
            if waited_s >= patience_s or not waits:
                return placed
            self._waiting += 1
            again_s = max(PLACE_AGAIN_INTERVAL_S, PLACE_AGAIN_S_EACH * self._waiting)
            try:
                await asyncio.sleep(min(again_s, patience_s - waited_s))
            finally:
                self._waiting -= 1
        return None

    async def _carry_out(self, active: ActiveRequest, placed: Placed) -> bool:
        """False if the queue or the worker did not take it. The next decision takes that into account."""
        if placed.job is None:
            holder = self._decider.holder(active, placed.worker_id, placed.cached_tokens)
            if holder is not None:
                active.placed = placed = placed.with_cached(holder.tokens, active.parsed.info.prompt_tokens)
            sent = self.send(active, placed.worker_id, State.LOCAL, holder)
            if sent:
                self._prefixes.expected.sent(active.id, placed.worker_id, active.parsed.prefix_keys)
            self._metrics.prefix_hit_tokens.labels("local").inc(placed.cached_tokens if sent else 0)
            return sent
        active.move(State.QUEUED)  # before the enqueue returns: a worker's claim may be here first
        refused = await self._queue.enqueue(placed.job)
        withdrawn = active.ended or active.attempt != placed.job.attempt
        if refused is None and withdrawn:  # maybe before it was in the queue
            self.background(self._queue.cancel(active.id, placed.job.attempt))
        elif refused is not None and not withdrawn and active.state is State.QUEUED:
            active.local_reason = refused
            active.move(State.PLACING)
        return refused is None

    def send(
        self, active: ActiveRequest, worker_id: str, to: State, holder: Holder | None = None, hit_tokens: int = 0
    ) -> bool:
        """Submit the request to a decode worker, and move it to state `to`. False if it could not be sent; the request
        then avoids that worker. `holder`: from whose cache that worker fetches the beginning of the prompt.
        `hit_tokens`: of the prompt, cached there where its KV comes from a prefill worker."""
        view, parsed = self._fleet.workers[worker_id], active.parsed
        source = active.prefill.source if active.prefill is not None else None
        there = view.candidate
        context_tokens = parsed.info.prompt_tokens + len(active.answer.tokens)
        cached_tokens = active.cached_tokens if source is None else 0
        compute_tokens = max(1, context_tokens - cached_tokens) if source is None else 0
        delay_s = active.placed.delay_s if active.placed is not None else 0.0
        now = time.monotonic()
        prefix = self._prefix(engine_key(active.id, active.attempt), holder)
        submit = Submit(
            request_id=active.id,
            attempt=active.attempt,
            sequence=view.note_placed(context_tokens, compute_tokens),
            prompt_tokens=parsed.info.prompt_tokens,
            kv_source=source,
            resume_tokens=active.answer.tokens,
            cached_tokens=cached_tokens,
            trial_s=TRIAL_S if active.crashes else 0.0,
            suspect=active.suspect,
            behind_s=delay_s - (now - active.accepted_at),
            prefix=prefix,
        )
        frames = parsed.frames if source is None else parsed.frames_with_kv or parsed.frames
        sent = self._transport.send(worker_id, submit, frames)
        if not sent:
            active.avoid_worker(worker_id)
            view.note_unsent()
            if sent is Sent.UNREACHABLE:  # else this request alone cannot be sent there, or not now
                view.note_connected(False)
            return False
        if prefix is not None and holder is not None:  # where it cannot be told, the wait for what it lends is bounded
            self._lend(active, holder.worker_id, prefix)
        self._fleet.note_adapter(worker_id, parsed.info.adapter, now, submit.sequence)
        if active.prefill_worker is not None:
            self._fleet.note_adapter(active.prefill_worker, parsed.info.adapter, now)
        active.move(to)
        ahead, lacking = there.waiting_tokens + there.placed_tokens, max(0, parsed.info.prompt_tokens - hit_tokens)
        active.give_to(active.prefill, Submitted(worker_id, now, ahead, there.running + there.waiting, lacking))
        # Now, not at the next decision: what this changes was read a moment ago, and by then it is in no cache.
        self._fleet.apply_changes()
        return True

    def fetch(self, active: ActiveRequest, asker: str, holder: Holder | None) -> None:
        """Answer a prefill worker that asks what of the prompt it can fetch, and tell the holder to lend it."""
        assert active.prefill is not None
        key = active.prefill.source.key
        prefix = self._prefix(key, holder)
        if prefix is not None and holder is not None and not self._lend(active, holder.worker_id, prefix):
            prefix = None
        self._transport.send(asker, Fetch(key, prefix))

    def _prefix(self, key: str, holder: Holder | None) -> Prefix | None:
        """What the attempt of this engine key fetches."""
        view = self._fleet.workers.get(holder.worker_id) if holder is not None else None
        return Prefix(KVSource(view.info.kv, f"{key}~"), holder.tokens) if view is not None and holder else None

    def _lend(self, active: ActiveRequest, holder_id: str, prefix: Prefix) -> bool:
        """Tell a worker to lend it. False if it could not be told."""
        return bool(self._transport.send(holder_id, Lend(prefix.source.key, prefix.tokens), active.parsed.frames))

    def withdraw(self, active: ActiveRequest) -> None:
        """Tell the attempt's workers to abort it, and remove its job from the queue, where the next attempt's must not
        find it."""
        abort = Abort(active.id, active.attempt)
        for worker_id in (active.decode_worker, active.prefill_worker):
            if worker_id is not None:
                self._transport.send(worker_id, abort)
        if active.state is State.QUEUED or active.computing_worker is not None:
            self.background(self._queue.cancel(active.id, active.attempt))

    def drop_stale(self, worker_id: str, request_id: str, attempt: int) -> None:
        """Tell the sender of a message of an older attempt to forget that attempt."""
        self._metrics.dropped.labels("stale").inc()
        self._transport.send(worker_id, Abort(request_id, attempt))

    # ---- the next attempt --------------------------------------------------------------------------------------

    def retry(
        self, active: ActiveRequest, why: str, avoid: str | None = None, charge: bool = True, said: str = ""
    ) -> None:
        """Give the current attempt up and start the next, which prefills locally (`routing.fallback`).

        `avoid`: a decode worker not to use again. `charge`: the failure counts against `MAX_ATTEMPTS`; so does
        that of any remote prefill where the next attempt may be remote too.
        `said`: the worker's own words, for the client should this have been the last attempt.
        """
        remote = active.state in (State.QUEUED, State.TRANSFERRING) and self._routing.fallback == "refuse"
        if active.ended:
            return
        self.give_up(active, why)
        if len(active.answer.tokens) - active.resumed >= SOUND_TOKENS:
            active.charged.clear()
        if charge or remote:
            active.charged.append(why)
        if len(active.charged) >= MAX_ATTEMPTS:
            self.fail(active, active.exhausted(said))
            return
        again = avoid in active.avoid
        if avoid is not None:
            active.avoid_worker(avoid)
        active.next_attempt(why)
        # A leaving worker is chosen twice only if there is no other one and its new state is not known here yet.
        self.background(self._place_again(active, LEAVING_S if again and not charge else 0.0))

    def unbound(self, active: ActiveRequest) -> None:
        """No decode worker can get the KV from the prefill worker that has claimed its job."""
        self.retry(active, "no_paired_worker" if strict_label(self._routing.pairing) else "no_decode_worker")

    def diverged(self, active: ActiveRequest) -> None:
        """The engines sampled different first tokens: continue after the one that the client has, if possible on the
        same decode worker, where the prompt is cached. `MAX_ATTEMPTS` does not apply, since nothing failed."""
        worker_id, placed, parsed = active.decode_worker, active.placed, active.parsed
        self.give_up(active, "first_token_mismatch")
        active.next_attempt("first_token_mismatch")
        if worker_id in self._fleet.workers and placed is not None:
            cached_tokens = len(parsed.prefix_keys) * self._fleet.block_size
            active.placed = placed.with_cached(cached_tokens, parsed.info.prompt_tokens)
            if self.send(active, worker_id, State.LOCAL):
                active.placed = placed
                return
            active.placed = None  # it is placed nowhere
        self.background(self._place_again(active))

    def give_up(self, active: ActiveRequest, why: str) -> None:
        """End the current attempt."""
        self._metrics.retries.labels(why).inc()
        active.retries.append(why)
        self.withdraw(active)

    async def _place_again(self, active: ActiveRequest, after_s: float = 0.0) -> None:
        with self.guarding(active):
            if after_s:
                await asyncio.sleep(after_s)
                if active.ended:
                    return
            rejected = await self.place(active, wait_for_room=True)
            if rejected is not None and rejected.no_fallback:
                self._metrics.placements.labels("reject", rejected.reason).inc()
                self.end(active, State.REJECTED, Failure(rejected.reason, rejected=rejected))
            elif rejected is not None:
                why = f"no decode worker took it over within its deadline ({rejected.reason})"
                self.fail(active, Failure(why, rejected=rejected))  # the client may ask again

    def release_suspects(self) -> None:
        """Place those that may have crashed an engine, as many as there are workers to try them."""
        for active in self.quarantine.release(self._fleet.ready(Role.DECODE)):
            self.background(self._place_again(active))

    def clear_suspect(self, active: ActiveRequest) -> None:
        """The request has produced a token or has ended, so it does not crash its engine."""
        if active.crashes and self.quarantine.cleared(active):
            self.release_suspects()

    # ---- the end -----------------------------------------------------------------------------------------------

    def fail(self, active: ActiveRequest, failure: Failure) -> None:
        """End a request as failed, or invalid by its client's fault, and send the reason to its client."""
        to, level = (State.INVALID, logging.WARNING) if failure.by_client else (State.FAILED, logging.ERROR)
        log.log(level, "request %s failed: %s", active.parsed.label, failure.why)
        self.end(active, to, failure)

    def end(self, active: ActiveRequest, state: State, failure: Failure | None = None) -> None:
        """End a request. `failure`: what its client is told. Raises IllegalTransition."""
        if failure is not None:
            self._tell(active, failure)
        active.move(state)
        self._requests.remove(active)
        self._prefixes.expected.settled(active.id)
        try:
            self._learning.ended(active, state, time.monotonic())
        except Exception:  # its client gets its end all the same
            log.exception("request %s ended as %s, and was not counted", active.parsed.label, state.value)
        self.clear_suspect(active)

    def _tell(self, active: ActiveRequest, failure: Failure) -> None:
        """Send its client the reason, or that there was a defect where the reason meets one."""
        for told in (failure, _DEFECT):
            try:
                output = self._codec.failure(active.parsed, told)
            except Exception:  # the request ends all the same, or what it has reserved would stay
                log.exception("request %s: its client cannot be told that %s", active.parsed.label, told.why)
            else:
                self.batches.put_nowait(Batch([output], time.monotonic()))
                return

    @contextlib.contextmanager
    def guarding(self, active: ActiveRequest) -> Iterator[None]:
        """A defect that this request meets in the context fails it, and must not cost the others theirs."""
        try:
            yield
        except Exception:
            self.fail_defective(active, active.id)

    def fail_defective(self, active: ActiveRequest | None, request_id: str) -> None:
        """Fail a request one of whose outputs could not be taken, since its answer would have a gap, or that could not
        be looked after. Call it in the handling of that exception. Raises nothing, also where the same defect is met
        again: workers that could not be told keep what they have of it until it ends there."""
        self._metrics.dropped.labels("error").inc()
        log.exception("request %s met a defect", request_id)
        if active is not None and not active.ended:
            for step in (self.withdraw, partial(self.fail, failure=_DEFECT)):
                try:
                    step(active)
                except Exception:
                    log.exception("request %s met another one while it was ended", request_id)

    def background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine as a task of its own."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
