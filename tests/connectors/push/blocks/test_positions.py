"""Where the KV of a prompt is, by vLLM's own specifications of caches."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from connectors.push.blocks.positions import Positions

pytestmark = pytest.mark.vllm

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)


def positions(*specs: FullAttentionSpec, shards: int) -> Positions:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return Positions(SimpleNamespace(kv_cache_groups=groups, transfer_groups=groups), 16, shards)  # type: ignore[arg-type]


@pytest.mark.parametrize(("shards", "kept"), [(1, 4), (2, 2)])
def test_what_a_draft_may_need_is_not_of_the_prompt(shards: int, kept: int) -> None:
    """64 tokens are 4 blocks, of two ranks that share each 2; the prefill engine holds more for lookahead."""
    sharded = dataclasses.replace(SPEC, dcp_sharded=shards > 1)
    assert positions(sharded, shards=shards).of_prompt([[1, 2, 3, 4, 5]], 64) == ([1, 2, 3, 4][:kept],)


def test_a_drafter_that_every_rank_has_whole_is_refused() -> None:
    replicated = dataclasses.replace(SPEC, dcp_sharded=False)
    positions(replicated, shards=1)
    with pytest.raises(ValueError, match="decode_context_parallel_size: KV of a drafter"):
        positions(dataclasses.replace(SPEC, dcp_sharded=True), replicated, shards=2)
