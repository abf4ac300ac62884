"""The view of the queue: corrected depth, one failure means away for all, and failed jobs come home.

What is queued stays queued through a pause of Redis, and is given up when Redis stays away or comes back as another.
"""

import asyncio
from types import SimpleNamespace

import pytest
from support_wait import until

from orchestrator.fleet import queue_view
from orchestrator.fleet.queue_view import QueueView
from orchestrator.store.client import RedisAway
from orchestrator.store.queue import QueueFull, SweepResult
from orchestrator.types import PrefillJob, QueueDepth


class ScriptedQueue:
    def __init__(self):
        self.away = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.jobs = []
        self.failed = []
        self.run = "a"
        self.most = 10
        self.polls = 0

    async def server_run(self):
        self._check()
        return self.run

    def _check(self):
        if self.away:
            raise RedisAway("redis://test: gone; start it")

    async def enqueue(self, job):
        self._check()
        if len(self.jobs) == self.most:
            raise QueueFull("full")
        self.jobs.append(job)

    async def cancel(self, request_id, attempt):
        self._check()

    async def poll(self):
        self.polls += 1
        await self.answers.wait()
        self._check()
        return QueueDepth(len(self.jobs), sum(job.uncached_tokens for job in self.jobs), 0)

    async def sweep(self):
        failed, self.failed = self.failed, []
        return SweepResult([], failed, [])


def job(tokens=100):
    return PrefillJob("r", 1, tokens, tokens, 0.0, "f", b"")


@pytest.fixture
async def linked(monkeypatch):
    monkeypatch.setattr(queue_view, "AWAY_GRACE_S", 0.5)
    queue = ScriptedQueue()
    view = QueueView(queue, "f", lease_s=0.02)
    told = SimpleNamespace(away=0, failed=[])

    def on_away():
        told.away += 1

    task = asyncio.create_task(view.run(on_away, lambda *job: told.failed.append(job)))
    await until(lambda: view.depth is not None)
    yield queue, view, told
    task.cancel()


async def test_depth_includes_what_was_enqueued_since_the_last_poll(linked):
    _, view, _ = linked
    await view.enqueue(job(100))
    await view.enqueue(job(50))
    assert view.depth == QueueDepth(2, 150, 0)


@pytest.fixture
def rests(monkeypatch):
    monkeypatch.setattr(queue_view, "POLL_S", 0.01)
    monkeypatch.setattr(queue_view, "EMPTY_POLL_S", 3600.0)


async def test_an_empty_queue_is_left_alone_until_a_job_is_enqueued(rests, linked):
    queue, view, _ = linked
    for _ in range(2):
        before = queue.polls
        await asyncio.sleep(0.2)
        assert queue.polls <= before + 1
        await view.enqueue(job(100))
        await until(lambda before=before: queue.polls > before + 5)  # others may claim it
        queue.jobs.clear()
        await until(lambda: view.depth == QueueDepth(0, 0, 0))
        await asyncio.sleep(0.1)


async def test_a_command_that_failed_has_an_empty_queue_polled(rests, linked):
    queue, view, _ = linked
    queue.away = True
    await view.cancel("r", 1)
    assert view.depth is None
    queue.away = False
    await until(lambda: view.depth is not None)


async def test_what_others_have_enqueued_is_seen_by_a_look(rests, linked):
    queue, view, told = linked
    queue.jobs.append(job(100))
    assert view.depth == QueueDepth(0, 0, 0)
    await view.look()
    assert view.depth == QueueDepth(1, 100, 0)
    queue.away = True
    await view.look()
    assert view.depth is None
    queue.away = False
    await view.look()
    assert view.depth is None, "another server may answer: what runs finds out"
    await until(lambda: view.depth is not None)
    assert not told.away


async def test_full_queue_says_so_and_stays_reachable(linked):
    queue, view, _ = linked
    queue.most = 1
    assert [await view.enqueue(job()), await view.enqueue(job())] == [None, "queue_full"]
    assert view.depth is not None and view.depth.requests == 1


async def test_one_failure_is_enough_and_recovery_is_noticed(linked):
    queue, view, told = linked
    queue.away = True
    assert await view.enqueue(job()) == "queue_unavailable" and view.depth is None
    await until(lambda: told.away)
    await view.cancel("r", 1)  # does not raise: leases and ages end what cannot be cancelled now
    queue.away = False
    await until(lambda: view.depth is not None)
    assert told.away == 1


async def test_a_pause_leaves_the_queue_as_it_is(linked):
    queue, view, told = linked
    for run in ("a", "b"):
        queue.away = True
        await until(lambda: view.depth is None)
        queue.run, queue.away = run, False
        await until(lambda: view.depth is not None)
        assert told.away == (run == "b")  # restarted meanwhile: the jobs are gone


async def test_queue_is_given_up_during_hanging_poll(linked):
    """A stopped server lets each command wait as long as `redis.timeout_s` allows."""
    queue, view, told = linked
    queue.answers.clear()
    queue.away = True
    await view.cancel("r", 1)
    await until(lambda: told.away)
    queue.away = False
    queue.answers.set()
    await until(lambda: view.depth is not None)
    assert told.away == 1


async def test_failed_jobs_are_reported_to_their_frontend_only(linked):
    queue, _, told = linked
    queue.failed = [("mine", 2, "f"), ("theirs", 1, "g")]
    await until(lambda: told.failed)
    assert told.failed == [("mine", 2)]
