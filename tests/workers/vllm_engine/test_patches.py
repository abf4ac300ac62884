"""Fixes of vLLM's defects, without an engine."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.vllm


def test_second_model_runner_tells_of_preemptions_before_it_touches_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own `update_requests`, on a runner of which only this method is real."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from orchestrator.process.parent import PARENT
    from workers.vllm_engine import patches, plugin

    monkeypatch.setattr(GPUModelRunner, "update_requests", GPUModelRunner.update_requests)  # given back afterwards
    monkeypatch.setattr(plugin, "_patched", False)
    monkeypatch.setattr(plugin, "share_gloo_device", lambda: None)
    monkeypatch.setattr(plugin, "patch_cpu_engines", lambda: None)
    monkeypatch.setenv(PARENT, "1")
    plugin.register()

    order: list[Any] = []
    connector = types.SimpleNamespace(handle_preemptions=order.append)
    monkeypatch.setattr(patches, "has_kv_transfer_group", lambda: True, raising=False)
    monkeypatch.setattr(patches, "get_kv_transfer_group", lambda: connector, raising=False)
    lengths = np.zeros(1, dtype=np.int32)
    runner = types.SimpleNamespace(
        req_states=types.SimpleNamespace(
            num_computed_tokens_np=lengths,
            prefill_len=types.SimpleNamespace(np=lengths),
            num_computed_prefill_tokens=lengths.copy(),
        ),
        kv_block_zeroer=types.SimpleNamespace(zero_block_ids=order.append),
    )
    step = types.SimpleNamespace(
        scheduled_cached_reqs=types.SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
        new_block_ids_to_zero=[3],
        kv_cache_block_copies=None,
        kv_connector_metadata="who was preempted",
    )
    GPUModelRunner.update_requests(runner, step)
    assert order == ["who was preempted", [3]]
