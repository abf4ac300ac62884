"""From chunks to block ids and NIXL descriptors, without an engine."""

from types import ModuleType, SimpleNamespace

import pytest

from connectors.push.actions import Chunk, Post
from connectors.push.wire import Endpoint, Register

pytestmark = pytest.mark.vllm


@pytest.fixture
def writer() -> ModuleType:
    return pytest.importorskip("connectors.push.writer")  # imports vLLM, which takes seconds


@pytest.mark.parametrize(
    ("owners", "mine", "theirs"),
    [
        # Groups of equal sizes share their regions ...
        ([-1, -1], [3, 4, 103, 104, 6, 106], [13, 14, 113, 114, 16, 116]),
        ([0, 1], [3, 4, 106], [13, 14, 116]),  # ... and others have their own
    ],
)
def test_each_group_goes_into_its_regions(
    monkeypatch: pytest.MonkeyPatch, writer: ModuleType, owners: list[int], mine: list[int], theirs: list[int]
) -> None:
    monkeypatch.setattr(writer, "shards", lambda worker, engine: {0: writer.WHOLE})
    from vllm.v1.kv_cache_interface import FullAttentionSpec

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
        _group_spec_types=(FullAttentionSpec, FullAttentionSpec),
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


def hybrid(writer: ModuleType, owners: list[int], ratio: int) -> SimpleNamespace:
    """Attention (group 0) and a state of three parts (group 1), in regions of ten logical blocks. `owners`: each
    region's group, -1 where both share it."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    return SimpleNamespace(
        engine_id="P",
        _has_mamba=True,
        _group_spec_types=(FullAttentionSpec, MambaSpec),
        _physical_blocks_per_logical_kv_block=ratio,
        _conv_decomp=SimpleNamespace(local_conv_offsets=[(0, 1), (1, 1)]),
        _ssm_region_indices=[region for region, owner in enumerate(owners) if owner != 0],
        _transfer_layer_group_ids=(),
        _ple_group_index=None,
        num_regions=len(owners),
        region_group_ids=[writer._SHARED_REGION_GROUP_ID if owner < 0 else owner for owner in owners],
        dst_region_num_blocks={"P": [10 * ratio] * len(owners)},
    )


@pytest.mark.parametrize("ratio", [1, 3])
def test_descriptors_are_vllms_own(writer: ModuleType, ratio: int) -> None:
    """Of blocks 1 and 3 of attention and of state 4, in regions that both groups share."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

    worker = hybrid(writer, [-1, -1], ratio)
    kernel = writer.kernel_blocks([1, 3], ratio).tolist()
    right = NixlBaseConnectorWorker._compute_desc_ids(worker, [kernel, [4]], 10 * ratio, None, ratio).tolist()
    attention, state = ([1, 3], 0), ([4], 1)
    found = [writer.descriptors(worker, "P", group, ids, [0, 1]).tolist() for ids, group in (attention, state)]
    assert [*found[0], *found[1]] == right
    assert writer.descriptors(worker, "P", 1, [4], [1]).tolist() == right[-3:], "the second region alone"


def test_a_state_has_descriptors_in_its_own_regions_only(writer: ModuleType) -> None:
    """After the thirty of attention."""
    worker = hybrid(writer, [0, 1, 0], ratio=1)
    assert writer.descriptors(worker, "P", 1, [4], [0, 1, 2]).tolist() == [34, 44, 54]
    assert writer.descriptors(worker, "P", 1, [4], [0, 2]).tolist() == []
    assert writer.descriptors(worker, "P", 0, [1, 3], [0, 2]).tolist() == [1, 3, 21, 23]
