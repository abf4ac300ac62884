"""Carries placements out: puts jobs into the prefill queue, sends requests to decode workers, withdraws attempts.

Decides nothing: `router` handles the results.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.view import Fleet
from orchestrator.policy.predict.fetch import Holder
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.router.quarantine import TRIAL_S
from orchestrator.router.request import ActiveRequest, State, Submitted
from orchestrator.types import KVSource, PrefillJob
from orchestrator.wire.messages import Abort, Fetch, Lend, Prefix, Submit, engine_key
from orchestrator.wire.sockets import Sent
from orchestrator.wire.transport import FrontendTransport


class Dispatch:
    def __init__(self, fleet: Fleet, transport: FrontendTransport, queue: QueueView, metrics: Metrics) -> None:
        self._fleet, self._transport, self._queue, self._metrics = fleet, transport, queue, metrics
        self._tasks: set[asyncio.Task[None]] = set()

    async def enqueue(self, job: PrefillJob) -> str | None:
        """Put a job into the prefill queue. Returns None, or why the queue did not take it."""
        return await self._queue.enqueue(job)

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
        active.decode = Submitted(
            worker_id,
            now,
            there.waiting_tokens + there.placed_tokens,
            there.running + there.waiting,
            max(0, parsed.info.prompt_tokens - hit_tokens),
        )
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
        """Tell the attempt's workers to abort it, and remove its job from the queue."""
        abort = Abort(active.id, active.attempt)
        for worker_id in (active.decode_worker, active.prefill_worker):
            if worker_id is not None:
                self._transport.send(worker_id, abort)
        if active.state is State.QUEUED:
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
