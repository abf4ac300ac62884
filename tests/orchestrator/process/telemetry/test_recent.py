"""What is kept of the latest requests, and the stages of one of them."""

import statistics

import msgspec
import pytest
from support_info import request_line

from orchestrator.process.telemetry.requests import (
    KEPT,
    MINUTES,
    SLOWEST_PER_MINUTE,
    Latencies,
    Recent,
    Stage,
    percentiles,
    stages,
)

REMOTE = request_line()


def test_percentiles_are_those_of_the_durations():
    latencies, durations = Latencies(), [0.0005 * 1.01**n for n in range(1000)]
    for seconds in durations:
        latencies.add(seconds)
    halves = [latencies.take(), latencies.take()]
    cuts = statistics.quantiles(durations, n=100, method="inclusive")
    for share in (0.5, 0.9, 0.99):
        assert percentiles(halves, [share])[0] == pytest.approx(cuts[round(share * 100) - 1], rel=0.1)
    assert percentiles([latencies.take()], [0.5]) == [None], "taken is taken"
    assert percentiles([], [0.5, 0.9]) == [None, None]


def test_durations_out_of_range_are_counted_at_the_ends():
    latencies = Latencies()
    for seconds in (0.0, -1.0, 1e-9, 1e9):
        latencies.add(seconds)
    counts = latencies.take()
    assert (counts[0], counts[-1]) == (3, 1)


def test_the_slowest_of_an_hour_are_kept_and_no_more():
    recent = Recent()
    for minute in range(2 * MINUTES):
        for number in range(SLOWEST_PER_MINUTE + 5):
            recent.ended(request_line(f"{minute}-{number}", 1000 * minute + number), 60.0 * minute)
    now = 60.0 * (2 * MINUTES - 1)
    last = 2 * MINUTES - 1
    assert [kept.id for kept in recent.slowest(2, now)] == [
        f"{last}-{SLOWEST_PER_MINUTE + 4}",
        f"{last}-{SLOWEST_PER_MINUTE + 3}",
    ]
    assert len(recent.slowest(10**6, now)) == MINUTES * SLOWEST_PER_MINUTE
    assert recent.slowest(1, now + 3600 + 60) == [], "an hour later nothing of it counts"
    assert len(recent.latest(10**6)) == KEPT


def test_a_request_is_found_by_the_beginning_of_its_id():
    recent = Recent()
    for name in ("abc-1", "abc", "xyz"):
        recent.ended(request_line(name, 1.0), 0.0)
    found = [recent.find(name) for name in ("abc", "xy", "q")]
    assert [kept.id if kept else None for kept in found] == ["abc", "xyz", None]


def test_stages_follow_each_other_from_arrival_to_the_end():
    assert stages(REMOTE) == [
        Stage("frontend", 0.0, 5.0),
        Stage("place", 5.0, 15.0),
        Stage("queue", 15.0, 61.0),
        Stage("claim", 61.0, 65.0, "prefill-0"),
        Stage("prefill", 65.0, 565.0, "prefill-0"),
        Stage("transfer", 565.0, 605.0, "prefill-0 to decode-0"),
        Stage("decode", 605.0, 805.0, "decode-0"),
    ]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (
            {"prefill_worker": None, "queued_ms": None, "claim_ms": None, "exposed_ms": None},
            ["frontend", "place", "prefill", "decode"],
        ),
        ({"sent_ms": None, "prefill_worker": None, "decode_worker": None}, ["frontend", "place"]),  # rejected
        ({"prefill_ms": None, "exposed_ms": None, "ttft_ms": None}, ["frontend", "place", "queue", "claim", "prefill"]),
        (
            {"exposed_ms": None},
            ["frontend", "place", "queue", "claim", "prefill", "transfer"],
        ),  # left before decode had it
    ],
)
def test_stages_that_did_not_happen_are_left_out(changes: dict, names: list[str]):
    found = stages(msgspec.structs.replace(REMOTE, **changes))
    assert [stage.name for stage in found] == names
    assert all(0 <= stage.begin_ms <= stage.end_ms <= 805.0 for stage in found)
    assert all(before.end_ms == after.begin_ms for before, after in zip(found, found[1:], strict=False))
    assert found[-1].end_ms == 805.0
