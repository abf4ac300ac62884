"""What a worker tells of its prefix cache: net changes, numbered without gaps, and snapshots that fit between them."""

import asyncio

import pytest
from support_wait import until

from orchestrator.types import PrefixEvents
from orchestrator.wire.messages import PrefixSnapshot
from workers.attempts import Attempts
from workers.engine import PrefixChanges, PrefixDelta
from workers.load.reports import SNAPSHOT_KEYS, LoadReporter, PrefixReporter

DEADLINE_S = 60.0


@pytest.fixture
def world():
    published, sent = [], []
    load = LoadReporter("w", 100, Attempts(), lambda message: None)
    reporter = PrefixReporter("w", published.append, lambda to, part: sent.append((to, part)) or True, load)
    yield reporter, published, sent, load
    reporter.close()


def test_changes_are_net():
    changes = PrefixChanges()
    changes.stored([1, 2, 3])
    changes.removed([2])
    changes.stored([4])
    assert changes.take() == PrefixDelta([1, 3, 4], [2])
    assert not changes
    changes.stored([5])
    changes.cleared()
    changes.stored([6])
    assert changes and changes.take() == PrefixDelta([6], [], cleared=True)
    changes.hosted([6, 7])
    changes.stored([7])
    changes.add(PrefixDelta([], [8], hosted=[9]))
    assert changes.take() == PrefixDelta([7], [8], hosted=[6, 9])


async def test_burst_makes_few_batches_without_gap(world):
    reporter, published, _, load = world
    for key in range(200):
        reporter.changed(PrefixDelta([key], [key - 10] if key >= 10 else []))

    def believed():
        keys = set()
        for events in published:
            keys = (keys - set(events.removed)) | set(events.stored)
        return keys

    await until(lambda: believed() == set(range(190, 200)))
    assert len(published) < 10
    assert [events.sequence - published[0].sequence for events in published] == list(range(len(published)))
    assert load.prefix_sequence == published[-1].sequence


async def test_a_snapshot_says_what_only_host_memory_has(world):
    reporter, published, sent, _ = world
    reporter.changed(PrefixDelta([1, 2, 3], []))
    reporter.changed(PrefixDelta([], [1], hosted=[2, 3]))
    reporter.changed(PrefixDelta([3], []))
    reporter.snapshot("f")
    assert sent == [("f", PrefixSnapshot(published[-1].sequence, [3], more=False, hosted=[2]))]


async def test_snapshot_matches_last_batch(world):
    reporter, published, sent, _ = world
    reporter.changed(PrefixDelta([1, 2], []))
    reporter.changed(PrefixDelta([3], [1]))  # not published yet
    reporter.snapshot("f")
    assert [events.sequence for events in published] == [published[0].sequence, published[0].sequence + 1]
    assert sent == [("f", PrefixSnapshot(published[-1].sequence, [2, 3], more=False))]
    reporter.changed(PrefixDelta([], [], cleared=True))
    reporter.snapshot("f")
    assert sent[-1][1].keys == [] and not sent[-1][1].more
    assert published[-1] == PrefixEvents("w", sent[-1][1].sequence, cleared=True)


async def test_a_large_snapshot_comes_in_parts(world):
    reporter, _, sent, _ = world
    reporter.changed(PrefixDelta(list(range(2 * SNAPSHOT_KEYS + 5)), []))
    reporter.snapshot("f")
    parts = [part for _, part in sent]
    assert [part.more for part in parts] == [True, True, False]
    assert [key for part in parts for key in part.keys] == list(range(2 * SNAPSHOT_KEYS + 5))


async def test_a_frontend_that_cannot_be_reached_gets_no_further_part():
    sent = []
    load = LoadReporter("w", 100, Attempts(), lambda message: None)
    reporter = PrefixReporter("w", lambda events: None, lambda to, part: bool(sent.append(part)), load)
    reporter.changed(PrefixDelta(list(range(2 * SNAPSHOT_KEYS)), []))
    reporter.snapshot("f")
    assert len(sent) == 1


async def test_restarted_worker_restarts_sequence(world):
    reporter, published, _, _ = world
    reporter.changed(PrefixDelta([1], []))
    await asyncio.sleep(0.001)  # a worker takes longer than a microsecond to start
    again = []
    PrefixReporter("w", again.append, lambda to, part: True, LoadReporter("w", 1, Attempts(), print)).changed(
        PrefixDelta([1], [])
    )
    assert again[0].sequence > published[-1].sequence + 1
