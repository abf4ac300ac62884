"""Our code inside vLLM's engine process: engine utilities, and its end with the process that started it.

`run_engine_core` replaces the target of vLLM's engine process, for fork and for spawn, `run_rank` that of its ranks on
CPU. `register` is the entry point that vLLM loads as a general plugin, for engines started by other means.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from orchestrator.process.parent import PARENT, die_with_parent
from workers.vllm_engine import loop
from workers.vllm_engine.codec.continued import continue_answers
from workers.vllm_engine.codec.messages import block_hashes
from workers.vllm_engine.patches import (
    cache_only_what_is_computed,
    free_what_did_not_come,
    patch_as_configured,
    patch_cpu_engines,
    spare_groups_of_one,
    tell_preemptions_first,
)
from workers.vllm_engine.ranks import tell_why

_CORES = "PD_ENGINE_CORES"  # "0,1|2,3": cores that each rank computes on
SOCKETS = "VLLM_RPC_BASE_PATH"  # vLLM's own name: the folder for its local sockets
_patched = False  # whether this process has the fixes of `patches`
_vllm_target = EngineCoreProc.run_engine_core
_vllm_coordinator = DPCoordinatorProc.run_coordinator
_vllm_rank = multiproc_executor.WorkerProc.worker_main
_vllm_abort = EngineCore.abort_requests


@contextmanager
def engine_process() -> Iterator[None]:
    """In this context, engine processes that vLLM starts run `run_engine_core`."""
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(_vllm_target)
        DPCoordinatorProc.run_coordinator = staticmethod(_vllm_coordinator)


def engine_env(cores: list[list[int]]) -> dict[str, str]:
    """What the engine's processes read. `cores`: each rank's; empty for any."""
    return {PARENT: str(os.getpid()), _CORES: "|".join(",".join(map(str, share)) for share in cores)}


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Target of the engine process."""
    die_with_parent()
    if (shares := _shares()) and issubclass(kwargs["executor_class"], UniProcExecutor):
        _use_cores(shares[0])
    elif shares:
        os.sched_setaffinity(0, sum(shares, []))
    if current_platform.is_cpu():
        os.environ[PARENT] = str(os.getpid())
        multiproc_executor.WorkerProc.worker_main = staticmethod(run_rank)
    register()
    patch_as_configured(kwargs["vllm_config"])
    if folder := os.environ.get(SOCKETS):
        _set_rendezvous_folder(folder)
        loop.name_socket(folder, kwargs["executor_class"], kwargs["vllm_config"])
    EngineCoreProc._process_engine_step = loop.process_engine_step
    tell_why(EngineCoreProc, then=loop.spare_sockets)
    _vllm_target(*args, **kwargs)


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    """Target of the process that coordinates the engines of a group."""
    die_with_parent()
    _vllm_coordinator(*args, **kwargs)


def run_rank(*args: Any, **kwargs: Any) -> None:
    """Target of the process of a rank."""
    die_with_parent()
    patch_as_configured(kwargs["vllm_config"])
    if shares := _shares():
        _use_cores(shares[kwargs["local_rank"]])
    tell_why(multiproc_executor.WorkerProc)
    _vllm_rank(*args, **kwargs)


def register() -> None:
    """Add the engine utilities, called by `call_utility_async(name, ...)`, an abort that frees pushed KV too, and a
    reset that empties the host tier too.

    Idempotent. vLLM calls it in every process of an engine. Processes that a worker started also get `patches`.
    """
    global _patched
    if os.environ.get(PARENT) and not _patched:
        _patched = True
        spare_groups_of_one()
        if not current_platform.is_cpu():  # there few engines have that model runner, which takes long to load
            tell_preemptions_first()
        cache_only_what_is_computed()
        free_what_did_not_come()
        continue_answers()
        patch_cpu_engines()
    EngineCore.pd_load = _pd_load
    EngineCore.pd_describe = _pd_describe
    EngineCore.pd_tell_connector = _pd_tell_connector
    EngineCore.pd_lend = _pd_lend
    EngineCore.abort_requests = _abort_requests
    EngineCore.reset_prefix_cache = loop.reset_prefix_cache


# ---- utilities ---------------------------------------------------------------------------------------------------


