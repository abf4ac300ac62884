"""Moves a request from PLACING to where the decider sends it: into the prefill queue, or to a decode worker.

Waits for room if asked to, and for a decode worker if one is coming. Withdraws attempts. Decides nothing: `router`
handles the results.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from orchestrator.fleet.prefixes import PrefixView
from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.view import Fleet
from orchestrator.policy.placement import RETRY_AFTER_S, Reject
from orchestrator.policy.predict.fetch import Holder
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.router.decider import Decider
from orchestrator.router.quarantine import TRIAL_S
from orchestrator.router.request import ActiveRequest, Placed, State, Submitted
from orchestrator.types import KVSource
from orchestrator.wire.messages import Abort, Fetch, Lend, Prefix, Submit, engine_key
from orchestrator.wire.sockets import Sent
from orchestrator.wire.transport import FrontendTransport

# How long a request waits before it asks again for a decode worker.
PLACE_AGAIN_INTERVAL_S = 0.1


class Dispatch:
    def __init__(
        self,
        decider: Decider,
        fleet: Fleet,
        transport: FrontendTransport,
        queue: QueueView,
        prefixes: PrefixView,
        timeout_s: float,
        metrics: Metrics,
    ) -> None:
        """`timeout_s`: the longest wait of a request, unless the workers of an idle model are to come back first."""
        self._decider, self._fleet, self._transport = decider, fleet, transport
        self._queue, self._prefixes, self._timeout_s, self._metrics = queue, prefixes, timeout_s, metrics
        self._tasks: set[asyncio.Task[None]] = set()

    async def place(self, active: ActiveRequest, wait_for_room: bool = False) -> Reject | None:
        """Returns why it could not be placed; None once it is not PLACING any more, for whatever reason."""
        self._prefixes.index.expected.settled(active.id)  # an attempt before this one computes nothing any more
        while active.state is State.PLACING:
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
            waited_s = time.monotonic() - active.moved_at
            patience_s = max(self._timeout_s, self._decider.recall_s())
            waits = (wait_for_room and not placed.no_fallback) or self._decider.is_temporary(placed)
            if waited_s >= patience_s or not waits:
                return placed
            await asyncio.sleep(PLACE_AGAIN_INTERVAL_S)
        return None

    async def _carry_out(self, active: ActiveRequest, placed: Placed) -> bool:
        """False if the queue or the worker did not take it. The next decision takes that into account."""
        if placed.job is None:
            holder = self._decider.holder(active, placed.worker_id, placed.cached_tokens)
            if holder is not None:
                active.placed = placed = placed.with_cached(holder.tokens, active.parsed.info.prompt_tokens)
            sent = self.send(active, placed.worker_id, State.LOCAL, holder)
            if sent:
                self._prefixes.index.expected.sent(active.id, placed.worker_id, active.parsed.prefix_keys)
            self._metrics.prefix_hit_tokens.labels("local").inc(placed.cached_tokens if sent else 0)
            return sent
        active.move(State.QUEUED)  # before the enqueue returns: a worker's claim may be here first
        refused = await self._queue.enqueue(placed.job)
        if refused is not None:
            if active.state is State.QUEUED and active.attempt == placed.job.attempt:
                active.local_reason = refused
                active.move(State.PLACING)
            return False
        if active.ended:
            self.cancel_job(active)
        return True

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
                view.connected = False
            return False
        if prefix is not None and holder is not None:  # where it cannot be told, the wait for what it lends is bounded
            self._lend(active, holder.worker_id, prefix)
        self._fleet.note_adapter(worker_id, parsed.info.adapter, now, submit.sequence)
        if active.prefill_worker is not None:
            self._fleet.note_adapter(active.prefill_worker, parsed.info.adapter, now)
        active.move(to)
        submitted = Submitted(
            worker_id,
            now,
            there.waiting_tokens + there.placed_tokens,
            there.running + there.waiting,
            max(0, parsed.info.prompt_tokens - hit_tokens),
        )
        active.give_to(active.prefill, submitted)
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
            self.cancel_job(active)

    def cancel_job(self, active: ActiveRequest) -> None:
        """Remove its job from the queue, claimed or not."""
        self.background(self._queue.cancel(active.id, active.attempt))

    def drop_stale(self, worker_id: str, request_id: str, attempt: int) -> None:
        """Tell the sender of a message of an older attempt to forget that attempt."""
        self._metrics.dropped.labels("stale").inc()
        self._transport.send(worker_id, Abort(request_id, attempt))

    def background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine as a task of its own."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Wait until nothing runs in the background."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
