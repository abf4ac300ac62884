"""What each process gets of this machine: CPU cores or GPUs, memory, and the port that the frontends share.

Refuses a fleet that the machine has no room for. Starts nothing.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import socket
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from orchestrator.config.engine_args import engine_args, environment, group_size, pool, ranks, unit_ranks
from orchestrator.config.settings import Config, ConfigError, port_range
from orchestrator.config.values import MAX_WORKERS
from orchestrator.process.control_group import cpu_limit, find_memory
from orchestrator.types import Role

# vLLM's default for gpu_memory_utilization is near 1: a worker that does not set it has its GPUs to itself.
_WHOLE_GPU = 1.0
_WORKER_BYTES = {"sim": 28 << 20, "vllm": 256 << 20}  # a worker takes more than this for its imports alone
_WORKER_PORTS = 3
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # for each rank of an engine on CPU


class Share(msgspec.Struct, frozen=True):
    """A worker's share of the machine, as command-line arguments and environment variables."""

    arguments: list[str] = []
    env: dict[str, str] = {}


class MachineShares:
    """Divides the cores or the GPUs of this machine among the workers of one fleet, of all its models."""

    def __init__(self, config: Config, *others: Config) -> None:
        self._config, self._configs = config, [config, *others]
        self._gpus: GpuShares | None = None
        self._cores: CoreShares | None = None
        self._workers: set[str] = set()
        self.device = "simulated"
        self._find_devices()

    def _find_devices(self) -> None:
        if self._gpus or self._cores or all(each.engine == "sim" for each in self._configs):
            return
        gpus = find_gpus()
        # The CPU build of vLLM imports as `vllm` too, but has no distribution of that name.
        if gpus and has_cuda_vllm():
            self.device, self._gpus = "CUDA", GpuShares(gpus)
        else:
            self.device = "CPU"
            ranks_at_once = max(sum(map(_cpu_ranks, configs)) for configs in self._at_once())
            self._cores = CoreShares(find_cores(), ranks_at_once, self._config.frontend.most_replicas)

    def add(self, config: Config) -> None:
        """One more model has workers here. Raises ConfigError where the memory is too small for it and the others."""
        staying = [each for each in self._configs if each.idle_after_s is None]
        if self._cores is not None:
            _check_memory((*staying, config))
        self._configs.append(config)
        self._find_devices()

    def remove(self, config: Config) -> None:
        """That model has no more workers here. Idempotent."""
        self._configs = [other for other in self._configs if other is not config]

    def take(self, owner: str, role: Role, config: Config | None = None) -> Share:
        """A worker's share, which stays the same until it is given back. `config`: the worker's, if it is not the one
        that this was constructed with. Raises ConfigError if there is no room."""
        config = config or self._config
        self._workers.add(owner)
        try:
            _check_count(config, len(self._workers))
            return self._share(owner, role, config)
        except ConfigError:
            self._workers.discard(owner)
            raise

    def _share(self, owner: str, role: Role, config: Config) -> Share:
        if config.engine == "sim":
            return Share()
        if self._gpus is not None and "CUDA_VISIBLE_DEVICES" not in environment(config, role):
            utilization = engine_args(config, role).get("gpu_memory_utilization")
            gpus = self._gpus.take(owner, ranks(config, role), utilization)
            return Share(env={"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
        if self._cores is not None:
            cores = self._cores.take(owner, ranks(config, role))
            return Share(["--cores", ",".join(map(str, cores))]) if cores else Share(env=_ONE_THREAD)
        return Share()

    def room_for(self, config: Config) -> int:
        """The most units of a model that this machine holds if no other is there, in the roles that take least."""
        most = [most // min(group_size(config, role) for role in Role) for most, _ in _limits(config)]
        if self._gpus is not None and config.engine != "sim":
            most.append(max(_units_on(len(self._gpus), config, role) for role in Role))
        return min(most)

    def give_back(self, owner: str) -> None:
        self._workers.discard(owner)
        for shares in (self._gpus, self._cores):
            if shares is not None:
                shares.give_back(owner)

    def check_room(self) -> None:
        """Raises ConfigError unless all workers fit here together; of models that may become idle, one at a time."""
        for configs in self._at_once():
            self._check_room(configs)

    def _at_once(self) -> list[list[Config]]:
        """Models whose workers have to fit together: those that stay, with each that may become idle."""
        stay = [config for config in self._configs if config.idle_after_s is None]
        others = [config for config in self._configs if config.idle_after_s is not None]
        return [[*stay, other] for other in others] or [stay]

    def _check_room(self, configs: Sequence[Config]) -> None:
        owners = []
        for config in configs:
            of = f"{config.name_served}: " if len(self._configs) > 1 else ""
            for role in Role:
                count = pool(config, role).replicas * group_size(config, role)
                owners += [(f"{of}workers.{role.value} {index}", role, config) for index in range(count)]
        for owner, role, config in owners:
            self.take(owner, role, config)
        for owner, _, _ in owners:
            self.give_back(owner)
        if self._cores is not None:
            _check_memory(configs)


class CoreShares:
    """Gives workers runs of neighbouring cores, the same number for each of their ranks.

    The compute threads of a rank wait for each other at every layer, so two workers that share cores each run at far
    less than half the speed. If there are more ranks than cores, no worker is pinned: one that loads its model could
    wait for minutes behind one that is busy on the same core. On larger machines some cores stay free for the
    frontends, which are not pinned.
    """

    def __init__(self, cores: Sequence[int], ranks: int, frontends: int) -> None:
        """`ranks`: those of all workers together. `frontends`: how many cores to keep free, if there are enough."""
        spare = min(frontends, len(cores) // 8)
        self._cores, self._of_a_rank = list(cores), (len(cores) - spare) // max(1, ranks)
        self._held: dict[str, list[int]] = {}

    def take(self, owner: str, ranks: int = 1) -> list[int]:
        """The cores that the fewest workers share; none where there are too few for all ranks: one thread each."""
        if owner not in self._held:
            size = ranks * min(self._of_a_rank, len(self._cores) // ranks)
            starts = range(0, len(self._cores) - size + 1, self._of_a_rank) if size else ()
            shared = Counter(core for held in self._held.values() for core in held)
            runs = [self._cores[start : start + size] for start in starts]
            self._held[owner] = min(runs, key=lambda run: sum(shared[core] for core in run), default=[])
        return self._held[owner]

    def give_back(self, owner: str) -> None:
        self._held.pop(owner, None)


class GpuShares:
    """Gives workers whole GPUs, or parts of them if gpu_memory_utilization says that a worker needs only a part."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._free = dict.fromkeys(gpus, _WHOLE_GPU)
        self._held: dict[str, tuple[list[str], float]] = {}

    def __len__(self) -> int:
        return len(self._free)

    def take(self, owner: str, ranks: int, utilization: float | None = None) -> list[str]:
        """As many distinct GPUs as `ranks`, those with most free memory first. Raises ConfigError."""
        if owner in self._held:
            return self._held[owner][0]
        share = utilization or _WHOLE_GPU
        fitting = [gpu for gpu, free in self._free.items() if free >= share - 1e-9]
        if len(fitting) < ranks:
            raise ConfigError(
                f"{owner}: needs {ranks} GPU(s) with {share:.0%} of the memory free, this machine has {len(fitting)} "
                f"left of {len(self._free)}; lower replicas, data_parallel_size or tensor_parallel_size, or set "
                "gpu_memory_utilization so that workers share GPUs"
            )
        # Most free memory first, then in the machine's order: neighbours are connected best.
        chosen = sorted(fitting, key=lambda gpu: -self._free[gpu])[:ranks]
        for gpu in chosen:
            self._free[gpu] -= share
        self._held[owner] = (chosen, share)
        return chosen

    def give_back(self, owner: str) -> None:
        gpus, share = self._held.pop(owner, ([], 0.0))
        for gpu in gpus:
            self._free[gpu] += share


def find_cores() -> list[int]:
    """The cores that this process may use, by number: neighbours, and no more than its container has CPU time for. More
    threads than CPU time are stopped in the middle of a step, and the others wait for them."""
    cores = sorted(os.sched_getaffinity(0))
    count = int(max(1, min(cpu_limit(), len(cores))))
    # Containers beside this one choose cores by the same rule, and have other names.
    first = zlib.crc32(socket.gethostname().encode()) % (len(cores) - count + 1)
    return cores[first : first + count]


def find_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The NVIDIA GPUs, by their names in CUDA_VISIBLE_DEVICES. If that variable is set, its GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in re.split(r"\s*,\s*", visible.strip()) if gpu and gpu != "-1"]
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return [str(number) for number in sorted(int(match[1]) for match in found if match)]


def hold_port(host: str, port: int) -> tuple[socket.socket, int]:
    """Reserve the frontends' port until the socket is closed; it does not listen. Raises ConfigError. Frontends share
    it, since all set SO_REUSEPORT and SO_REUSEADDR. Another launcher is refused: it binds without SO_REUSEPORT first,
    and what it meets listens or has no SO_REUSEADDR."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = None
    try:
        with socket.socket(family) as exclusive:
            exclusive.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT are no obstacle
            exclusive.bind((host, port))
            exclusive.listen(1)
            exclusive.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held = socket.socket(family)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(exclusive.getsockname())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        if held is not None:
            held.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"frontend.port: port {port} on {host} is in use; stop what listens there, or choose another: "
                "--set frontend.port=0 takes a free one"
            ) from None
        key = "port" if error.errno == errno.EACCES else "host"
        raise ConfigError(
            f"frontend.{key}: {host}:{port} cannot be listened on ({error.strerror}); name an address of this host, "
            "and a port that you may use"
        ) from None
    return held, held.getsockname()[1]


def check_bind(host: str) -> None:
    """Raises ConfigError where workers could not listen at `host`, which workers.bind names."""
    if host == "auto":
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"workers.bind: cannot listen at {host!r} ({error.strerror}); name an address of this host, 0.0.0.0 for "
            "all, or auto"
        ) from None


def has_cuda_vllm() -> bool:
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _check_count(config: Config, workers: int) -> None:
    """Raises ConfigError for more workers than the machine has memory and ports for, whatever their engine is."""
    for most, why in _limits(config):
        if workers > most:
            raise ConfigError(why)


def _limits(config: Config) -> Iterator[tuple[int, str]]:
    """How many workers the machine has memory and ports for at most, each with why there may be no more."""
    host_tier = config.kv.host_tier_bytes
    each = _WORKER_BYTES[config.engine] + max(ranks(config, role) for role in Role) * host_tier
    most = find_memory() // each
    holds = f"workers: this machine's memory holds at most {most} processes of {each >> 20} MiB"
    mend = "lower kv.host_tier_bytes, or replicas" if host_tier else "lower replicas or data_parallel_size"
    yield most, f"{holds}; {mend}"
    if (ports := port_range(config)) is not None:
        groups = sum(pool(config, role).replicas for role in Role if group_size(config, role) > 1)
        most = max(0, len(ports) - groups) // _WORKER_PORTS  # the ranks of a group meet at one
        yield (
            most,
            f"workers.ports: {config.workers.ports} are {len(ports)} ports, enough for {most} workers of "
            f"{_WORKER_PORTS} each; name more, or lower replicas or data_parallel_size",
        )


def _cpu_ranks(config: Config) -> int:
    """Of all of a model's workers that compute."""
    if config.engine == "sim":
        return 0
    return sum(pool(config, role).replicas * unit_ranks(config, role) for role in Role)


def _units_on(gpus: int, config: Config, role: Role) -> int:
    """How many units of a role so many GPUs hold; a role that names its GPUs itself is not limited."""
    if "CUDA_VISIBLE_DEVICES" in environment(config, role):
        return MAX_WORKERS
    share = engine_args(config, role).get("gpu_memory_utilization") or _WHOLE_GPU
    return gpus * int(_WHOLE_GPU / share + 1e-9) // unit_ranks(config, role)


def _check_memory(configs: Sequence[Config]) -> None:
    """Raises ConfigError if the configured sizes of KV caches and host tiers alone exceed the machine's memory."""
    total = find_memory()
    needed = 0
    for config in configs:
        for role in Role:
            size = engine_args(config, role).get("kv_cache_memory_bytes")
            of_a_worker = size if isinstance(size, int) else 0
            of_a_worker += ranks(config, role) * config.kv.host_tier_bytes
            needed += pool(config, role).replicas * group_size(config, role) * of_a_worker
    if needed > total:
        prefill, decode = (sum(pool(config, role).replicas for config in configs) for role in Role)
        tiers = " and kv.host_tier_bytes" if any(config.kv.host_tier_bytes for config in configs) else ""
        raise ConfigError(
            f"workers: {prefill} prefill and {decode} decode replicas "
            f"with their kv_cache_memory_bytes need {needed / 2**30:.1f} GiB, this machine has "
            f"{total / 2**30:.1f} GiB; lower replicas, data_parallel_size or kv_cache_memory_bytes{tiers}"
        )
