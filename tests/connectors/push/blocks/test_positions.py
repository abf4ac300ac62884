"""Where the KV of a prompt is, by vLLM's own specifications of caches."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from connectors.push.actions import NO_BLOCK
from connectors.push.blocks.positions import Positions
from connectors.push.connector import PushConnector

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


def test_a_group_with_layers_of_both_kinds_is_needed_whole() -> None:
    """Without the hybrid KV cache manager vLLM names the window of some layers as that of all."""
    windowed = dataclasses.replace(SPEC, sliding_window=32)
    both = FullAttentionSpec.merge([SPEC, windowed])
    assert both.sliding_window == 32
    assert positions(both, shards=1).first_kept(100) == [0]


LAYOUT = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}


def engine(part: Any) -> KVCacheManager:
    """vLLM's own memory of an engine of ours, whose layers attend to the whole prompt, and to this part of it."""
    groups = [KVCacheGroupSpec([name], spec) for name, spec in (("all", SPEC), ("part", part))]
    manager = KVCacheManager(KVCacheConfig(100, [], groups), 512, 16, 16, max_in_flight_tokens=64)
    connector = PushConnector.__new__(PushConnector)
    connector.connector_scheduler = SimpleNamespace(lending=SimpleNamespace())  # type: ignore[assignment]
    connector.bind_kv_cache_manager(manager)
    return manager


def prompt(tokens: int) -> Request:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    return Request("r", list(range(tokens)), SamplingParams(max_tokens=1), None, block_hasher=hasher)


def blocks(manager: KVCacheManager, request: Request) -> list[int]:
    return manager.get_block_ids(request.request_id)[1]


@pytest.mark.parametrize("window", [1, 16, 17, 40])
@pytest.mark.parametrize("tokens", range(60, 78))
def test_both_ends_have_what_the_last_token_of_a_prompt_attends_to(window: int, tokens: int) -> None:
    """Prefill until it is sent, also when the request has ended; decode from the moment it reserves memory."""
    spec = SlidingWindowSpec(**LAYOUT, sliding_window=window)
    kept = range((tokens - window) // 16, -(-tokens // 16))
    prefill = engine(spec)
    request = prompt(tokens)
    for start in range(0, tokens, 32):
        request.num_computed_tokens = start
        assert prefill.allocate_slots(request, min(32, tokens - start)) is not None
    sent = blocks(prefill, request)
    assert NO_BLOCK not in [sent[at] for at in kept]
    prefill.remove_skipped_blocks("r", tokens, tokens)  # as vLLM does when the request ends
    assert blocks(prefill, request) == [block if at in kept else NO_BLOCK for at, block in enumerate(sent)]

    decode = engine(spec)
    request = prompt(tokens)
    assert decode.allocate_slots(request, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True) is not None
    ids = decode.get_blocks("r").get_unhashed_block_ids_all_groups()
    reserved = positions(SPEC, spec, shards=1).reserved(ids, tokens)[1]
    assert len(reserved) == len(kept) and NO_BLOCK not in reserved
    request.num_computed_tokens = tokens - 1  # vLLM computes the last token again
    assert decode.allocate_slots(request, 1) is not None and blocks(decode, request)[kept.start :] == reserved


@pytest.mark.parametrize("tokens", [63, 64, 65])
def test_a_fixed_part_of_the_prompt_stays_until_the_next_token_is_computed(tokens: int) -> None:
    decode = engine(ChunkedLocalAttentionSpec(**LAYOUT, attention_chunk_size=32))
    request = prompt(tokens)
    assert decode.allocate_slots(request, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True) is not None
    assert [block != NO_BLOCK for block in blocks(decode, request)] == {
        63: [False, False, True, True],
        64: [False, False, True, True],
        65: [False, False, False, False, True],
    }[tokens]
