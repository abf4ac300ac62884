"""The command lines and environments of the fleet's processes, and what is in them. Starts nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from orchestrator.config.access import secured
from orchestrator.config.engine_args import environment
from orchestrator.config.settings import Config
from orchestrator.launch.host.fork_servers import Forkable
from orchestrator.launch.host.machine import Share
from orchestrator.launch.host.process import ProcessSpec
from orchestrator.process.files import make_folder
from orchestrator.process.telemetry import logs
from orchestrator.types import Role

# What vLLM calls its local sockets; the whole path of a socket may have 107 bytes (unix(7)).
_SOCKET_NAME_BYTES, _SOCKET_PATH_BYTES = 37, 107

_WORKER, _FRONTEND = "workers.main", "orchestrator.frontend.server"
# Modules that take long to import.
_OF_WORKERS = {"vllm": ("workers.vllm_engine.engine",), "sim": ("workers.agent", "workers.sim.engine")}
_OF_FRONTENDS = ("orchestrator.frontend.models.app",)

# VLLM_LOGGING_LEVEL=INFO shows vLLM's many informative lines.
_QUIET = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}


class Setup(msgspec.Struct, frozen=True):
    """What a process is started with."""

    generation: int
    config: Config  # resolved
    config_file: Path  # that holds it here
    model: str = ""  # its name where the fleet has several
    others: tuple[Setup, ...] = ()  # what else a frontend is started with then

    @property
    def worker_name(self) -> str:
        """What the ids of workers begin with: several models share a machine, and its log."""
        return f"{self.model}-worker" if self.model else "worker"


def resolve(config: Config, model: str, redis_url: str, port: int) -> Config:
    """The configuration for the processes: the model is a folder; `served_model_name` keeps its name for clients."""
    replace = msgspec.structs.replace
    # On a cluster a frontend listens at its node's address, whatever `host` is.
    reached_at = "0.0.0.0" if config.launcher.kind != "local" else config.frontend.host  # noqa: S104 - replaced there
    return replace(
        config,
        model=model,
        served_model_name=config.served_model_name or config.model,
        redis=replace(config.redis, url=redis_url),
        frontend=replace(config.frontend, port=port),
        security=secured(config.security, reached_at),
    )


def _program(config: Config, module: str, arguments: Sequence[str] = ()) -> Forkable:
    """Another environment's Python imports nothing from the folder that we were started in, which may hold our code."""
    python = (sys.executable,) if config.python is None else (config.python, "-P")
    imports = needed = _OF_WORKERS[config.engine] if module == _WORKER else _OF_FRONTENDS
    if config.engine == "vllm":
        # One list, so that one process forks all: of workers first, since engines take longer to start than frontends.
        imports = (*_OF_WORKERS["vllm"], *_OF_FRONTENDS)
        needed = needed if module == _WORKER else imports
    return Forkable(python, module, tuple(arguments), imports, len(needed))


def _environment(config: Config, name: str) -> dict[str, str]:
    ours = {} if config.python is None else {"PYTHONPATH": "", "PYTHONHOME": ""}
    return {**_QUIET, **logs.environment(name, config.logging.format), **ours}


def worker_spec(setup: Setup, role: Role, worker_id: str, share: Share, ranks: Sequence[str] = ()) -> ProcessSpec:
    """`ranks`: the workers of its unit; none for a worker that is alone."""
    config, folder = setup.config, setup.config_file.parent
    # Redis is named by the file: its URL may hold a password, and whoever is on this machine can read command lines.
    arguments = [role.value, "--id", worker_id, "--namespace", config.namespace, "--config", str(setup.config_file)]
    arguments += ["--generation", str(setup.generation), "--die-with-parent", "--id-claimed", *share.arguments]
    arguments += ["--ranks", ",".join(ranks)] if ranks else []
    # vLLM leaves its local sockets behind when it is killed; in our folder they are removed with it.
    fits = len(str(folder).encode()) + _SOCKET_NAME_BYTES <= _SOCKET_PATH_BYTES
    sockets = {"VLLM_RPC_BASE_PATH": str(folder)} if fits else {}
    env = {**_environment(config, worker_id), **sockets, **share.env, **environment(config, role)}
    program = _program(config, _WORKER, arguments)
    return ProcessSpec(worker_id, program.command, env, program)


def frontend_spec(setup: Setup, name: str, index: int) -> ProcessSpec:
    """How a frontend is started. With several frontends this also makes the folder for the counters that they share."""
    config, folder = setup.config, setup.config_file.parent
    arguments = ["--index", str(index), "--port", str(config.frontend.port), "--die-with-parent"]
    if setup.model:
        for each in (setup, *setup.others):
            arguments += ["--model", each.model, str(each.config_file), str(each.generation)]
    else:
        arguments += ["--config", str(setup.config_file), "--generation", str(setup.generation)]
    env = _environment(config, name)
    if config.frontend.most_replicas > 1:
        # The counters of all frontends of a host lie in one place, so that whichever is scraped answers for all. The
        # folder must exist before they import prometheus_client. It ends with the last of them, or with its launcher.
        metrics = folder / "metrics"
        make_folder(metrics)
        env["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
    program = _program(config, _FRONTEND, arguments)
    return ProcessSpec(name, program.command, env, program)


def to_import(config: Config) -> list[tuple[Forkable, dict[str, str]]]:
    """Programs with the imports that the fleet's processes begin with, and what is in their environment then."""
    ours = _environment(config, "")
    of_workers = [(_program(config, _WORKER), {**ours, **environment(config, role)}) for role in Role]
    return [(_program(config, _FRONTEND), ours), *of_workers]
