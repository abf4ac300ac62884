"""One frontend's view of the prefill queue: whether it is reachable, its depth, and its maintenance.

The depth is polled, and corrected by the jobs that this frontend has enqueued since the last poll. While the queue is
empty it is polled less often, until this frontend enqueues a job: an idle fleet spends most on polls. After one failure
Redis counts as away until a poll succeeds, so that no further request waits for a time-out. Jobs in the queue wait a
little longer, since a server that only paused has lost nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

import msgspec

from orchestrator.process.tasks import Turns, left_s, until_told
from orchestrator.store.client import RedisAway
from orchestrator.store.queue import JobTooLarge, PrefillQueue, QueueFull
from orchestrator.types import JobState, PrefillJob, QueueDepth

log = logging.getLogger("pd.queue")

POLL_S, EMPTY_POLL_S = 0.1, 0.5
_EMPTY = QueueDepth(0, 0, 0)
AWAY_GRACE_S = 1.5  # a queue that is out of reach for longer, from the first command that failed, is given up


class QueueView:
    def __init__(self, queue: PrefillQueue, frontend_id: str, lease_s: float) -> None:
        self._queue = queue
        self._frontend_id = frontend_id
        self._sweep_s, self._next_sweep_at = lease_s / 2, time.monotonic()
        self._depth: QueueDepth | None = None
        self._away_since: float | None = None
        self._given_up = False
        self._server_run: str | None = None  # of the server that was polled last
        self._stirred = asyncio.Event()  # a job was enqueued or a command failed, since the last poll
        self.polled = asyncio.Event()  # asked once, whether it answered or not

    @property
    def depth(self) -> QueueDepth | None:
        """The depth of the queue; None while it cannot be reached."""
        return self._depth

    async def look(self) -> None:
        """Poll now: `depth` may be as old as the last poll."""
        if self._depth is not None:  # else `run` finds out when it can be reached again, and what is behind it then
            try:
                depth = await self._queue.poll()
            except RedisAway as error:
                self._note_away(error)
            else:
                self._depth = depth if self._depth is not None else None

    async def enqueue(self, job: PrefillJob) -> str | None:
        """Returns None, or why the queue did not take the job."""
        try:
            await self._queue.enqueue(job)
        except QueueFull:
            return "queue_full"
        except JobTooLarge:
            return "job_too_large"
        except RedisAway as error:
            self._note_away(error)
            return "queue_unavailable"
        self._stirred.set()
        if (depth := self._depth) is not None:
            self._depth = msgspec.structs.replace(
                depth, requests=depth.requests + 1, tokens=depth.tokens + job.uncached_tokens
            )
        return None

    async def cancel(self, request_id: str, attempt: int) -> None:
        """Remove a job, claimed or not. While Redis is away nothing is done: its lease or its age ends it."""
        try:
            await self._queue.cancel(request_id, attempt)
        except RedisAway as error:
            self._note_away(error)

    async def states(self, request_ids: Sequence[str]) -> dict[str, JobState]:
        """The states of these jobs; empty while Redis is away."""
        try:
            return await self._queue.states(request_ids)
        except RedisAway as error:
            self._note_away(error)
            return {}

    async def claims_of(self, worker_id: str) -> list[str]:
        """The requests whose jobs this worker has claimed; empty while Redis is away."""
        try:
            return await self._queue.claims_of(worker_id)
        except RedisAway as error:
            self._note_away(error)
            return []

    async def run(self, on_away: Callable[[], None], on_failed: Callable[[str, int], None]) -> None:
        """Runs until cancelled. `on_away()` is called once for each time that the queue is given up: it was away for
        long, or another server, or the same one restarted, answers after it was.
        `on_failed(request_id, attempt)` is called for each job of this frontend that the queue has given up."""
        turns = Turns(log, "looking at the prefill queue")  # a defect here ends no frontend
        while True:
            with turns.turn():
                await self._look(on_away, on_failed)
            self.polled.set()
            if self._depth == _EMPTY:
                await until_told(self._stirred, left_s(EMPTY_POLL_S))
            else:
                await asyncio.sleep(left_s(POLL_S))

    async def _look(self, on_away: Callable[[], None], on_failed: Callable[[str, int], None]) -> None:
        try:
            async with asyncio.timeout(None if self._given_up else self._patience_s()):
                depth = await self._queue.poll()
            if self._depth is None:
                if await self._replaced() and not self._given_up:
                    on_away()
                self._given_up, self._away_since = False, None
            self._depth = depth
            if time.monotonic() >= self._next_sweep_at:
                # All frontends sweep: jitter spreads the sweeps.
                self._next_sweep_at = time.monotonic() + self._sweep_s * random.uniform(0.75, 1.25)
                for request_id, attempt, reply_to in (await self._queue.sweep()).failed:
                    if reply_to == self._frontend_id:
                        on_failed(request_id, attempt)
        except RedisAway as error:
            self._note_away(error)
        except TimeoutError:
            log.debug("the poll in flight is not waited for: the queue is given up")
        if not self._given_up and self._patience_s() == 0:
            self._given_up = True
            on_away()

    def _patience_s(self) -> float | None:
        """How much longer to wait before the queue is given up, seconds; None while it is reachable."""
        if self._away_since is None:
            return None
        return max(0.0, self._away_since + AWAY_GRACE_S - time.monotonic())

    async def _replaced(self) -> bool:
        """Whether another server may answer than before, or the same one restarted. Raises RedisAway."""
        before, self._server_run = self._server_run, await self._queue.server_run()
        return self._away_since is not None and (not before or before != self._server_run)

    def _note_away(self, error: RedisAway) -> None:
        self._depth = None
        self._stirred.set()
        if self._away_since is None:
            log.warning("no prompt is prefilled remotely until Redis is back: %s", error)
            self._away_since = time.monotonic()
