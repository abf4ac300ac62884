"""The host tier: KV that an engine has computed is kept in host memory too, and loaded when its device has evicted it.

vLLM's own scheduler half of such a tier decides what is stored, loaded and evicted (the least recently used). It is a
part of our connector, not a second one beside it: a request gets what it lacks from one source, a push or the tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.manager import LoadRequestState, SimpleCPUOffloadScheduler, TransferMeta
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class HostTier(SimpleCPUOffloadScheduler):
    """Pins blocks here and on the device while they are copied, whatever becomes of their requests."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, capacity_bytes: int) -> None:
        """`capacity_bytes`: of each rank. Raises ValueError for a model whose KV the tier cannot take."""
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        # What vLLM computes again instead of caching it (`swa_bounded_replay`) it would take for loaded.
        if not any(isinstance(spec, FullAttentionSpec) for spec in specs) or not all(
            isinstance(spec, FullAttentionSpec | SlidingWindowSpec) and spec.prefix_cacheable for spec in specs
        ):
            raise ValueError(
                "kv.host_tier_bytes: takes models whose layers attend to the whole prompt, some perhaps to a sliding "
                "window; set it to 0 for this one"
            )
        for window, block_size in (
            (it.sliding_window, it.block_size) for it in specs if isinstance(it, SlidingWindowSpec)
        ):
            if window % block_size == 1:  # then a request has a block that is not loaded, and would be cached with it
                raise ValueError(
                    f"kv.host_tier_bytes: takes no window of {window} tokens with blocks of {block_size}, which begins "
                    "with the last token of a block; set it to 0"
                )
        sizes = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        super().__init__(vllm_config, kv_cache_config, capacity_bytes, *sizes)
        self._hit_tokens = self._blocks_told = 0

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if is_pushed(request):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._hit_tokens += num_external_tokens
        if (stats := request.prefill_stats) is not None and not request.num_preemptions:  # then vLLM has just set them
            # They are this engine's own, as those on its device.
            stats.num_local_cached_tokens += num_external_tokens
            stats.num_external_cached_tokens -= num_external_tokens

    def loads(self, key: str) -> bool:
        """Whether this request's blocks are being loaded, also since a reset that came meanwhile."""
        return key in self._reqs_to_load or key in self._abandoned_reqs_to_load

    @property
    def loading_blocks(self) -> int:
        """Of the device: reserved for what is being loaded, or will be with the next step."""
        return sum(len(state.transfer_meta.gpu_block_ids) for state in self._reqs_to_load.values())

    def held(self, wanted: Sequence[tuple[int, BlockHash]]) -> list[KVCacheBlock]:
        """The blocks in host memory of these (KV cache group, hash), up to the first that is not there."""
        blocks: list[KVCacheBlock] = []
        for group, block_hash in wanted:
            if (found := self.cpu_block_pool.get_cached_block(block_hash, [group])) is None:
                break
            blocks += found
        return blocks

    def load(self, key: str, held: Sequence[KVCacheBlock], targets: Sequence[KVCacheBlock]) -> None:
        """Load blocks of host memory into blocks of the device for no request, from the next step on. `copied` is told
        of `key` when all ranks have loaded them."""
        assert self._gpu_block_pool is not None
        self.cpu_block_pool.touch(held)
        self._gpu_block_pool.touch(targets)
        blocks = TransferMeta([block.block_id for block in targets], [block.block_id for block in held])
        self._reqs_to_load[key] = LoadRequestState(None, blocks)

    def copied(self, loaded: set[str] | None, stored: Mapping[int, int]) -> None:
        """The requests that all ranks have loaded, others among them, and how many ranks have ended which stores."""
        ended = SimpleCPUOffloadWorkerMetadata(dict(stored))
        self.update_connector_output(KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=ended))

    def take_changes(self) -> tuple[int, int]:
        """Since the last call: tokens of prompts that were found here, and how many more blocks there are."""
        blocks = len(self.cpu_block_pool.cached_block_hash_to_block)
        changes = self._hit_tokens, blocks - self._blocks_told
        self._hit_tokens, self._blocks_told = 0, blocks
        return changes


def is_pushed(request: Request) -> bool:
    """Whether its KV is still to come from another engine."""
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
