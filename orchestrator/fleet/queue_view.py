"""The prefill queue as one frontend sees it: whether it is there, how deep it is, and its upkeep.

The depth is polled, and corrected by what this frontend has enqueued since the last poll. When Redis fails once it
counts as away until a poll succeeds, so that no further request waits for a timeout.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

import msgspec

from orchestrator.store.client import RedisAway
from orchestrator.store.queue import PrefillQueue
from orchestrator.types import PrefillJob, QueueDepth

log = logging.getLogger("pd.queue")

POLL_S = 0.1


class QueueView:
    def __init__(self, queue: PrefillQueue, frontend_id: str, lease_s: float) -> None:
        self._queue = queue
        self._frontend_id = frontend_id
        self._sweep_s = lease_s / 2
        self._depth: QueueDepth | None = None
        self._away = asyncio.Event()
        self.polled = asyncio.Event()  # asked once, whatever the answer

    @property
    def depth(self) -> QueueDepth | None:
        """None while the queue cannot be reached."""
        return self._depth

    async def enqueue(self, job: PrefillJob) -> None:
        """Raises RedisAway, queue.QueueFull."""
        try:
            await self._queue.enqueue(job)
        except RedisAway as error:
            self._note_away(error)
            raise
        if (depth := self._depth) is not None:
            self._depth = msgspec.structs.replace(
                depth, requests=depth.requests + 1, tokens=depth.tokens + job.uncached_tokens
            )

    async def cancel(self, request_id: str, attempt: int) -> None:
        """Remove a job, whatever has become of it. While Redis is away its lease or age ends it instead."""
        try:
            await self._queue.cancel(request_id, attempt)
        except RedisAway as error:
            self._note_away(error)

    async def run(self, on_away: Callable[[], None], on_failed: Callable[[str, int], None]) -> None:
        """Runs until cancelled. `on_away()` is called each time the queue becomes unreachable,
        `on_failed(request_id, attempt)` for each job of this frontend that the queue has given up."""
        next_sweep_at = time.monotonic()
        while True:
            try:
                self._depth = await self._queue.depth()
                if time.monotonic() >= next_sweep_at:
                    # Everybody sweeps: jitter spreads it.
                    next_sweep_at = time.monotonic() + self._sweep_s * random.uniform(0.75, 1.25)
                    for request_id, attempt, reply_to in (await self._queue.sweep()).failed:
                        if reply_to == self._frontend_id:
                            on_failed(request_id, attempt)
            except RedisAway as error:
                self._note_away(error)
            self.polled.set()
            if self._away.is_set():
                self._away.clear()
                on_away()
            try:
                async with asyncio.timeout(POLL_S):
                    await self._away.wait()
            except TimeoutError:
                continue

    def _note_away(self, error: RedisAway) -> None:
        if self._depth is not None:
            log.warning("prompts are prefilled where they decode until Redis is back: %s", error)
            self._depth = None
            self._away.set()
