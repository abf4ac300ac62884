"""Posts WRITEs and lets them go: turns chunks of computed blocks into NIXL descriptors and handles.

It reads vLLM's memory layout from vLLM's NIXL worker. It does not know who waits for what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import _SHARED_REGION_GROUP_ID
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import MambaSpec

from connectors.push.actions import NO_BLOCK, Chunk, Post
from connectors.push.blocks.chunks import WHOLE, LayoutError, Shard, is_whole, pair_blocks, upwards

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

logger = init_logger("vllm.pd.push")


# What vLLM's own plans raise where the two ends' blocks do not fit. The connection is whole.
MISFITS = (ValueError, AssertionError, LookupError, NotImplementedError)


def shards(worker: NixlPushConnectorWorker, engine: str) -> dict[int, Shard]:
    """By rank of a connected engine that this one writes to, what that rank has of each prompt. Empty where its blocks
    are not like ours: of the same size, and written by a rank with the same heads."""
    topology = worker.transfer_topo
    if topology is None or engine not in worker.tp_mappings:
        return {}
    info, ranks = topology.get_engine_info(engine), sorted(worker.dst_xfer_side_handles[engine])
    alike = (
        info.remote_block_size == worker.block_size
        and info.remote_physical_blocks_per_logical == worker._physical_blocks_per_logical_kv_block
        and len(worker.dst_region_num_blocks[engine]) == len(worker.dst_region_num_blocks[worker.engine_id])
        and worker.pp_size == 1
    )
    if alike and len(ranks) == 1 and info.remote_dcp_size == worker.dcp_size:
        return {rank: WHOLE for rank in ranks if topology.tp_ratio(info.remote_tp_size) == 1}
    if alike and info.remote_dcp_size > worker.dcp_size == 1:  # latents only: each rank of ours has all heads
        return {rank: Shard(rank % info.remote_dcp_size, info.remote_dcp_size) for rank in ranks}
    return {}


def takes_chunks(worker: NixlPushConnectorWorker, engine: str) -> bool:
    """Whether blocks of a connected engine can be written one by one: blocks like ours, of what `descriptors` knows."""
    return bool(
        shards(worker, engine)
        and worker.dst_region_group_ids[engine] == worker.region_group_ids
        and not worker._is_csa_linear
        and not worker._transfer_layer_group_ids
    )


def descriptors(
    worker: NixlPushConnectorWorker, engine: str, group: int, blocks: Sequence[int], regions: Sequence[int]
) -> np.ndarray:
    """NIXL's descriptors, in `engine`, of logical blocks of this KV cache group in these regions, region by region.

    One per region and kernel block of attention. After all of those come the states: of each region that has any, one
    per part of a state and logical block (`_build_mamba_local` in base_worker.py).
    """
    ratio = worker._physical_blocks_per_logical_kv_block
    region_blocks = worker.dst_region_num_blocks[engine]
    if not is_state(worker, group):
        return _region_by_region(kernel_blocks(blocks, ratio), region_blocks, regions)
    with_states, parts = worker._ssm_region_indices, len(worker._conv_decomp.local_conv_offsets) + 1
    places = [at * parts + part for at, it in enumerate(with_states) if it in regions for part in range(parts)]
    sizes = [region_blocks[0] // ratio] * (parts * len(with_states))
    return sum(region_blocks) + _region_by_region(np.asarray(blocks, dtype=np.int64), sizes, places)


def is_state(worker: NixlPushConnectorWorker, group: int) -> bool:
    """Whether a block of this KV cache group is a recurrent state, and has no kernel blocks."""
    return issubclass(worker._group_spec_types[group], MambaSpec)


def _region_by_region(blocks: np.ndarray, region_blocks: Sequence[int], regions: Sequence[int]) -> np.ndarray:
    offsets = np.cumsum([0, *region_blocks[:-1]], dtype=np.int64)[list(regions)]
    return (offsets[:, None] + blocks[None, :]).ravel()


def post_chunks(worker: NixlPushConnectorWorker, post: Post, record: Callable[[Any], None]) -> None:
    """A WRITE for all of `post` to each rank, if it needs one. `record` gets its handle. Raises LayoutError, NIXL's
    errors."""
    engine = post.order.decode.engine_id
    groups = len(worker.kv_cache_config.transfer_groups)
    if len(post.order.blocks) != groups:
        raise LayoutError(f"decode has {len(post.order.blocks)} KV cache groups, prefill {groups}")
    for rank, shard in shards(worker, engine).items():
        local, remote = _described(worker, post, shard)
        if not local.size:
            continue
        handle = worker.nixl_wrapper.make_prepped_xfer(
            "WRITE",
            worker.src_xfer_handles_by_block_size[worker.block_size],
            local,
            worker.dst_xfer_side_handles[engine][rank],
            remote,
        )
        record(handle)
        try:
            worker.nixl_wrapper.transfer(handle)
        except Exception:
            # Part of it may be in flight: the handle's own state shows when it ends, and how.
            logger.exception("NIXL could not post a WRITE of %s", post.stream)


def _described(worker: NixlPushConnectorWorker, post: Post, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """Descriptors here and there of what a rank gets. Raises LayoutError."""
    engine = post.order.decode.engine_id
    their_total = min(worker.dst_region_num_blocks[engine]) // worker._physical_blocks_per_logical_kv_block
    local: list[np.ndarray] = [np.empty(0, np.int64)]
    remote = local.copy()
    for some, chunks in _by_regions(post.chunks):
        for group, reserved in enumerate(post.order.blocks):
            mine, theirs = upwards(*pair_blocks(chunks, post.total_blocks, reserved, group, shard))
            if not mine:
                continue
            if min(theirs) < 0 or max(theirs) >= their_total:
                raise LayoutError(f"decode named blocks {min(theirs)} to {max(theirs)} of {their_total}")
            regions = [region for region in _regions_of(worker, group) if some is None or region in some]
            local.append(descriptors(worker, worker.engine_id, group, mine, regions))
            remote.append(descriptors(worker, engine, group, theirs, regions))
    return np.concatenate(local), np.concatenate(remote)


def _regions_of(worker: NixlPushConnectorWorker, group: int) -> list[int]:
    """The regions with KV of this group. Groups of equal sizes share them, as they share the blocks' numbers."""
    return [at for at, owner in enumerate(worker.region_group_ids) if owner in (group, _SHARED_REGION_GROUP_ID)]


