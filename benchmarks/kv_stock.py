"""vLLM's own NIXL connectors with two of their CPU defaults repaired, to separate that gain from the gain of streaming.

The engines of the benchmarks load it; nothing else uses it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector, NixlPushConnector
from vllm.platforms import current_platform

from connectors.agent import patient


@contextmanager
def repaired() -> Iterator[None]:
    """In this context NIXL gets no progress thread, which would spin a core, and the compute thread keeps its cores."""
    cores = os.sched_getaffinity(0)
    config, agent = base_worker.nixl_agent_config, base_worker.NixlWrapper
    base_worker.nixl_agent_config = functools.partial(config, enable_prog_thread=False)
    base_worker.NixlWrapper = patient(agent)
    try:
        yield
    finally:
        base_worker.nixl_agent_config, base_worker.NixlWrapper = config, agent
        if current_platform.is_cpu():
            os.sched_setaffinity(0, cores)


class PatchedPush(NixlPushConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with repaired():
            super().__init__(vllm_config, role, kv_cache_config)


class PatchedPull(NixlPullConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with repaired():
            super().__init__(vllm_config, role, kv_cache_config)
