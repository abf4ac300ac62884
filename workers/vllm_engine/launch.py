"""Parses vLLM's arguments, builds its configuration for a worker, and starts its engine process.

On CPU an engine's processes are forked, so that none of them loads vLLM anew, and an engine of one rank computes in one
process (11 s to ready instead of 29 s on two cores). On accelerators vLLM's own choices hold.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import functools
import os
import shutil
import tempfile
import threading
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from orchestrator.config.engine_args import check_environment
from orchestrator.config.settings import KVConfig
from orchestrator.process.control_group import cpu_limit, find_memory
from workers.engine import Group
from workers.vllm_engine.interfaces import group_settings, interfaces_here
from workers.vllm_engine.plugin import SOCKETS, engine_env, engine_process
from workers.vllm_engine.ranks import WHY, told
from workers.vllm_engine.steps import TPOT

_CPU_KV_CACHE_BYTES = 1 << 30
# vLLM reads much of its start-up configuration from the environment, which all threads share.
_environment = threading.Lock()
_BIND = "VLLM_CPU_OMP_THREADS_BIND"  # the cores of each rank's threads; "nobind": whichever the process may use
_THREADS = "OMP_NUM_THREADS"
# Before vLLM makes its configuration of them: it would fail with a line about something else.
_GROUP_ARGS = "data_parallel_"  # all but the size say where a rank is in its group, which the worker is told
_HOOKS, _RDMA = "UCX_MEM_MMAP_HOOK_MODE", Path("/sys/class/infiniband")
_KV_SECRET = "PD_KV_SECRET_KEY"  # read by connectors/handshake.py in the engine's processes


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def parse_arguments(arguments: list[str]) -> dict[str, Any]:
    """vLLM's engine arguments, by its own parser: the AsyncEngineArgs fields that were given, by name. Raises
    argparse.ArgumentError."""
    parser = AsyncEngineArgs.add_cli_args(_Parser(add_help=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    given = vars(parser.parse_args(arguments))
    for name in given:
        if name not in AsyncEngineArgs.__dataclass_fields__:
            raise argparse.ArgumentError(None, f"{name} is not an engine argument")
    return given


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker's engine is started. `engine_args`: fields of AsyncEngineArgs that `check_arguments` takes."""

    model: str
    engine_args: dict[str, Any]
    engine_id: str
    kv_host: str  # at which it answers KV handshakes, and which peers reach at `kv_advertise`
    kv_port: int  # must be free
    kv_advertise: str
    kv: KVConfig
    cores: list[int] | None = None  # of an engine on CPU
    encrypted: bool = True  # KV handshakes are
    tpot_s: float = 0.0  # the objective of those that decode beside prompts for other engines; 0: none


