"""The connection to a Ray cluster, and what a fleet has there: actors and placement groups of its namespace."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import Any

from orchestrator.config.explain import missing
from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.machines import frontend_named, unit_named

try:
    import ray
except ModuleNotFoundError:
    raise ConfigError(missing("launcher.kind: ray", "Ray", "ray")) from None

from ray.exceptions import RayError
from ray.util import list_named_actors

from orchestrator.launch.ray.places import Places, first_line

log = logging.getLogger("pd.launcher")

_CONNECT_TIMEOUT_S = 5.0
_AUTH_MODE = "RAY_AUTH_MODE"  # Ray's processes read it


def connect(config: Config) -> str:
    """Connect to the cluster that the configuration names. Returns its address. Raises ConfigError."""
    if config.launcher.ray_auth == "token":
        os.environ[_AUTH_MODE] = "token"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    asked = config.launcher.address or "auto"
    _check_address(asked)
    try:
        context = ray.init(
            address=asked,
            namespace=_namespace(config),
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        said = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"launcher.address: no Ray cluster can be used at {asked!r} ({said}); name one that runs, and where it "
            "asks for a token, have its token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
        ) from None
    return str(context.address_info["gcs_address"])  # type: ignore[attr-defined]  # of the class that is returned


def _check_address(address: str) -> None:
    """Raises ConfigError if no server answers there. Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"launcher.address: expected HOST:PORT of the cluster's head, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"launcher.address: no Ray cluster answers at {address!r} ({error}); start one with `ray start --head`"
        ) from None


def disconnect() -> None:
    ray.shutdown()


def end_fleet(config: Config, timeout_s: float) -> list[str]:
    """End every process of the fleet, whichever launcher started it. Returns their names. Raises ConfigError."""
    connect(config)
    try:
        names, runners = left_running(), []
        for name in names:
            with contextlib.suppress(ValueError):  # it has ended since
                runners.append(ray.get_actor(name))
        stops: list[Any] = [runner.stop.remote(timeout_s) for runner in runners]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=2 * timeout_s)
        for runner in runners:
            ray.kill(runner)
        Places(names_begin(config)).remove_all()
        return names
    except (RayError, RuntimeError) as error:
        raise ConfigError(
            f"launcher.address: the cluster does not end the fleet ({first_line(error)}); see whether its head "
            "answers, and run `orchestrator down` again"
        ) from None
    finally:
        disconnect()


def left_running() -> list[str]:
    """Names of the fleet's processes on the cluster that we are connected to. Other actors in its namespace, which
    anybody with access to the cluster can make, are left alone. Raises RayError, RuntimeError."""
    found = sorted(list_named_actors())
    ours = [name for name in found if frontend_named(name) is not None or unit_named(name) is not None]
    if len(ours) < len(found):
        others = ", ".join(name for name in found if name not in ours)
        log.warning("actors in this fleet's namespace that are none of its processes are left alone: %s", others)
    return ours


def names_begin(config: Config) -> str:
    """What the names of this fleet's placement groups begin with: they are common to all namespaces of a cluster."""
    return f"{_namespace(config)}/"


def _namespace(config: Config) -> str:
    return f"pd-{config.namespace}"
