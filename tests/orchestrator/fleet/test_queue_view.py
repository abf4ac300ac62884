"""The link to the queue: corrected depth, one failure means away for all, and failed jobs come home."""

import asyncio

import pytest

from orchestrator.fleet.queue_view import PrefillLink
from orchestrator.store.client import RedisAway
from orchestrator.store.queue import SweepResult
from orchestrator.types import PrefillJob, QueueDepth


class ScriptedQueue:
    def __init__(self):
        self.away = False
        self.jobs = []
        self.failed = []

    def _check(self):
        if self.away:
            raise RedisAway("redis://test: gone; start it")

    async def enqueue(self, job):
        self._check()
        self.jobs.append(job)

    async def cancel(self, request_id, attempt):
        self._check()

    async def depth(self):
        self._check()
        return QueueDepth(len(self.jobs), sum(job.uncached_tokens for job in self.jobs), 0)

    async def sweep(self):
        failed, self.failed = self.failed, []
        return SweepResult([], failed, [])


def job(tokens=100):
    return PrefillJob("r", 1, tokens, tokens, 0.0, "f", b"")


@pytest.fixture
async def linked():
    queue = ScriptedQueue()
    link = PrefillLink(queue, "f", lease_s=0.02)
    task = asyncio.create_task(link.run())
    await until(lambda: link.depth is not None)
    yield queue, link
    task.cancel()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_depth_includes_what_was_enqueued_since_the_last_poll(linked):
    _, link = linked
    await link.enqueue(job(100))
    await link.enqueue(job(50))
    assert link.depth == QueueDepth(2, 150, 0)


async def test_one_failure_is_enough_and_recovery_is_noticed(linked):
    queue, link = linked
    away = []
    link.on_away = lambda: away.append(True)
    queue.away = True
    with pytest.raises(RedisAway):
        await link.enqueue(job())
    assert link.depth is None and away == [True]
    await link.cancel("r", 1)  # does not raise: leases and ages end what cannot be cancelled now
    queue.away = False
    await until(lambda: link.depth is not None)
    assert away == [True]


async def test_jobs_that_the_queue_gave_up_on_are_reported_to_their_own_frontend_only(linked):
    queue, link = linked
    failed = []
    link.on_failed = lambda request_id, attempt: failed.append((request_id, attempt))
    queue.failed = [("mine", 2, "f"), ("theirs", 1, "g")]
    await until(lambda: failed)
    assert failed == [("mine", 2)]
