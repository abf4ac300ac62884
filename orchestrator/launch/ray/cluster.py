"""`Machines` of a fleet on a Ray cluster: a place for each unit (places.py), frontends on every node.

What an earlier launcher left running is taken over as it is, whatever this one's configuration says: it is served, and
gets a place of another size when it starts again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from orchestrator.config.engine_args import group_size, ranks
from orchestrator.config.settings import Config
from orchestrator.launch.host.machine import has_cuda_vllm
from orchestrator.launch.host.process_group import ProcessGroup
from orchestrator.launch.machines import OnLine, Setup, ranks_of, unit_named
from orchestrator.launch.ray.connection import left_running, names_begin
from orchestrator.launch.ray.places import Bundles, Places, first_line, shown
from orchestrator.launch.ray.process import RayProcess
from orchestrator.launch.ray.wire import RunFrontend, RunWorker
from orchestrator.types import Role

log = logging.getLogger("pd.launcher")

_SAY_AFTER = 5  # checks for room, of a second each
_ASK_AGAIN_S = 1.0
_RUNNER_ANSWERS_S = 30.0  # one on a node that is gone never does


class RayCluster:
    """See Machines. `config`: the operator's. Its model is not resolved, since each node finds its own path."""

    remote = True
    room: int | None = None  # a cluster may grow: workers wait for nodes

    def __init__(self, config: Config) -> None:
        self.device = "a Ray cluster"
        self._config = config
        self._nodes: dict[str, str] | None = None  # node ids by address; None until the cluster has told them
        self._places = Places(names_begin(config))
        self._left: dict[str, Bundles] = {}  # what units have that run already, until they are made into processes

    async def refresh(self) -> None:
        """Read the nodes for frontends, which have cores. A head that only manages its cluster has none."""
        try:
            nodes = await asyncio.to_thread(ray.nodes)
        except (RayError, RuntimeError) as error:
            log.warning("the nodes of the cluster are not known: %s", first_line(error))
            return
        alive = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        self._nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in alive}

    async def left_running(self) -> list[str]:
        """Also the units of which only a placement group is left, or a rank."""
        names, units = await asyncio.to_thread(left_running), await asyncio.to_thread(self._places.standing)
        return sorted({unit_named(name) or name for name in names} | units.keys())

    async def take_over(self, unit: str, registered: Role | None) -> Role | None:
        try:
            bundles = (await asyncio.to_thread(self._places.standing))[unit]
            runners = [await asyncio.to_thread(ray.get_actor, rank) for rank in ranks_of(unit, len(bundles))]
            role = await _started_as(runners) or registered
            if role is None:
                raise TimeoutError(f"its ranks do not answer in {_RUNNER_ANSWERS_S:g} s")
        except (RayError, LookupError, ValueError, TimeoutError, RuntimeError) as error:
            log.warning("%s: is not whole: %s", unit, first_line(error))
            return None
        self._left[unit] = bundles
        return role

    def fitting(self, roles: Sequence[Role]) -> list[Role]:
        """All: they wait for nodes."""
        return list(roles)

    def take(self, unit: str, role: Role) -> None:
        """Does nothing: there is a place once it is waited for."""

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

        orders = [RunWorker(setup.config, rank, role, setup.generation, group) for rank in ranks]
        return ProcessGroup([RayProcess(order, partial(options, index), on_line) for index, order in enumerate(orders)])

    def _needed(self, unit: str, role: Role, setup: Setup) -> Bundles:
        return self._left.get(unit) or _bundles(setup.config, role)

    def frontend_nodes(self) -> Sequence[str] | None:
        return None if self._nodes is None else list(self._nodes)

    def frontend(self, name: str, index: int, node: str, setup: Setup, on_line: OnLine) -> RayProcess:
        def place() -> dict[str, Any]:
            strategy = NodeAffinitySchedulingStrategy((self._nodes or {})[node], soft=False)
            return {"num_cpus": 0, "scheduling_strategy": strategy}

        if node not in (self._nodes or {}):
            raise OSError(0, f"node {node} is gone" if self._nodes is not None else "the cluster's nodes are not known")
        return RayProcess(RunFrontend(setup.config, name, index, setup.generation), place, on_line)


async def _started_as(runners: Sequence[Any]) -> Role | None:
    """None if one does not answer in time, as on a node that stands still. Raises RayError; ValueError where one has
    ended, or runs no worker."""
    try:
        async with asyncio.timeout(_RUNNER_ANSWERS_S):
            said: list[str] = await asyncio.gather(*(runner.role.remote() for runner in runners))
    except TimeoutError:
        return None
    return [Role(each) for each in said][0]


def _bundles(config: Config, role: Role) -> Bundles:
    """What each worker of a unit takes. Raises ConfigError."""
    launcher = config.launcher
    per_rank = launcher.gpus_per_rank
    if per_rank is None:
        per_rank = 1.0 if config.engine == "vllm" and has_cuda_vllm() else 0.0
    bundle = {"CPU": 1.0} | ({"GPU": per_rank * ranks(config, role)} if per_rank else {})
    return [bundle] * group_size(config, role)
