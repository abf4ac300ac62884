"""The connector that vLLM loads (`kv_connector_module_path`): a scheduler half in the engine, a worker half per rank.

Scheduler: bind_gpu_block_pool, on_new_request, get_num_new_matched_tokens, update_state_after_alloc,
build_connector_meta, request_finished, update_connector_output, has_pending_push_work. Worker: handle_preemptions,
start_load_kv, save_kv_layer, wait_for_save, get_transfer_results.

With `kv.host_tier_bytes` each half has a part for the host tier, which hears of every step too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPushConnector
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from connectors import handshake
from connectors.host.memory import HostMemory
from connectors.host.tier import HostTier, is_pushed
from connectors.push.blocks.positions import keep_for_the_last_token
from connectors.push.metadata import PushMetadata, PushOptions, PushStats, RankReport
from connectors.push.scheduler import PushScheduler
from connectors.push.worker import PushWorker
from connectors.unsupported import unsupported

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class PushConnector(NixlPushConnector):
    """Serves both roles: each request's parameters say whether its KV is sent or received here."""

    host_tier: HostTier | None = None
    _host_memory: HostMemory | None = None

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self.refuse_unsupported(vllm_config)
        handshake.install()
        # Not the parent's constructor: it would build the stock halves.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_scheduler: PushScheduler | None = None
        self.connector_worker: PushWorker | None = None
        self._host_bytes = PushOptions.of(vllm_config).host_tier_bytes
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = PushScheduler(vllm_config, self.engine_id, kv_cache_config)
            if self._host_bytes:
                self.host_tier = HostTier(vllm_config, kv_cache_config, self._host_bytes)
                self.connector_scheduler.lending.tier = self.host_tier
        else:
            self.connector_worker = PushWorker(vllm_config, self.engine_id, kv_cache_config)

    @staticmethod
    def refuse_unsupported(vllm_config: VllmConfig) -> None:
        """Raises ValueError for a setting with which KV would be lost or wrong. It names the setting and the fix."""
        model, parallel, kv = vllm_config.model_config, vllm_config.parallel_config, vllm_config.kv_transfer_config
        assert kv is not None
        names = ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size")
        settings = {name: getattr(parallel, name) for name in names} | {
            "enable_dbo": parallel.use_ubatching,
            "enable_prefix_caching": bool(vllm_config.cache_config.enable_prefix_caching),
            "enable_sleep_mode": model.enable_sleep_mode,
            "aux_output_config": {"enable_return_routed_experts": vllm_config.aux_output_config.enabled},
            "attention_config": {"hisparse_config": vllm_config.attention_config.hisparse_config},
        }
        options = (kv.get_from_extra_config(name, "") for name in ("transfer", "host_tier_bytes", "verify"))
        if (found := unsupported(settings, *options)) is not None:
            raise ValueError(": ".join(found))
        device = current_platform.device_type
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device {device}: KV can be pushed from CUDA devices and CPUs only")
        if kv.kv_buffer_device != device:
            raise ValueError(
                f"kv_buffer_device: KV is pushed from device to device, expected {device!r}, got "
                f"{kv.kv_buffer_device!r}; remove the setting"
            )
        heads, ranks = model.get_total_num_kv_heads(), parallel.tensor_parallel_size
        if parallel.decode_context_parallel_size > 1:
            PushConnector._refuse_shards(vllm_config, device)
        if not model.use_mla and heads % ranks and ranks % heads:
            raise ValueError(
                f"tensor_parallel_size: {heads} KV heads cannot be divided among {ranks} ranks; choose a divisor or a "
                f"multiple of {heads}"
            )

    @staticmethod
    def _refuse_shards(vllm_config: VllmConfig, device: str) -> None:
        """Raises ValueError where blocks of a prompt cannot be dealt out to the ranks of decode, one block to each."""
        parallel, name = vllm_config.parallel_config, "decode_context_parallel_size"
        shards, ranks, latent = getattr(parallel, name), parallel.tensor_parallel_size, vllm_config.model_config.use_mla
        block_size, interleave = vllm_config.cache_config.block_size, parallel.cp_kv_cache_interleave_size
        if device == "cpu":
            raise ValueError(f"{name}: vLLM has no kernels for it on CPUs, expected 1, got {shards}; remove it")
        if not latent or shards != ranks:
            raise ValueError(
                f"{name}: prompts can be shared by all ranks of a model with latent attention, expected "
                f"{ranks if latent else 1}, got {shards}"
            )
        if interleave != block_size:
            raise ValueError(
                f"cp_kv_cache_interleave_size: KV can be pushed if a block is one rank's, expected the block size, "
                f"{block_size}, got {interleave}"
            )

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        keep_for_the_last_token(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        assert self.connector_scheduler is not None
        self.connector_scheduler.lending.pool = gpu_block_pool
        if self.host_tier is not None:
            self.host_tier.bind_gpu_block_pool(gpu_block_pool)

    # ---- the scheduler, where there is a host tier -------------------------------------------------------------

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """With a push: it brings whatever any group of layers lacks. The tier knows of one length for all of them."""
        return self.host_tier is None

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] or self.host_tier is None:
            return found
        return self.host_tier.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        loaded_tokens = 0 if is_pushed(request) else num_external_tokens
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self.host_tier is not None:
            self.host_tier.update_state_after_alloc(request, blocks, loaded_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        if self.host_tier is not None:
            assert isinstance(metadata, PushMetadata)
            metadata.host = self.host_tier.build_connector_meta(scheduler_output)
        return metadata

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.host_tier is not None:
            self.host_tier.request_finished_all_groups(request, block_ids)  # it pins what it still has to store
            if self.host_tier.loads(request.request_id):
                block_ids = tuple([] for _ in block_ids)  # vLLM itself holds them, until they are loaded
        return super().request_finished_all_groups(request, block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self.host_tier is not None:  # first, as long as what was loaded to be lent is among what has come
            report = connector_output.kv_connector_worker_meta
            stored = report.stored if isinstance(report, RankReport) else {}
            self.host_tier.copied(connector_output.finished_recving, stored)
        super().update_connector_output(connector_output)

    def has_pending_push_work(self) -> bool:
        stores = self.host_tier is not None and self.host_tier.has_pending_stores()
        return stores or super().has_pending_push_work()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.host_tier.take_events() if self.host_tier is not None else ()

    def reset_cache(self) -> bool | None:
        return self.host_tier.reset() if self.host_tier is not None else None

    # ---- a rank ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._host_bytes:
            assert (worker := self.connector_worker) is not None
            self._host_memory = HostMemory(
                worker,
                self.kv_cache_config,
                self._host_bytes,
                begin=worker.take_cores,
                ended=worker.wake_event.set,
                loaded=lambda *load: worker._records.put(lambda stats: stats.record_load(*load)),
            )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self.connector_worker is not None
        metadata = self._metadata()
        self.connector_worker.start_load_kv(metadata)
        if self._host_memory is not None and metadata.host is not None and metadata.host.load_gpu_blocks:
            self._host_memory.load(metadata.host)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self.connector_worker is not None and isinstance(kv_connector_metadata, PushMetadata)
        self.connector_worker.handle_preemptions(kv_connector_metadata)

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """Not called where a full CUDA graph is replayed: such a step's KV goes out at its end."""
        assert self.connector_worker is not None
        self.connector_worker.on_layer(layer_name, self._metadata(), get_forward_context())

    def finish_forward(self) -> None:
        """Called by the second model runner, before sampling. A drafter may follow, which writes KV too."""
        assert self.connector_worker is not None
        if not self.connector_worker.drafts:
            self.connector_worker.on_computed(self._metadata())

    def wait_for_save(self) -> None:
        assert self.connector_worker is not None
        metadata = self._metadata()
        self.connector_worker.on_computed(metadata)
        if self._host_memory is not None and metadata.host is not None and metadata.host.store_gpu_blocks:
            self._host_memory.store(metadata.host, self.connector_worker.device_event())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if self._host_memory is not None:
            results.finished_recving |= self._host_memory.take_loaded()
        return results

    def _metadata(self) -> PushMetadata:
        metadata = self._connector_metadata
        assert isinstance(metadata, PushMetadata), type(metadata)
        return metadata

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self.connector_worker is not None
        return self.connector_worker.reports.take(self._host_memory.take_stored() if self._host_memory else None)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.connector_scheduler is not None:
            changes = self.host_tier.take_changes() if self.host_tier is not None else (0, 0)
            return self.connector_scheduler.take_stats(*changes)
        return super().get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return PushStats(data=data) if data is not None else PushStats()

    def shutdown(self) -> None:
        if self._host_memory is not None:
            self._host_memory.close()
        super().shutdown()
