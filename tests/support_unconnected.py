"""A worker class of vLLM's that makes no KV connector, as `worker_cls` may name one."""

from typing import Any
from unittest.mock import patch

from vllm.v1.worker import gpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker


class UnconnectedWorker(CPUWorker):
    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with patch.object(gpu_worker, "ensure_kv_transfer_initialized"):
            super().initialize_from_config(kv_cache_config)
