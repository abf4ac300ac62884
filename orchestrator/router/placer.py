"""Moves a request from PLACING to where the decider sends it: into the prefill queue, or to a decode worker.

Waits for room if asked to, and for a decode worker if one is coming. `router` handles the request afterwards.
"""

from __future__ import annotations

import asyncio
import time

from orchestrator.fleet.prefixes import PrefixView
from orchestrator.policy.placement import RETRY_AFTER_S, Reject
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.router.decider import Decider
from orchestrator.router.dispatch import Dispatch
from orchestrator.router.request import ActiveRequest, Placed, State

# How long a request waits before it asks again for a decode worker.
PLACE_AGAIN_INTERVAL_S = 0.1


class Placer:
    def __init__(
        self, decider: Decider, dispatch: Dispatch, prefixes: PrefixView, timeout_s: float, metrics: Metrics
    ) -> None:
        """`timeout_s`: the longest wait of a request, unless the workers of an idle model are to come back first."""
        self._decider, self._dispatch, self._prefixes, self._timeout_s = decider, dispatch, prefixes, timeout_s
        self._metrics = metrics

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
            sent = self._dispatch.send(active, placed.worker_id, State.LOCAL, holder)
            if sent:
                self._prefixes.index.expected.sent(active.id, placed.worker_id, active.parsed.prefix_keys)
            self._metrics.prefix_hit_tokens.labels("local").inc(placed.cached_tokens if sent else 0)
            return sent
        active.move(State.QUEUED)  # before the enqueue returns: a worker's claim may be here first
        refused = await self._dispatch.enqueue(placed.job)
        if refused is not None:
            if active.state is State.QUEUED and active.attempt == placed.job.attempt:
                active.local_reason = refused
                active.move(State.PLACING)
            return False
        if active.ended:
            self._dispatch.cancel_job(active)
        return True
