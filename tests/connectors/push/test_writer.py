"""From chunks to block ids and NIXL descriptors, without an engine."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from connectors.push.actions import Chunk, Post
from connectors.push.wire import Endpoint, Register

pytestmark = pytest.mark.vllm


@pytest.fixture
def writer() -> ModuleType:
    return pytest.importorskip("connectors.push.writer")  # imports vLLM, which takes seconds


def chunk(start: int, *blocks: int) -> Chunk:
    return Chunk(start, (blocks,))


@pytest.mark.parametrize(
    ("chunks", "remote", "pairs"),
    [
        ([chunk(0, 1, 2, 3, 4)], [11, 12, 13, 14], ([1, 2, 3, 4], [11, 12, 13, 14])),
        ([chunk(0, 1, 2), chunk(2, 3, 4)], [13, 14], ([3, 4], [13, 14])),  # decode has two blocks cached
        ([chunk(1, 2, 3)], [12, 13, 14], ([2, 3], [12, 13])),
        ([chunk(0, 1, 2)], [13, 14], ([], [])),
    ],
)
def test_decode_gets_the_blocks_that_it_has_not_cached(
    writer: ModuleType, chunks: list[Chunk], remote: list[int], pairs: tuple[list[int], list[int]]
) -> None:
    assert writer.pair_blocks(chunks, 4, remote) == pairs


def test_blocks_that_do_not_line_up_are_refused(writer: ModuleType) -> None:
    with pytest.raises(writer.LayoutError, match="reserved 5 blocks for a prompt of 4"):
        writer.pair_blocks([chunk(0, 1)], 4, [1, 2, 3, 4, 5])
    with pytest.raises(writer.LayoutError, match=r"blocks 3\.\.5 of a prompt of 4"):
        writer.pair_blocks([chunk(3, 1, 2)], 4, [1, 2, 3, 4])


def test_descriptors_go_region_by_region(writer: ModuleType) -> None:
    blocks = np.array([1, 3])
    assert writer.descriptors(blocks, [10, 10, 10], None).tolist() == [1, 3, 11, 13, 21, 23]
    assert writer.descriptors(blocks, [10, 10, 10], (1,)).tolist() == [11, 13]
    assert writer.descriptors(blocks, [10, 10, 10], (0, 2)).tolist() == [1, 3, 21, 23]


def test_blocks_pair_by_position_or_from_the_end(writer: ModuleType) -> None:
    order = Register("s", "r", Endpoint("D", "host", 1), [[13, 14]], 64)
    by_position = Post("s", order, (chunk(0, 1, 2), chunk(2, 3, 4)), 4)
    assert writer.pairs_of(by_position) == [([3, 4], [13, 14])]
    both = Register("s", "r", Endpoint("D", "host", 1), [[13, 14], [15]], 64)
    whole = Post("s", both, (Chunk(0, ((1, 2, 3, 4), (5, 6)), whole=True),), 4)
    assert writer.pairs_of(whole) == [([3, 4], [13, 14]), ([6], [15])]
