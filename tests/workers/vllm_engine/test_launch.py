"""How many threads an engine on CPU computes with, in a container that has CPU time for less than its cores; what
becomes of an engine that starts for nobody; how UCX watches memory; how large its steps are, and the KV of a token; and
which GPUs the ranks of a group take."""

import asyncio
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_models import special_model

from orchestrator.config.settings import KVConfig
from workers.engine import Group

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("limit", "ranks", "threads"), [(2.5, 1, 2), (2.5, 2, 1), (0.5, 2, 1), (8.0, 1, None), (math.inf, 1, None)]
)
def test_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch, limit: float, ranks: int, threads: int | None) -> None:
    from workers.vllm_engine import launch

    said: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch, "cpu_limit", lambda: limit)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(launch.torch, "set_num_threads", said.append)
    environment: dict[str, str] = {}
    launch._limit_threads(environment, ranks)
    assert (said, environment) == (([threads], {"OMP_NUM_THREADS": str(threads)}) if threads else ([], {}))


def test_number_of_threads_from_outside_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.vllm_engine import launch

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(launch, "cpu_limit", lambda: 1.0)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(launch.torch, "set_num_threads", lambda threads: pytest.fail("overridden"))
    environment: dict[str, str] = {}
    launch._limit_threads(environment, 1)
    assert environment == {}


def test_memory_hooks_that_take_long_are_for_rdma(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from workers.vllm_engine import launch

    monkeypatch.delenv("UCX_MEM_MMAP_HOOK_MODE", raising=False)
    monkeypatch.setattr(launch, "_RDMA", tmp_path / "infiniband")
    assert launch._memory_hooks() == {"UCX_MEM_MMAP_HOOK_MODE": "reloc"}
    monkeypatch.setenv("UCX_MEM_MMAP_HOOK_MODE", "bistro")
    assert launch._memory_hooks() == {}, "what is set from outside holds"
    monkeypatch.delenv("UCX_MEM_MMAP_HOOK_MODE")
    launch._RDMA.mkdir()
    assert launch._memory_hooks() == {}


def test_an_engine_that_is_ready_after_its_worker_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.vllm_engine.engine import VllmEngine
    from workers.vllm_engine.launch import Setup

    where = {"kv_host": "127.0.0.1", "kv_advertise": "127.0.0.1", "kv_port": 1}
    setup = Setup(model="m", engine_args={}, engine_id="e", kv=KVConfig(), encrypted=False, **where)
    ready, failed, ends = threading.Event(), list[Any](), list[str]()

    class Late(VllmEngine):
        def _start_blocking(self) -> Any:
            ready.wait(10)
            return SimpleNamespace(shutdown=lambda: ends.append("engine")), None

    async def stopped() -> None:
        engine = Late(setup)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0.01)
        starting.cancel()

    monkeypatch.setattr(threading, "excepthook", failed.append)
    asyncio.run(stopped())  # its loop is closed
    (thread,) = (each for each in threading.enumerate() if each.name == "pd-call")
    ready.set()
    thread.join(10)
    assert ends == ["engine"] and not failed


def test_each_rank_of_a_group_takes_the_first_gpus_that_it_sees(tmp_path: Path) -> None:
    """vLLM would count from a rank's number on its host. Whoever starts a rank shows it its own GPUs only."""
    from workers.vllm_engine.launch import Setup, build_config

    model, group = special_model(tmp_path / "experts", "experts"), Group(9, 16, "127.0.0.1", 2)
    args = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512, "data_parallel_size": 16}
    where = {"kv_host": "127.0.0.1", "kv_port": 1, "kv_advertise": "127.0.0.1"}
    setup = Setup(model=str(model), engine_args=args, engine_id="e", kv=KVConfig(), **where)
    parallel = build_config(setup, group).parallel_config
    assert (parallel.data_parallel_rank, parallel.data_parallel_size) == (9, 16)
    assert (parallel.data_parallel_size_local, parallel.data_parallel_rank_local) == (1, None)


def test_steps_are_as_large_as_those_of_vllms_server(tmp_path: Path) -> None:
    """Where no argument says it: vLLM's choice for no use in particular is a fraction of that, on most GPUs too."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from workers.vllm_engine.launch import Setup, build_config

    args = {"skip_tokenizer_init": True, "max_model_len": 512, "tensor_parallel_size": 2}
    where = {"kv_host": "127.0.0.1", "kv_port": 1, "kv_advertise": "127.0.0.1"}
    model = special_model(tmp_path / "windows", "windows")
    steps = build_config(
        Setup(model=str(model), engine_args=args, engine_id="e", kv=KVConfig(), **where)
    ).scheduler_config
    tokens, sequences = (most[UsageContext.OPENAI_API_SERVER] for most in AsyncEngineArgs.get_batch_defaults(2))
    assert (steps.max_num_batched_tokens, steps.max_num_seqs) == (tokens, sequences)


@pytest.mark.parametrize("windows", [False, True])
def test_kv_of_a_token_is_exact_for_one_group_and_for_equal_ones(windows: bool) -> None:
    """As vLLM lays caches out: of layers of unequal size in one group, as a drafter's, and of several groups."""
    import torch
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from workers.vllm_engine.plugin import _pd_describe

    layout: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "dtype": torch.float32}
    full = FullAttentionSpec(**layout, head_size=64)
    if windows:
        part = SlidingWindowSpec(**layout, head_size=64, sliding_window=32)
        groups, sizes = [KVCacheGroupSpec(["all"], full), KVCacheGroupSpec(["part"], part)], 64 + 64
    else:
        layers = {"model": full, "drafter": FullAttentionSpec(**layout, head_size=32)}
        groups, sizes = [KVCacheGroupSpec([*layers], UniformTypeKVCacheSpecs.from_specs(layers))], 64 + 32
    caches = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout["LBHNC"],
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
        block_size=16,
    )
    parallel = SimpleNamespace(decode_context_parallel_size=1, world_size=2)
    config: Any = SimpleNamespace(
        cache_config=caches,
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=parallel,
        kv_transfer_config=SimpleNamespace(engine_id="e"),
    )
    laid_out = generate_scheduler_kv_cache_config([get_kv_cache_config_from_groups(config, groups, 1 << 24)])
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(kv_cache_config=laid_out, get_kv_connector=lambda: None),
        vllm_config=config,
        model_executor=SimpleNamespace(collective_rpc=lambda ask: [""]),
    )
    keys_and_values, ranks, bytes_each = 2, 2, 4
    assert _pd_describe(engine)["kv_bytes_per_token"] == sizes * keys_and_values * bytes_each * ranks
