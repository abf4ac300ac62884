"""What is known of one pushed request: how much of it was shipped, and how long its registration is valid."""

import pytest

from connectors.push.actions import Chunk, Ended
from connectors.push.records import PushStream
from connectors.push.states import Stream
from connectors.push.wire import Endpoint, Register


def chunk(start: int, blocks: int, *regions: int, whole: bool = False) -> Chunk:
    return Chunk(start, (tuple(range(blocks)),), regions or None, whole=whole)


@pytest.mark.parametrize(
    ("chunks", "covered"),
    [
        ([], False),
        ([chunk(0, 2), chunk(2, 2)], True),
        ([chunk(0, 2), chunk(3, 1)], False),  # a hole
        ([chunk(0, 2), chunk(1, 3)], True),  # an overlap
        ([chunk(0, 2), chunk(2, 2, 0), chunk(2, 2, 1)], True),
        ([chunk(0, 2), chunk(2, 2, 0, 1)], True),
        ([chunk(0, 2), chunk(2, 2, 0)], False),  # one region of two
        ([chunk(0, 2), chunk(2, 2, 0), chunk(2, 1, 1)], False),
        ([chunk(0, 1, whole=True)], True),
    ],
)
def test_stream_is_covered_once_all_regions_are_shipped(chunks: list[Chunk], covered: bool) -> None:
    stream = PushStream("s", Stream.STREAMING, total_blocks=4)
    for each in chunks:
        stream.add(each)
    assert stream.is_covered(regions=2) is covered
    assert list(stream.pending) == chunks
    stream.restart(1, 0.0)
    assert not stream.is_covered(regions=2) and not stream.pending


def test_a_registration_is_extended_never_shortened_and_not_revived() -> None:
    order = Register("s", "r", Endpoint("D", "host", 1), [[1]], 10, valid_s=30.0)
    stream = PushStream("s", Stream.STREAMING, order=order)
    stream.validate(order, 100.0)
    assert (stream.valid_until, stream.renew_at) == (130.0, 110.0)
    late = Register("s", "r", order.decode, [[1]], 10, valid_s=5.0)
    stream.validate(late, 101.0)
    assert stream.valid_until == 130.0
    stream.valid_until = None  # it ran out
    stream.validate(late, 131.0)
    assert stream.valid_until is None


def test_ended_stream_reports_transfer_and_exposed_time() -> None:
    stream = PushStream("s", Stream.LANDED, first_post_at=2.0, closed_at=5.0)
    assert stream.account(True, 6.0) == Ended("s", True, 4.0, 1.0, "")
    assert PushStream("s", Stream.DROPPED, why="aborted").account(False, 6.0) == Ended("s", False, 0.0, 0.0, "aborted")
