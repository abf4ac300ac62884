"""Carries placements out: into the prefill queue, to a decode worker, and back from wherever an attempt is held.

Decides nothing and follows nobody: what becomes of a request is `router`'s business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from orchestrator import metrics
from orchestrator.fleet.queue_view import PrefillLink
from orchestrator.fleet.view import Fleet
from orchestrator.router.decider import Decider
from orchestrator.router.request import ActiveRequest, State
from orchestrator.store.client import RedisAway
from orchestrator.store.queue import QueueFull
from orchestrator.wire.messages import Abort, Submit, pack_frames
from orchestrator.wire.transport import FrontendTransport


class Dispatch:
    """`on_unclaimed(request)` is called for each job that no worker has claimed within `claim_timeout_s`."""

    def __init__(
        self,
        fleet: Fleet,
        transport: FrontendTransport,
        prefill: PrefillLink,
        decider: Decider,
        claim_timeout_s: float,
        on_unclaimed: Callable[[ActiveRequest], None],
    ) -> None:
        self._fleet = fleet
        self._transport = transport
        self._prefill = prefill
        self._decider = decider
        self._claim_timeout_s = claim_timeout_s
        self._on_unclaimed = on_unclaimed
        self.tasks: set[asyncio.Task[None]] = set()

    async def enqueue(self, active: ActiveRequest, reason: str) -> bool:
        """Into the prefill queue. False when the queue did not take it, which then is known to the next decision."""
        info, attempt = active.info, active.attempt
        job = self._decider.job(active, self._transport.frontend_id, pack_frames(active.frames))
        # QUEUED before the enqueue returns: a worker's claim may be here first.
        active.move(State.QUEUED)
        active.decision, active.reason = "remote", reason
        try:
            await self._prefill.enqueue(job)
        except (RedisAway, QueueFull) as error:
            if active.state is State.QUEUED and active.attempt == attempt:
                why = "queue_full" if isinstance(error, QueueFull) else "queue_unavailable"
                active.info = msgspec.structs.replace(info, local_only=why)
                active.move(State.PLACING)
            return False
        if active.state is State.QUEUED and active.attempt == attempt:
            loop = asyncio.get_running_loop()
            active.timer = loop.call_later(self._claim_timeout_s, self._on_unclaimed, active)
        elif active.ended:
            self.background(self._prefill.cancel(info.id, attempt))
        return True

    def send(self, active: ActiveRequest, worker_id: str, to: State, decision: str, reason: str) -> bool:
        """Submit to a decode worker. False when it cannot be reached; it is then avoided."""
        view = self._fleet.workers[worker_id]
        info = active.info
        active.ahead_tokens = view.candidate.waiting_tokens + view.candidate.placed_tokens
        context_tokens = info.prompt_tokens + len(active.tokens)
        compute_tokens = 0 if active.kv_source is not None else max(1, context_tokens - active.cached_tokens)
        submit = Submit(
            request_id=info.id,
            attempt=active.attempt,
            sequence=view.note_placed(context_tokens, compute_tokens),
            prompt_tokens=info.prompt_tokens,
            kv_source=active.kv_source,
            resume_tokens=active.tokens,
            cached_tokens=active.cached_tokens,
        )
        if not self._transport.send(worker_id, submit, active.frames):
            active.avoid.add(worker_id)
            view.connected = False
            return False
        active.sent(to, worker_id, decision, reason)
        return True

    def withdraw(self, active: ActiveRequest) -> None:
        """Tell everybody who holds something of the current attempt to let go."""
        abort = Abort(active.info.id, active.attempt)
        for worker_id in (active.decode_worker, active.prefill_worker):
            if worker_id is not None:
                self._transport.send(worker_id, abort)
        if active.state is State.QUEUED:
            self.take_back(active)

    def take_back(self, active: ActiveRequest) -> None:
        """Its job leaves the queue, claimed or not."""
        self.background(self._prefill.cancel(active.info.id, active.attempt))

    def drop_stale(self, worker_id: str, request_id: str, attempt: int) -> None:
        """Tell the sender of a message of an older attempt to forget it."""
        metrics.dropped.labels("stale").inc()
        self._transport.send(worker_id, Abort(request_id, attempt))

    def background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it to its end, whoever started it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
