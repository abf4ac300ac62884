"""From chunks to block ids and NIXL descriptors, without an engine."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

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


def test_what_a_window_drops_is_not_sent(writer: ModuleType) -> None:
    chunks = [Chunk(0, ((1, 2), (0, 0))), Chunk(2, ((3, 4), (0, 6)))]
    assert writer.pair_blocks(chunks, 4, [11, 12, 13, 14], 0) == ([1, 2, 3, 4], [11, 12, 13, 14])
    assert writer.pair_blocks(chunks, 4, [16], 1) == ([6], [16])
    assert writer.pair_blocks(chunks, 4, [15, 16], 1) == ([6], [16])


@pytest.mark.parametrize(
    ("owners", "mine", "theirs"),
    [
        # Groups of equal sizes share their regions ...
        ([-1, -1], [3, 4, 103, 104, 6, 106], [13, 14, 113, 114, 16, 116]),
        ([0, 1], [3, 4, 106], [13, 14, 116]),  # ... and others have their own
    ],
)
def test_each_group_goes_into_its_regions(
    writer: ModuleType, owners: list[int], mine: list[int], theirs: list[int]
) -> None:
    posted = []
    nixl = SimpleNamespace(
        make_prepped_xfer=lambda *arguments: posted.append((arguments[2].tolist(), arguments[4].tolist())),
        transfer=lambda handle: None,
    )
    worker = SimpleNamespace(
        engine_id="P",
        block_size=16,
        kv_cache_config=SimpleNamespace(transfer_groups=[0, 1]),
        dst_region_num_blocks={"P": [100, 100], "D": [100, 100]},
        _physical_blocks_per_logical_kv_block=1,
        region_group_ids=[writer._SHARED_REGION_GROUP_ID if owner < 0 else owner for owner in owners],
        dst_xfer_side_handles={"D": {0: "theirs"}},
        src_xfer_handles_by_block_size={16: "mine"},
        nixl_wrapper=nixl,
    )
    order = Register("s", "r", Endpoint("D", "host", 1), [[14, 13], [16]], 64)
    recorded: list[object] = []
    writer.post_chunks(worker, Post("s", order, (Chunk(2, ((4, 3), (0, 6))),), 4), recorded.append)
    assert posted == [(mine, theirs)] and len(recorded) == 1, "upwards, for NIXL to join neighbours"
    writer.post_chunks(worker, Post("s", order, (Chunk(0, ((1, 2), (0, 0))),), 4), recorded.append)
    assert len(posted) == 1, "decode has these cached"


def test_a_streamed_prompt_is_sent_whole_to_an_engine_of_other_ranks(writer: ModuleType) -> None:
    order = Register("s", "r", Endpoint("D", "host", 1), [[11, 12, 13], [16]], 48)
    post = Post("s", order, (Chunk(0, ((1, 2), (0, 0))), Chunk(2, ((3,), (6,)))), 3)
    assert writer._all_blocks(post) == ([1, 2, 3], [6])


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