def _pd_load(engine: Any) -> list[int]:
    """[free blocks, running, waiting] now, even if no step has run since blocks were freed."""
    scheduler = engine.scheduler
    running, waiting = scheduler.get_request_counts()
    return [scheduler.kv_cache_manager.block_pool.get_num_free_blocks() * _shards(engine), running, waiting]


def _shards(engine: Any) -> int:
    """Blocks of a prompt that one of the scheduler's has: each rank has one of them (decode context parallelism)."""
    return int(engine.vllm_config.parallel_config.decode_context_parallel_size)


def _pd_describe(engine: Any) -> dict[str, Any]:
    """Its id as peers know it, usable KV blocks, bytes of KV per token over all layers and ranks of the engine,
    attention backend, the process ids of ranks in other processes, whether its KV can go block by block, and whether
    each rank can send and receive it."""
    config = engine.scheduler.kv_cache_config
    blocks = config.num_blocks * _shards(engine)
    tokens = blocks * engine.vllm_config.cache_config.block_size
    ranks = engine.vllm_config.parallel_config.world_size
    # All layers' caches lie in one memory, whose blocks the groups share: right for one group and equal groups,
    # an estimate for padded groups, recurrent states, which do not grow with tokens, and unequal stages of a pipeline.
    memory = max((tensor.size for tensor in config.kv_cache_tensors), default=0)
    backends = engine.model_executor.collective_rpc(_attention_backend)
    return {
        "engine_id": engine.vllm_config.kv_transfer_config.engine_id,
        "blocks_total": blocks - _shards(engine),
        "kv_bytes_per_token": memory * len(config.kv_cache_groups) * ranks // max(1, tokens),
        "rank_pids": [rank.proc.pid for rank in getattr(engine.model_executor, "workers", []) if hasattr(rank, "proc")],
        "lends": bool(getattr(_push_scheduler(engine), "lends", False)),
        "attention_backend": backends[0],
        "connected": all(backends),
    }


def _attention_backend(worker: Any) -> str:
    """Runs in a rank: the attention backend that its KV connector found; empty where it has none."""
    return str(get_kv_transfer_group().connector_worker.backend_name) if has_kv_transfer_group() else ""


def _push_scheduler(engine: Any) -> Any:
    """The scheduler half of the connector. Only that of ours has verbs for `_pd_tell_connector`."""
    return getattr(engine.scheduler.get_kv_connector(), "connector_scheduler", None)


def _pd_tell_connector(engine: Any, verb: str, *args: Any) -> None:
    """As a utility it takes one argument beside the verb: vLLM counts parameters."""
    if (told := getattr(_push_scheduler(engine), verb, None)) is not None:
        told(*args)


def _pd_lend(engine: Any, frames: list[bytes], key: str, tokens: int) -> None:
    """`frames`: an engine request, whose first `tokens` are lent."""
    block_size = engine.vllm_config.cache_config.block_size
    hashes = block_hashes(frames, engine.request_block_hasher, max(1, block_size // engine.scheduler.hash_block_size))
    _pd_tell_connector(engine, "lend", key, hashes[: tokens // block_size], tokens)


def _abort_requests(engine: Any, keys: list[str]) -> None:
    """vLLM's abort does nothing for a prefill that has ended, whose blocks would be held until their lease ends. This
    one also drops those."""
    _vllm_abort(engine, keys)
    _pd_tell_connector(engine, "drop", keys)


# ---- the process ---------------------------------------------------------------------------------------------------


def _set_rendezvous_folder(folder: str) -> None:
    """Put the file through which an engine's ranks find each other beside the sockets, since vLLM leaves it behind."""
    for executor in (multiproc_executor, uniproc_executor):
        executor.get_file_store_init_method = lambda: f"file://{folder}/vllm_dist_{uuid.uuid4().hex}"


def _shares() -> list[list[int]]:
    """The cores of each rank; empty if they compute on any."""
    shares = os.environ.get(_CORES, "")
    return [[int(core) for core in share.split(",")] for share in shares.split("|")] if shares else []


def _use_cores(cores: list[int]) -> None:
    """Pin this process, before any compute thread exists, so that all of them inherit it."""
    import torch

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
