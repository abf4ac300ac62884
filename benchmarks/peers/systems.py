"""The systems under test: this project, other projects, and plain vLLM, each serving one model on this machine.

All engines have the same model, arguments and cores. Flags follow each program's documentation for the release in
`environments`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import programs
from benchmarks.peers.processes import Processes
from orchestrator.config.engine_args import to_command_line
from orchestrator.config.models import SECTION
from orchestrator.config.settings import read_tree
from orchestrator.wire.addresses import free_ports

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
REPAIRED = {"kv_connector": "PatchedPull", "kv_connector_module_path": "benchmarks.kv_stock"}
STOCK = {"kv_connector": "NixlConnector"}


@dataclass(frozen=True)
class Model:
    path: str
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # vLLM's, by the names of its Python arguments


@dataclass(frozen=True)
class Serving:
    """A system that answers. `front`: the name of the process that clients connect to, and words in its command
    line."""

    url: str
    front: tuple[str, str]


@dataclass(frozen=True)
class System:
    """`what`: its description in the report."""

    name: str
    what: str
    start: Callable[[Processes, Model], Serving]


def _engine(processes: Processes, name: str, model: Model, core: int | None, transfer: Mapping[str, str] = {}) -> str:
    """Start vLLM's server, and return its URL. `transfer`: vLLM's configuration of KV transfer, if there is one."""
    ports = free_ports(HOST)
    port = next(ports)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model.path]
    command += ["--served-model-name", "bench", "--host", HOST, "--port", str(port), "--disable-uvicorn-access-log"]
    command += to_command_line(model.engine_args)
    environment = {"PYTHONPATH": str(ROOT)}
    if core is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
    if transfer:
        command += ["--kv-transfer-config", json.dumps({**transfer, "kv_role": "kv_both"})]
        environment |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(next(ports)), "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST}
    processes.start(name, command, environment)
    return f"http://{HOST}:{port}"


def _cores() -> Iterator[int]:
    return itertools.cycle(sorted(os.sched_getaffinity(0)))


def _two(processes: Processes, model: Model, names: tuple[str, str], transfer: Mapping[str, str] = {}) -> list[str]:
    urls = [_engine(processes, name, model, core, transfer) for name, core in zip(names, _cores(), strict=False)]
    for url in urls:
        processes.wait(f"{url}/health")
    return urls


def _router(processes: Processes, name: str, command: list[str]) -> Serving:
    port = next(free_ports(HOST))
    processes.start(name, [*command, "--host", HOST, "--port", str(port)])
    url = f"http://{HOST}:{port}"
    processes.wait(f"{url}/v1/models")
    return Serving(url, (name, ""))


def ours(
    processes: Processes,
    model: Model,
    more: Mapping[str, Any] = {},
    root: Path = ROOT,
    config: str | Path = "demo-1p1d-cpu.yaml",
) -> Serving:
    """A fleet of the checkout `root`. `config`: a file, or one of its configs, which serves `model` unless it has
    `models`; `more`: configuration keys and values beside those of the file."""
    port = next(free_ports(HOST))
    file = root / "configs" / config
    settings = {
        **({} if SECTION in read_tree(file) else {"model": model.path}),
        "namespace": f"peers-{os.getpid()}",
        "frontend.port": port,
        "ratio.mode": "off",  # one worker of each role, as in the other systems
        **{f"workers.engine_args.{key}": value for key, value in model.engine_args.items()},
        **more,
    }
    command = [sys.executable, "-m", "orchestrator.cli.main", "up", str(file)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    found = os.environ.get("PYTHONPATH", "")  # fastokens may be installed there
    # Safe: the folder that this was started in is no place to import from.
    environment = {"PYTHONPATH": f"{root}:{found}" if found else str(root), "PYTHONSAFEPATH": "1"}
    processes.start("orchestrator", command, environment)
    url = f"http://{HOST}:{port}"
    processes.wait(f"{url}/ready")
    return Serving(url, ("orchestrator", "orchestrator.frontend"))


def _vllm_router(transfer: Mapping[str, str]) -> Callable[[Processes, Model], Serving]:
    def start(processes: Processes, model: Model) -> Serving:
        program = str(programs("vllm-router") / "vllm-router")
        prefill, decode = _two(processes, model, ("prefill", "decode"), transfer)
        command = [program, "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        command += ["--prefill", prefill, "--decode", decode, "--policy", "round_robin", "--log-level", "warning"]
        return _router(processes, "vllm-router", command)

    return start


def _smg(processes: Processes, model: Model) -> Serving:
    program = str(programs("smg") / "smg")
    prefill, decode = _two(processes, model, ("prefill", "decode"), STOCK)
    command = [program, "launch", "--pd-disaggregation", "--prefill", prefill]
    command += ["--decode", decode, "--policy", "round_robin", "--log-level", "warn"]
    return _router(processes, "smg", command)


def _aggregated(processes: Processes, model: Model) -> Serving:
    program = str(programs("vllm-router") / "vllm-router")
    urls = _two(processes, model, ("replica-0", "replica-1"))
    command = [program, "--worker-urls", *urls]
    command += ["--policy", "round_robin", "--log-level", "warning"]
    return _router(processes, "vllm-router", command)


def _plain(processes: Processes, model: Model) -> Serving:
    url = _engine(processes, "vllm", model, None)
    processes.wait(f"{url}/health")
    return Serving(url, ("vllm", ""))


OURS = "orchestrator"
AGGREGATED = System("two aggregated", "vllm-router's round robin over two vLLM", _aggregated)
SYSTEMS = [
    System(OURS, "this project, one prefill and one decode worker", ours),
    System("vllm-router", "vllm-router, one prefill and one decode vLLM with NixlConnector", _vllm_router(STOCK)),
    System("vllm-router, repaired", "the same without NixlConnector's spinning thread", _vllm_router(REPAIRED)),
    System("smg", "smg, one prefill and one decode vLLM with NixlConnector", _smg),
    AGGREGATED,
    System("one vLLM", "one vLLM on all cores, no router", _plain),
]


# ---- chats among documents ---------------------------------------------------------------------------------------

# What ships is tried: predicted times decide on remote prefill, not the demo's rule by length.
OBJECTIVES = {"ttft_s": 3.0, "tpot_s": 0.15}
_SHIPPED = {"routing.remote_prefill_min_tokens": None} | {f"slo.{key}": value for key, value in OBJECTIVES.items()}
_ALL_REMOTE = _SHIPPED | {"routing.remote_prefill_min_tokens": 1}
MIXED = [
    System(OURS, "this project, one prefill and one decode worker", partial(ours, more=_SHIPPED)),
    System("all remote", "the same with every prompt prefilled remotely", partial(ours, more=_ALL_REMOTE)),
    AGGREGATED,
]


# ---- frontends alone, over simulated engines ---------------------------------------------------------------------


SIMULATED: dict[str, Any] = {
    "workers.prefill.replicas": 1,
    "workers.decode.replicas": 1,
    "sim.speed": 20,
    "routing.remote_prefill_min_tokens": 256,
}


def our_frontend(processes: Processes, model: Model, tokenizer: str = "huggingface") -> Serving:
    return ours(processes, model, SIMULATED | {"frontend.tokenizer_backend": tokenizer}, config="sim-2p2d.yaml")


def dynamo_frontend(processes: Processes, model: Model, tokenizer: str = "default") -> Serving:
    """Dynamo's frontend over its mocker, which simulates engines, with separate prefill and decode as its documentation
    recommends."""
    python = str(programs("dynamo") / "python")
    found = processes.logs / "discovery"
    shutil.rmtree(found, ignore_errors=True)
    environment = {"DYN_FILE_KV": str(found), "DYN_LOG": "warn", "HF_HUB_OFFLINE": "1"}
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    common = ["--model-path", model.path, "--model-name", "bench", "--speedup-ratio", "20", *planes]
    for mode in ("prefill", "decode"):
        command = [python, "-m", "dynamo.mocker", *common, "--disaggregation-mode", mode]
        processes.start(f"mocker-{mode}", command, environment)
    port = next(free_ports(HOST))
    command = [python, "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port), *planes]
    command += ["--tokenizer", tokenizer]
    processes.start("dynamo", command, environment)
    url = f"http://{HOST}:{port}"
    processes.wait(f"{url}/v1/models", words="bench")
    return Serving(url, ("dynamo", ""))


FRONTENDS = [
    System(OURS, "this project's frontend over its simulated engines, 1P1D", our_frontend),
    System("dynamo", "Dynamo's frontend over its mocker, 1P1D", dynamo_frontend),
    System(f"{OURS}, fastokens", "the same with that tokenizer", partial(our_frontend, tokenizer="fastokens")),
    System("dynamo, fastokens", "the same with that tokenizer", partial(dynamo_frontend, tokenizer="fastokens")),
]