def post_whole(worker: NixlPushConnectorWorker, post: Post) -> None:
    """WRITEs of the whole prompt by vLLM's own plan, which handles unequal block sizes, ranks and cache groups.

    The worker's `_xfer_blocks` records the handle of each. Raises ConnectionError where one could not be posted,
    LayoutError, and what the plan raises: others may be in flight then.
    """
    engine = post.order.decode.engine_id
    info = worker.transfer_topo.get_engine_info(engine)
    if info.remote_dcp_size != worker.dcp_size:
        sizes = f"{info.remote_dcp_size} ranks of decode share each prompt, and {worker.dcp_size} of prefill"
        raise LayoutError(f"{sizes}: its blocks cannot be sent whole")
    their_total = worker.dst_num_blocks[engine] // info.remote_physical_blocks_per_logical
    for block in (block for group in post.order.blocks for block in group):
        if not 0 <= block < their_total:
            raise LayoutError(f"decode named block {block} of {their_total}")
    local = _all_blocks(post)
    ratio = worker._physical_blocks_per_logical_kv_block
    meta = ReqMeta(
        local_block_ids=local,
        local_physical_block_ids=worker._logical_to_kernel_block_ids(local, ratio),
        tp_size=worker.world_size,
        remote=RemoteMeta(
            block_ids=tuple(post.order.blocks),
            host="",
            port=0,
            engine_id=engine,
            request_id=post.order.request,
        ),
    )
    worker._send_failures.discard(post.stream)
    worker._xfer_blocks_for_req(post.stream, meta)
    worker._sending_transfers.pop(post.stream, None)  # vLLM's own record
    if post.stream in worker._send_failures:
        worker._send_failures.discard(post.stream)
        raise ConnectionError("vLLM could not post a WRITE; see the log above")


def telemetry(worker: NixlPushConnectorWorker, handle: Any) -> Any:
    """NIXL's of a WRITE that has ended; None where there is none."""
    try:
        return worker.nixl_wrapper.get_xfer_telemetry(handle)
    except Exception:
        logger.debug("no telemetry of a WRITE", exc_info=True)
        return None


def let_go(worker: NixlPushConnectorWorker, handle: Any) -> bool:
    """Whether NIXL releases it. It keeps a WRITE that has not ended."""
    try:
        worker.nixl_wrapper.release_xfer_handle(handle)
    except Exception:
        logger.debug("NIXL keeps a transfer handle", exc_info=True)
        return False
    return True


def _all_blocks(post: Post) -> tuple[list[int], ...]:
    """Local block ids of the whole prompt, by KV cache group, each once: a chunk may have come in parts."""
    if is_whole(post):
        (chunk,) = post.chunks
        return tuple(list(group) for group in chunk.blocks)
    blocks = {chunk.start + at: ids for chunk in post.chunks for at, ids in enumerate(zip(*chunk.blocks, strict=True))}
    if len(blocks) != post.total_blocks:
        raise LayoutError(f"{len(blocks)} blocks of a prompt of {post.total_blocks}, which is sent whole")
    in_order = [blocks[at] for at in sorted(blocks)]
    return tuple([block for block in group if block != NO_BLOCK] for group in zip(*in_order, strict=True))


def _by_regions(chunks: Sequence[Chunk]) -> list[tuple[tuple[int, ...] | None, list[Chunk]]]:
    found: dict[tuple[int, ...] | None, list[Chunk]] = {}
    for chunk in chunks:
        found.setdefault(chunk.regions, []).append(chunk)
    return list(found.items())


def kernel_blocks(blocks: Sequence[int], ratio: int) -> np.ndarray:
    """A logical block is `ratio` consecutive kernel blocks where the attention kernel wants smaller ones."""
    ids = np.asarray(blocks, dtype=np.int64)
    return ids if ratio == 1 else (ids[:, None] * ratio + np.arange(ratio)).ravel()
