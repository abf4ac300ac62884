"""The command lines and environments of the fleet's processes. Starts nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec

from orchestrator.config.access import secured
from orchestrator.config.engine_args import environment
from orchestrator.config.settings import Config
from orchestrator.launch.host.machine import Share
from orchestrator.launch.host.process import ProcessSpec
from orchestrator.launch.machines import Setup
from orchestrator.process.own_files import make_folder
from orchestrator.telemetry import logs
from orchestrator.types import Role

# What vLLM calls its local sockets; the whole path of a socket may have 107 bytes (unix(7)).
_SOCKET_NAME_BYTES, _SOCKET_PATH_BYTES = 37, 107

# VLLM_LOGGING_LEVEL=INFO shows vLLM's many informative lines.
_QUIET = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}


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


def _python(config: Config) -> list[str]:
    """Another environment's imports nothing from the folder that we were started in, which may hold our code."""
    return [sys.executable] if config.python is None else [config.python, "-P"]


def _environment(config: Config, name: str) -> dict[str, str]:
    ours = {} if config.python is None else {"PYTHONPATH": "", "PYTHONHOME": ""}
    return {**_QUIET, **logs.environment(name, config.logging.format), **ours}


def worker_spec(
    setup: Setup, role: Role, worker_id: str, share: Share, ranks: Sequence[str] = (), rendezvous: str = ""
) -> ProcessSpec:
    """`ranks`: the workers of its unit, which meet at `rendezvous`; none for a worker that is alone."""
    config, folder = setup.config, setup.config_file.parent
    command = [*_python(config), "-m", "workers.main", role.value, "--id", worker_id]
    # Redis is named by the file: its URL may hold a password, and whoever is on this machine can read command lines.
    command += ["--namespace", config.namespace, "--config", str(setup.config_file)]
    command += ["--generation", str(setup.generation), "--die-with-parent", "--id-claimed", *share.arguments]
    command += ["--ranks", ",".join(ranks), "--rendezvous", rendezvous] if ranks else []
    # vLLM leaves its local sockets behind when it is killed; in our folder they are removed with it.
    fits = len(str(folder).encode()) + _SOCKET_NAME_BYTES <= _SOCKET_PATH_BYTES
    sockets = {"VLLM_RPC_BASE_PATH": str(folder)} if fits else {}
    env = {
        **_environment(config, worker_id),
        **sockets,
        **share.env,
        **environment(config, role),
    }
    return ProcessSpec(worker_id, command, env, folder / f"{worker_id}.exit")


def frontend_spec(setup: Setup, name: str, index: int) -> ProcessSpec:
    """How a frontend is started. With several frontends this also makes the folder for the counters that they share."""
    config, folder = setup.config, setup.config_file.parent
    command = [*_python(config), "-m", "orchestrator.frontend.server", "--index", str(index)]
    command += ["--port", str(config.frontend.port), "--die-with-parent"]
    if setup.model:
        for each in (setup, *setup.others):
            command += ["--model", each.model, str(each.config_file), str(each.generation)]
    else:
        command += ["--config", str(setup.config_file), "--generation", str(setup.generation)]
    env = _environment(config, name)
    if config.frontend.most_replicas > 1:
        # The counters of all frontends lie in one place, so that whichever is scraped answers for all. The folder must
        # exist before they import prometheus_client. It has our pid: counters of an earlier launcher do not count.
        metrics = folder / f"metrics-{os.getpid()}"
        make_folder(metrics)
        env["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
    return ProcessSpec(name, command, env, folder / f"{name}.exit")