def build_config(setup: Setup, group: Group = Group()) -> VllmConfig:
    """Raises ValueError (vLLM's) for engine arguments that do not fit."""
    kv, model = setup.kv, setup.model
    args = {name: _section(name, value) for name, value in setup.engine_args.items()}
    size = args.pop("data_parallel_size", 1)
    if size != group.size:
        raise ValueError(
            f"workers.engine_args.data_parallel_size: {size} ranks, but this worker is one of a group of {group.size}; "
            "start one worker for each rank, with --ranks"
        )
    args.setdefault("scheduling_policy", "priority")  # frontends order the waiting requests, see `requests`
    args["enable_logging_iteration_details"] = True  # each step's duration; vLLM's lines of them are not written
    args["mm_processor_cache_gb"] = 0  # vLLM's cache for media counts on one server, which knows what is in it
    if args.get("enable_prefix_caching") is not False:
        # The plugin collects them. A publisher of vLLM's, if `engine_args` switches one on, gets them too.
        if (events := args.get("kv_events_config")) is None or not events.enable_kv_cache_events:
            args["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    if current_platform.is_cpu():
        args.setdefault("enforce_eager", True)
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            args.setdefault("kv_cache_memory_bytes", _CPU_KV_CACHE_BYTES)
        if args.get("tensor_parallel_size", 1) == args.get("pipeline_parallel_size", 1) == 1:
            args.setdefault("distributed_executor_backend", UniProcExecutor)
    args["kv_transfer_config"] = KVTransferConfig(
        kv_connector="PushConnector",
        kv_connector_module_path="connectors.push.connector",
        engine_id=setup.engine_id,
        kv_role="kv_both",  # roles change while the engine runs
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "transfer": kv.transfer,
            "kv_transfer_timeout_s": kv.transfer_timeout_s,
            "verify": kv.verify,
            "advertise": setup.kv_advertise,
            "backends": list(kv.backends) or ["UCX"],
            "backend_parameters": kv.backends,
            "host_tier_bytes": kv.host_tier_bytes,
            # NIXL would share large WRITEs among vLLM's 4 threads, which spin until their part has ended.
            "num_threads": 0,
            # On CPU the thread that posts a WRITE copies the data. It runs on idle cores, if there are any.
            "writer_cores": sorted(os.sched_getaffinity(0)) if current_platform.is_cpu() else [],
        },
    )
    check_environment()
    with _environment, _set_env(_connector_env(setup.kv_host, setup.kv_port)):
        args |= _in_group(model, args, group)
        # By whose use vLLM chooses how many tokens and sequences a step has at most, where `args` do not say it.
        config = AsyncEngineArgs(model=model, **args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    KVConnectorFactory.get_connector_class(config.kv_transfer_config).refuse_unsupported(config)
    ranks, has = config.parallel_config.local_world_size, find_memory()
    if ranks * kv.host_tier_bytes > has:
        raise ValueError(
            f"kv.host_tier_bytes: {kv.host_tier_bytes} for each of {ranks} ranks, but this host has {has} bytes of "
            "memory; lower it"
        )
    return config


def most_running(config: VllmConfig) -> int:
    """The requests that a step of this engine has at most. Its buffers are for `max_num_seqs`."""
    return config.scheduler_config.max_num_active_seqs or config.scheduler_config.max_num_seqs


def _in_group(model: str, args: dict[str, Any], group: Group) -> dict[str, Any]:
    """The arguments that make an engine one of its group. None for a dense model, whose ranks have nothing to exchange:
    vLLM runs them as engines of their own. Raises ValueError for experts that there are not."""
    if group.size == 1 and not args.get("enable_expert_parallel"):
        return {}
    if not AsyncEngineArgs(model=model, **args).create_model_config().is_moe:
        if args.get("enable_expert_parallel"):
            raise ValueError("workers.engine_args.enable_expert_parallel: this model has no experts; remove it")
        return {}
    where = {"rank": group.rank, "address": group.host, "rpc_port": group.port}
    return {_GROUP_ARGS + name: value for name, value in {"size": group.size, **where}.items() if group.size > 1}


def _section(name: str, value: Any) -> Any:
    """A dict as its field's class: vLLM's command line converts every section, its constructor only some."""
    kind = AsyncEngineArgs.__dataclass_fields__[name].type
    classes: list[Any] = [each for each in typing.get_args(kind) or (kind,) if dataclasses.is_dataclass(each)]
    return classes[0](**value) if isinstance(value, dict) and classes else value


def start_client(config: VllmConfig, setup: Setup, kv_secret: str = "") -> EngineCoreClient:
    """Start the engine, and block until it is ready. Raises RuntimeError, with what ended its process before that.
    `kv_secret`: the key of its KV handshakes; empty if they are not encrypted."""
    cores = setup.cores
    # vLLM adds the rank to the port that it is given.
    own_port = setup.kv_port - config.parallel_config.data_parallel_index
    environment = {**_connector_env(setup.kv_host, own_port), _KV_SECRET: kv_secret, TPOT: str(setup.tpot_s)}
    if (parallel := config.parallel_config).data_parallel_size > 1:
        network = group_settings(parallel.data_parallel_master_ip, interfaces_here())
        environment |= {name: value for name, value in network.items() if name not in os.environ}
    if not os.environ.get(SOCKETS):
        environment[SOCKETS] = _own_folder()
    environment[WHY] = why = os.path.join(environment.get(SOCKETS) or os.environ[SOCKETS], f"why-{setup.engine_id}")
    executor = Executor.get_class(config)
    shares: list[list[int]] = []
    if current_platform.is_cpu():
        if cores:
            shares = split_cores(cores, config.parallel_config.local_world_size)
        # Otherwise vLLM binds the ranks' threads, by variables that only a program that is executed reads.
        environment[_BIND] = bind = "nobind" if cores else os.environ.get(_BIND, "nobind")
        if not cores and bind == "nobind":
            _limit_threads(environment, config.parallel_config.local_world_size)
        environment |= _memory_hooks()
        if issubclass(executor, UniProcExecutor) or (bind == "nobind" and issubclass(executor, MultiprocExecutor)):
            environment["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    with _environment, _set_env(environment | engine_env(shares)), engine_process():
        try:
            return EngineCoreClient.make_async_mp_client(config, executor, log_stats=True)
        except RuntimeError as error:  # vLLM's says that a process of the engine's failed
            raise RuntimeError(told(why) or error) from error


def _limit_threads(environment: dict[str, str], ranks: int) -> None:
    """Give each rank no more compute threads than its container has CPU time for.

    Further threads are stopped in the middle of a step, and the others wait for them. An OMP_NUM_THREADS from outside
    holds.
    """
    limit = cpu_limit()
    if _THREADS not in os.environ and limit < len(os.sched_getaffinity(0)):
        threads = max(1, int(limit) // ranks)
        environment[_THREADS] = str(threads)  # read by a process that is executed
        torch.set_num_threads(threads)  # inherited by a forked one; this process does not compute


def _memory_hooks() -> dict[str, str]:
    """UCX learns by them of memory that is given back, which RDMA devices know. By default it overwrites functions of
    the C library, and spins for a third of a second meanwhile; the others are put in place at once, and may miss some.
    """
    return {} if _HOOKS in os.environ or _RDMA.exists() else {_HOOKS: "reloc"}


@functools.cache
def _own_folder() -> str:
    """A folder for vLLM's local sockets, which vLLM leaves behind. Launchers give their workers one, and remove it."""
    folder = tempfile.mkdtemp(prefix="pd-vllm-")
    starter = os.getpid()

    def remove() -> None:
        if os.getpid() == starter:  # not in an engine process that was forked from this one
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _connector_env(kv_host: str, kv_port: int) -> dict[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": kv_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(kv_port),
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",  # the one in which NIXL can split a recurrent state among ranks
    }


def split_cores(cores: list[int], ranks: int) -> list[list[int]]:
    """The cores of each rank. Raises ValueError for fewer cores than ranks."""
    share = len(cores) // ranks
    if not share:
        raise ValueError(f"{len(cores)} cores for {ranks} ranks; give each rank at least one")
    return [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]


@contextmanager
def _set_env(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
