"""Which block here goes into which block of decode."""

import pytest

from connectors.push.actions import Chunk, Post
from connectors.push.blocks.chunks import LayoutError, pair_blocks, pairs_of
from connectors.push.wire import Endpoint, Register


def chunk(start: int, *blocks: int) -> Chunk:
    return Chunk(start, (blocks,))


@pytest.mark.parametrize(
    ("chunks", "remote", "right"),
    [
        ([chunk(0, 1, 2, 3, 4)], [11, 12, 13, 14], ([1, 2, 3, 4], [11, 12, 13, 14])),
        ([chunk(0, 1, 2), chunk(2, 3, 4)], [13, 14], ([3, 4], [13, 14])),  # decode has two blocks cached
        ([chunk(1, 2, 3)], [12, 13, 14], ([2, 3], [12, 13])),
        ([chunk(0, 1, 2)], [13, 14], ([], [])),
    ],
)
def test_decode_gets_the_blocks_that_it_has_not_cached(
    chunks: list[Chunk], remote: list[int], right: tuple[list[int], list[int]]
) -> None:
    assert pair_blocks(chunks, 4, remote) == right


def test_what_a_window_drops_is_not_sent() -> None:
    chunks = [Chunk(0, ((1, 2), (0, 0))), Chunk(2, ((3, 4), (0, 6)))]
    assert pair_blocks(chunks, 4, [11, 12, 13, 14], 0) == ([1, 2, 3, 4], [11, 12, 13, 14])
    assert pair_blocks(chunks, 4, [16], 1) == ([6], [16])
    assert pair_blocks(chunks, 4, [15, 16], 1) == ([6], [16])


def test_nothing_is_written_where_decode_has_no_block() -> None:
    """It has cached the second block: vLLM's list begins with the null block, whose memory is nobody's."""
    assert pair_blocks([chunk(0, 1, 2, 3, 4)], 4, [0, 13, 14]) == ([3, 4], [13, 14])


def test_blocks_that_do_not_line_up_are_refused() -> None:
    with pytest.raises(LayoutError, match="reserved 5 blocks for a prompt of 4"):
        pair_blocks([chunk(0, 1)], 4, [1, 2, 3, 4, 5])
    with pytest.raises(LayoutError, match=r"blocks 3\.\.5 of a prompt of 4"):
        pair_blocks([chunk(3, 1, 2)], 4, [1, 2, 3, 4])


def test_blocks_pair_by_position_or_from_the_end() -> None:
    order = Register("s", "r", Endpoint("D", "host", 1), [[13, 14]], 64)
    by_position = Post("s", order, (chunk(0, 1, 2), chunk(2, 3, 4)), 4)
    assert pairs_of(by_position) == [([3, 4], [13, 14])]
    both = Register("s", "r", Endpoint("D", "host", 1), [[13, 14], [15]], 64)
    whole = Post("s", both, (Chunk(0, ((1, 2, 3, 4), (5, 6)), whole=True),), 4)
    assert pairs_of(whole) == [([3, 4], [13, 14]), ([6], [15])]
