"""A fleet on a Ray cluster: the connection, what is there in its namespace, and its `Machines`: a place for each unit
(places.py), frontends on every node.

What an earlier launcher left running is taken over as it is, whatever this one's configuration says: it is served, and
gets a place of another size when it starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from orchestrator.config.engine_args import group_size, ranks
from orchestrator.config.explain import missing
from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.commands import Setup
from orchestrator.launch.host.machine import has_cuda_vllm
from orchestrator.launch.host.process import ProcessGroup
from orchestrator.launch.machines import Machines, OnLine, frontend_named, ranks_of, unit_named
from orchestrator.process.tasks import Asked, in_thread
from orchestrator.types import Role

try:
    import ray
except ModuleNotFoundError:
    raise ConfigError(missing("launcher.kind: ray", "Ray", "ray")) from None

from ray.exceptions import ActorUnavailableError, RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from orchestrator.launch.ray.places import Bundles, Places, first_line, shown
from orchestrator.launch.ray.process import RayProcess, Runners
from orchestrator.launch.ray.runner import Order

log = logging.getLogger("pd.launcher")

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 5.0
_AUTH_MODE = "RAY_AUTH_MODE"  # Ray's processes read it
_SAY_AFTER = 5  # checks for room, of a second each
_ASK_AGAIN_S = 1.0
_ANSWERS_WITHIN_S = 30.0  # a cluster without its head does not
_RUNNER_ANSWERS_S = 30.0  # one on a node that is gone never does


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


class RayCluster(Machines):
    """A cluster may grow: workers wait for nodes. `config` has the model's name: each node finds its own path."""

    remote = True

    def __init__(self, config: Config) -> None:
        self.device = "a Ray cluster"
        self._config = config
        self._nodes: dict[str, str] | None = None  # node ids by address; None until the cluster has told them
        self._asked_nodes = Asked(lambda: ray.nodes(), _ANSWERS_WITHIN_S)
        self._places, self._runners = Places(names_begin(config)), Runners()
        self._left: dict[str, Bundles] = {}  # what units have that run already, until they are made into processes

    async def refresh(self) -> None:
        """Read the nodes for frontends, which have cores. A head that only manages its cluster has none."""
        try:
            nodes = await self._asked_nodes.answer()
        except (RayError, RuntimeError, TimeoutError) as error:
            log.warning("the nodes of the cluster are not known: %s", first_line(error))
            return
        alive = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        self._nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in alive}

    async def left_running(self) -> dict[str, bool]:
        """Also the units of which only a placement group is left, or a rank."""
        names, units = await _told(left_running), await _told(self._places.standing)
        return dict.fromkeys(sorted(units), False) | {unit_named(name) or name: True for name in names}

    async def take_over(self, units: Mapping[str, Role | None]) -> dict[str, Role]:
        standing = await _told(self._places.standing)
        found = await asyncio.gather(*(_started_as(unit, standing.get(unit, []), units[unit]) for unit in units))
        roles = {unit: role for unit, role in zip(units, found, strict=True) if role is not None}
        self._left |= {unit: standing[unit] for unit in roles}
        return roles

    async def give_back(self, unit: str) -> None:
        self._left.pop(unit, None)
        await self._places.give_back(unit)

    async def placed(self, unit: str, wanted: Callable[[], tuple[Role, Setup]]) -> None:
        checks = 0
        while not await self._places.has(unit, needed := self._needed(unit, *wanted())):
            if (checks := checks + 1) == _SAY_AFTER:
                where = "a node that has" if len(needed) == 1 else "nodes that have"
                log.warning("%s: waits for %s %s free", unit, where, shown(needed))
            await asyncio.sleep(0 if unit in self._places.groups else _ASK_AGAIN_S)

    def worker(self, unit: str, role: Role, setup: Setup, on_line: OnLine) -> ProcessGroup:
        place, needed = self._places.groups[unit], self._needed(unit, role, setup)
        if needed != place.bundle_specs:  # the role or the configuration has changed since it was placed
            raise OSError(0, f"its place on the cluster has {shown(place.bundle_specs)}, not {shown(needed)}")
        self._left.pop(unit, None)
        ranks = ranks_of(unit, len(needed))
        group = tuple(ranks) if len(ranks) > 1 else ()

        def options(index: int) -> dict[str, Any]:
            strategy = PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=index)
            bundle = needed[index]
            return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}

        orders = [Order(setup.config, rank, setup.generation, role, group) for rank in ranks]
        placed = [(order, partial(options, index)) for index, order in enumerate(orders)]
        return ProcessGroup([RayProcess(order, where, on_line, self._runners) for order, where in placed])

    def _needed(self, unit: str, role: Role, setup: Setup) -> Bundles:
        return self._left.get(unit) or _bundles(setup.config, role)

    def frontend_nodes(self) -> Sequence[str] | None:
        return None if self._nodes is None else list(self._nodes)

    def frontend(self, name: str, index: int, node: str, setup: Setup, on_line: OnLine) -> ProcessGroup:
        def place() -> dict[str, Any]:
            strategy = NodeAffinitySchedulingStrategy((self._nodes or {})[node], soft=False)
            return {"num_cpus": 0, "scheduling_strategy": strategy}

        if node not in (self._nodes or {}):
            raise OSError(0, f"node {node} is gone" if self._nodes is not None else "the cluster's nodes are not known")
        order = Order(setup.config, name, setup.generation, index=index)
        return ProcessGroup([RayProcess(order, place, on_line, self._runners)])


async def _told(call: Callable[[], T]) -> T:
    """What the cluster says. Raises ConfigError: what it runs is not to be ended only because it cannot tell."""
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN_S):
            return await in_thread(call)
    except (RayError, RuntimeError, TimeoutError) as error:
        raise ConfigError(
            f"launcher.address: the cluster does not tell what it runs ({first_line(error)}); see whether its head does"
        ) from None


async def _started_as(unit: str, bundles: Bundles, registered: Role | None) -> Role | None:
    """See Machines.take_over. `bundles`: those of its place. Raises ConfigError."""
    try:
        if not bundles:
            raise LookupError("it has no placement group")
        runners = [await _told(partial(ray.get_actor, rank)) for rank in ranks_of(unit, len(bundles))]
        try:
            async with asyncio.timeout(_RUNNER_ANSWERS_S):
                said: list[str] = await asyncio.gather(*(runner.role.remote() for runner in runners))
            return [Role(each) for each in said][0]
        except (TimeoutError, ActorUnavailableError):
            if registered is None:
                raise TimeoutError(f"its ranks do not answer in {_RUNNER_ANSWERS_S:g} s") from None
            return registered
    except ConfigError:
        raise
    except (RayError, LookupError, ValueError, TimeoutError, RuntimeError) as error:
        log.warning("%s: is not whole: %s", unit, first_line(error))
        return None


def _bundles(config: Config, role: Role) -> Bundles:
    """What each worker of a unit takes. Raises ConfigError."""
    launcher = config.launcher
    per_rank = launcher.gpus_per_rank
    if per_rank is None:
        per_rank = 1.0 if config.engine == "vllm" and has_cuda_vllm() else 0.0
    bundle = {"CPU": 1.0} | ({"GPU": per_rank * ranks(config, role)} if per_rank else {})
    return [bundle] * group_size(config, role)
