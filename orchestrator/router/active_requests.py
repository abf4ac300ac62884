"""The requests of one frontend that have not ended, their output queue, and how they end."""

from __future__ import annotations

import asyncio
import logging
import time

from orchestrator.fleet.prefixes import PrefixView
from orchestrator.policy.placement import Reject
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.process.telemetry.recent import Recent
from orchestrator.router.codec import Batch, Codec
from orchestrator.router.learning import Learning
from orchestrator.router.request import ActiveRequest, Failure, State
from orchestrator.router.request_log import describe, log_ended

log = logging.getLogger("pd.router")


class ActiveRequests:
    def __init__(
        self, codec: Codec, learning: Learning, recent: Recent, prefixes: PrefixView, metrics: Metrics
    ) -> None:
        self._codec, self._learning, self._recent, self._prefixes = codec, learning, recent, prefixes
        self._metrics = metrics
        self.by_id: dict[str, ActiveRequest] = {}
        self.batches: asyncio.Queue[Batch] = asyncio.Queue()

    def add(self, active: ActiveRequest) -> None:
        self.by_id[active.id] = active

    def all(self) -> list[ActiveRequest]:
        """A copy, so that a loop over it may end requests."""
        return list(self.by_id.values())

    def current(self, request_id: str, attempt: int) -> ActiveRequest | None:
        """The request, if it has not ended and this attempt is its current one; else None."""
        active = self.by_id.get(request_id)
        return active if active is not None and active.attempt == attempt else None

    def fail(self, active: ActiveRequest, failure: Failure) -> None:
        """End a request as failed, and send the reason to its client."""
        log.log(
            logging.WARNING if failure.by_client else logging.ERROR,
            "request %s failed: %s",
            active.parsed.label,
            failure.why,
        )
        self._tell(active, failure)
        self.end(active, State.FAILED)

    def refuse(self, active: ActiveRequest, rejected: Reject) -> None:
        """End a request that was accepted, and of which its client has no token, as refused."""
        self._metrics.placements.labels("reject", rejected.reason).inc()
        self._tell(active, Failure(rejected.reason, rejected=rejected))
        self.end(active, State.REJECTED)

    def _tell(self, active: ActiveRequest, failure: Failure) -> None:
        self.batches.put_nowait(Batch([self._codec.failure(active.id, failure)], time.monotonic()))

    def end(self, active: ActiveRequest, state: State) -> None:
        """End a request: count it, log it, and pass its figures to learning. Raises IllegalTransition."""
        now = time.monotonic()
        if state is State.FINISHED:
            self._learning.finished(active, now)
        self._learning.ended(active, state, now)
        active.move(state)
        del self.by_id[active.id]
        self._prefixes.index.expected.settled(active.id)
        self._metrics.requests.labels(state.value).inc()
        line = describe(active, now)
        self._recent.ended(line, now)
        log_ended(line)
        if active.parsed.on_request_ended is not None:
            active.parsed.on_request_ended(line)
