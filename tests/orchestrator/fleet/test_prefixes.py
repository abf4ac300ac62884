"""The live prefix view: joins late, notices what is lost, resynchronises, and never believes a wrong thing for ever."""

import random

import pytest

from orchestrator.fleet.worker_view import MAX_HELD, MOST_ASKED, RESYNC_RETRY_S, PrefixView
from orchestrator.types import PrefixEvents, WorkerLoad
from orchestrator.wire.messages import PrefixResync, PrefixSnapshot
from orchestrator.wire.sockets import Sent


class Worker:
    """A cache whose batches are published one by one, as `workers.prefix` does."""

    def __init__(self, name="w", started=1000):
        self.name, self.sequence, self.keys = name, started, set()

    def change(self, stored=(), removed=()):
        self.keys = self.keys - set(removed) | set(stored)
        self.sequence += 1
        return PrefixEvents(self.name, self.sequence, list(stored), list(removed))

    def load(self):
        return WorkerLoad(self.name, 1, 100, 100, 0, 0, 0, 1.0, prefix_sequence=self.sequence)

    def snapshot(self, parts=1):
        keys = sorted(self.keys)
        chunks = [keys[n::parts] for n in range(parts)]
        return [PrefixSnapshot(self.sequence, chunk, n < parts - 1) for n, chunk in enumerate(chunks)]


@pytest.fixture
def asked():
    return []


@pytest.fixture
def view(asked):
    def send(worker_id, message):
        assert isinstance(message, PrefixResync)
        asked.append(worker_id)
        return True

    return PrefixView(send)


def believed(view, name="w"):
    return {key for key in range(100) if view.index.look_up([key]).blocks(name)}


def synced(view, worker):
    view.take_load(worker.load(), 0.0)
    for part in worker.snapshot():
        view.take_snapshot("w", part, 0.0)


def test_late_frontend_gets_snapshot(view, asked):
    worker = Worker()
    worker.change(stored=[1, 2])
    view.take_load(worker.load(), 0.0)
    assert asked == ["w"] and believed(view) == set()
    for part in worker.snapshot(parts=2):
        view.take_snapshot("w", part, 0.0)
    assert believed(view) == {1, 2}
    view.take_load(worker.load(), 0.1)
    view.take_events(worker.change(removed=[1]), 0.2)
    assert believed(view) == {2} and asked == ["w"]


def test_a_worker_that_has_no_cache_is_never_asked(view, asked):
    view.take_load(WorkerLoad("w", 1, 100, 100, 0, 0, 0, 1.0), 0.0)
    assert asked == [] and not len(view.index)


def test_a_lost_batch_is_noticed_by_the_next_one(view, asked):
    worker = Worker()
    synced(view, worker)
    view.take_events(worker.change(stored=[1, 2]), 0.0)
    worker.change(removed=[1])  # lost
    view.take_events(worker.change(stored=[3]), 0.0)
    assert asked == ["w", "w"] and 1 not in believed(view)
    for part in worker.snapshot():
        view.take_snapshot("w", part, 0.0)
    assert believed(view) == {2, 3}


def test_a_lost_last_batch_is_noticed_by_the_next_load_report(view, asked):
    worker = Worker()
    synced(view, worker)
    view.take_events(worker.change(stored=[1]), 0.0)
    worker.change(removed=[1])  # lost, and nothing follows
    view.take_load(worker.load(), 0.0)
    assert asked == ["w", "w"] and believed(view) == set()


def test_events_during_snapshot_are_kept(view):
    worker = Worker()
    worker.change(stored=[1, 2])
    view.take_load(worker.load(), 0.0)
    before = worker.change(stored=[3])
    snapshot = worker.snapshot(parts=3)
    after = worker.change(removed=[1])
    view.take_events(before, 0.0)
    view.take_snapshot("w", snapshot[0], 0.0)
    view.take_events(after, 0.0)
    for part in snapshot[1:]:
        view.take_snapshot("w", part, 0.0)
    assert believed(view) == {2, 3} == worker.keys


def test_an_unanswered_question_is_asked_again(view, asked):
    worker = Worker()
    view.take_load(worker.load(), 0.0)
    view.take_load(worker.load(), RESYNC_RETRY_S / 2)
    assert asked == ["w"]
    view.take_load(worker.load(), RESYNC_RETRY_S + 0.1)
    assert asked == ["w", "w"]


