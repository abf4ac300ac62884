"""The command lines of the fleet's processes, and what can be checked of a configuration before anything starts.

Looks at the machine (memory, GPUs) where a check needs it; starts nothing.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import socket
import sys
from pathlib import Path

import msgspec

from orchestrator.config.engine_args import check_engine_args
from orchestrator.config.settings import Config, ConfigError, PoolConfig
from orchestrator.launch.machine import CoreShares, GpuShares, find_cores, find_gpus
from orchestrator.launch.process import ProcessSpec
from orchestrator.types import Role

# What vLLM calls its local sockets; a socket's whole path may have 107 bytes (unix(7)).
_SOCKET_NAME_BYTES, _SOCKET_PATH_BYTES = 37, 107

# vLLM's many informative lines would hide ours; say VLLM_LOGGING_LEVEL=INFO to read them.
_QUIET = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}


def check_config(config: Config) -> None:
    """Everything that can be known to be wrong from the file alone. Raises ConfigError."""
    check_engine_args(config)


def pool(config: Config, role: Role) -> PoolConfig:
    return config.workers.prefill if role is Role.PREFILL else config.workers.decode


def ranks(config: Config, role: Role) -> int:
    """GPUs, or CPU processes, of one worker. Raises ConfigError."""
    arguments = {**config.workers.engine_args, **pool(config, role).engine_args}
    product = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        value = arguments.get(name, 1)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"workers.engine_args.{name}: expected an integer >= 1, got {value!r}")
        product *= value
    return product


class Placement:
    """Where workers of this machine compute: their own cores, or their own GPUs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._gpus: GpuShares | None = None
        self._cores: CoreShares | None = None
        self.device = "simulated"
        if config.engine == "sim":
            return
        gpus = find_gpus()
        if gpus and _installed("vllm"):
            self.device, self._gpus = "CUDA", GpuShares(gpus)
        else:
            self.device = "CPU"
            workers = config.workers.prefill.replicas + config.workers.decode.replicas
            most_ranks = max(ranks(config, role) for role in Role)
            self._cores = CoreShares(find_cores(), workers, config.frontend.replicas, most_ranks)

    def take(self, owner: str, role: Role) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment for this worker. Raises ConfigError when the machine has no room for it."""
        if self._gpus is not None and "CUDA_VISIBLE_DEVICES" not in self._explicit_env(role):
            arguments = {**self._config.workers.engine_args, **pool(self._config, role).engine_args}
            share = arguments.get("gpu_memory_utilization")
            gpus = self._gpus.take(owner, ranks(self._config, role), share)
            return [], {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        if self._cores is not None and (cores := self._cores.take(owner)):
            return ["--cores", ",".join(map(str, cores))], {}
        return [], {}

    def give_back(self, owner: str) -> None:
        for shares in (self._gpus, self._cores):
            if shares is not None:
                shares.give_back(owner)

    def check_room(self) -> None:
        """Whether all configured workers fit on this machine. Raises ConfigError."""
        config = self._config
        for role in Role:
            for index in range(pool(config, role).replicas):
                self.take(f"workers.{role.value} {index}", role)
        for role in Role:
            for index in range(pool(config, role).replicas):
                self.give_back(f"workers.{role.value} {index}")
        if self._cores is not None:
            _check_memory(config)

    def _explicit_env(self, role: Role) -> dict[str, str]:
        return {**self._config.workers.env, **pool(self._config, role).env}


def worker_spec(
    config: Config, role: Role, worker_id: str, config_file: Path, placed: tuple[list[str], dict[str, str]]
) -> ProcessSpec:
    arguments, environment = placed
    command = [
        *(sys.executable, "-m", "workers.main", role.value),
        *("--id", worker_id),
        *("--redis", config.redis.url),
        *("--namespace", config.namespace),
        *("--config", str(config_file)),
        "--die-with-parent",
        *arguments,
    ]
    # vLLM leaves its local sockets behind when it is killed; in our folder they go with it.
    sockets = str(config_file.parent)
    if len(sockets.encode()) + _SOCKET_NAME_BYTES <= _SOCKET_PATH_BYTES:
        environment = {"VLLM_RPC_BASE_PATH": sockets, **environment}
    explicit = {**config.workers.env, **pool(config, role).env}
    return ProcessSpec(worker_id, command, {**_QUIET, **environment, **explicit})


def frontend_spec(config: Config, index: int, config_file: Path) -> ProcessSpec:
    command = [
        *(sys.executable, "-m", "orchestrator.frontend.server"),
        *("--redis", config.redis.url),
        *("--config", str(config_file)),
        *("--index", str(index)),
        *("--port", str(config.frontend.port)),
        "--die-with-parent",
    ]
    environment = dict(_QUIET)
    if config.frontend.replicas > 1:
        # Counters of all frontends in one place, so that whichever is scraped answers for all; it must be there
        # before they import prometheus_client. Another launcher's are not ours to add to.
        metrics = config_file.parent / f"metrics-{os.getpid()}"
        metrics.mkdir(mode=0o700, exist_ok=True)
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
    return ProcessSpec(f"frontend-{index}", command, environment)


def hold_port(host: str, port: int) -> tuple[socket.socket, int]:
    """Reserve the frontends' port until the socket is closed; it does not listen. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = (host, port)
    try:
        if port:
            # Alone first: another fleet's frontends share ports too, and would share ours.
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
        held = socket.socket(family)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"frontend.port: port {port} on {host} is in use; stop what listens there, or choose another: "
                "--set frontend.port=0 takes a free one"
            ) from None
        raise ConfigError(f"frontend.host: {host}:{port} cannot be listened on ({error.strerror})") from None
    return held, held.getsockname()[1]


def resolve(config: Config, model: str, redis_url: str, port: int) -> Config:
    """The configuration as the processes get it: nothing left to be found, and the model's name kept for clients."""
    replace = msgspec.structs.replace
    return replace(
        config,
        model=model,
        served_model_name=config.served_model_name or config.model,
        redis=replace(config.redis, url=redis_url),
        frontend=replace(config.frontend, port=port),
    )


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _check_memory(config: Config) -> None:
    """Explicit KV cache sizes alone must fit into the machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = 0
    for role in Role:
        arguments = {**config.workers.engine_args, **pool(config, role).engine_args}
        size = arguments.get("kv_cache_memory_bytes")
        needed += pool(config, role).replicas * (size if isinstance(size, int) else 0)
    if needed > total:
        raise ConfigError(
            f"workers: {config.workers.prefill.replicas} prefill and {config.workers.decode.replicas} decode replicas "
            f"with their kv_cache_memory_bytes need {needed / 2**30:.1f} GiB, this machine has "
            f"{total / 2**30:.1f} GiB; lower replicas or kv_cache_memory_bytes"
        )