def test_a_large_fleet_is_asked_a_few_at_a_time_and_nobody_twice(view, asked):
    """A frontend that starts, or that stood still, reads for longer than one worker is waited for."""
    workers = {f"w{number}": Worker(f"w{number}") for number in range(100)}
    for worker in workers.values():
        worker.change(stored=[1])
    answered, now = 0, 0.0
    while answered < len(workers):
        now += 0.1
        for worker in workers.values():
            view.take_load(worker.load(), now)
        assert len(asked) - answered <= MOST_ASKED
        if name := next(iter(asked[answered:]), None):
            for part in workers[name].snapshot():
                view.take_snapshot(name, part, now)
            answered += 1
    assert sorted(asked) == sorted(workers) and all(believed(view, name) == {1} for name in workers)


def test_workers_that_do_not_answer_hold_up_no_others(view, asked):
    stopped = [Worker(f"s{number}") for number in range(MOST_ASKED)]
    for worker in (*stopped, Worker("w")):
        view.take_load(worker.load(), 0.0)
    assert asked == [worker.name for worker in stopped]
    view.take_load(Worker("w").load(), RESYNC_RETRY_S + 0.1)
    assert asked[-1] == "w"


def test_workers_that_are_not_connected_yet_hold_up_no_others():
    """Of a large fleet's workers a frontend that starts has reports before it is connected with all."""
    asked, coming = [], {f"w{number}" for number in range(2 * MOST_ASKED)}

    def send(worker_id, message):
        if worker_id in coming:
            return Sent.UNREACHABLE
        asked.append(worker_id)
        return Sent.YES

    view, names = PrefixView(send), sorted(coming)
    for name in [*names, "there"]:
        view.take_load(Worker(name).load(), 0.0)
    assert asked == ["there"]
    coming.clear()
    view.take_load(Worker(names[0]).load(), 0.1)
    assert asked == ["there", names[0]], "as soon as it can be"


def test_events_waiting_for_snapshot_are_bounded(view, asked):
    worker = Worker()
    view.take_load(worker.load(), 0.0)
    snapshot = worker.snapshot()
    for n in range(MAX_HELD + 50):
        view.take_events(worker.change(stored=[n % 100]), 0.0)
    view.take_snapshot("w", snapshot[0], 0.0)
    assert asked == ["w", "w"]  # the oldest were given up, and that was noticed
    for part in worker.snapshot():
        view.take_snapshot("w", part, 0.0)
    assert believed(view) == worker.keys


def test_restarted_worker_begins_new_sequence(view, asked):
    old, new = Worker(started=1000), Worker(started=2000)
    synced(view, old)
    view.take_events(old.change(stored=[1]), 0.0)
    late = old.change(stored=[2])
    view.forget("w")
    view.take_events(late, 0.0)  # its last words, after its end was noticed
    view.take_load(new.load(), 0.0)
    view.take_events(new.change(stored=[3]), 0.0)
    for part in new.snapshot():
        view.take_snapshot("w", part, 0.0)
    assert believed(view) == {3}
    view.take_snapshot("w", PrefixSnapshot(1002, [1, 2], False), 0.0)  # nobody waits for it
    assert believed(view) == {3}


@pytest.mark.parametrize("seed", range(20))
def test_index_is_right_after_any_losses(asked, seed):
    rng = random.Random(seed)
    view = PrefixView(lambda worker_id, message: asked.append(worker_id))
    worker, answers, now = Worker(), [], 0.0
    for step in range(400):
        now += 0.1
        lossy = step < 350
        events = worker.change(rng.sample(range(100), 3), rng.sample(sorted(worker.keys), min(2, len(worker.keys))))
        if not (lossy and rng.random() < 0.2):
            view.take_events(events, now)
        if not (lossy and rng.random() < 0.5):
            view.take_load(worker.load(), now)
        if asked and rng.random() < 0.3:
            asked.clear()
            if not (lossy and rng.random() < 0.3):
                answers += worker.snapshot(parts=rng.randint(1, 3))
        while answers and rng.random() < 0.7:
            view.take_snapshot("w", answers.pop(0), now)
    for part in answers:
        view.take_snapshot("w", part, now)
    assert believed(view) == worker.keys
