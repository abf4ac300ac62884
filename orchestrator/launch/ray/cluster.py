"""`Machines` of a fleet on a Ray cluster: a placement group for each unit, frontends on every node.

A placement group has one bundle for each worker of the unit, which is on one node. It outlives restarts of its workers.
One without room waits, and Ray's autoscaler adds nodes for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from orchestrator.config.engine_args import group_size, ranks
from orchestrator.config.settings import Config
from orchestrator.launch.host.machine import has_cuda_vllm
from orchestrator.launch.host.process_group import ProcessGroup
from orchestrator.launch.machines import OnLine, Setup, ranks_of, unit_named
from orchestrator.launch.ray.connection import group_name, left_running
from orchestrator.launch.ray.process import RayProcess
from orchestrator.launch.ray.wire import RunFrontend, RunWorker
from orchestrator.types import Role

log = logging.getLogger("pd.launcher")

_WAIT_S = 1.0  # how long one check waits for a group's place
_SAY_AFTER_S = 5.0
_RUNNER_ANSWERS_S = 30.0  # one on a node that is gone never does


class RayCluster:
    """See Machines. `config`: the operator's. Its model is not resolved, since each node finds its own path."""

    remote = True
    room: int | None = None  # a cluster may grow: workers wait for nodes

    def __init__(self, config: Config) -> None:
        self.device = "a Ray cluster"
        self._config = config
        self._nodes: dict[str, str] | None = None  # node ids by address; None until the cluster has told them
        self._groups: dict[str, PlacementGroup] = {}  # by unit
        self._bundles: dict[str, list[dict[str, float]]] = {}

    async def refresh(self) -> None:
        """Read the nodes for frontends, which have cores. A head that only manages its cluster has none."""
        try:
            nodes = await asyncio.to_thread(ray.nodes)
        except (RayError, RuntimeError) as error:
            log.warning("the nodes of the cluster are not known: %s", _first_line(error))
            return
        alive = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        self._nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in alive}

    async def left_running(self) -> list[str]:
        return sorted({unit_named(name) or name for name in await asyncio.to_thread(left_running)})

    async def started_as(self, worker_id: str) -> Role | None:
        try:
            runner = await asyncio.to_thread(ray.get_actor, worker_id)
            async with asyncio.timeout(_RUNNER_ANSWERS_S):
                return Role(await runner.role.remote())
        except (RayError, ValueError, TimeoutError) as error:  # ValueError: it has ended, or runs no worker
            log.warning("%s: its role is not known: %s", worker_id, _first_line(error))
            return None

    def take(self, owner: str, role: Role) -> None:
        self._bundles[owner] = _bundles(self._config, role)

    def give_back(self, owner: str) -> None:
        self._bundles.pop(owner, None)
        if owner in self._groups:  # in a thread, since a cluster without its head does not answer
            threading.Thread(target=self._remove_group, args=(owner,), daemon=True).start()

    async def placed(self, owner: str) -> None:
        waited_s = 0.0
        while not await asyncio.to_thread(self._has_place, owner):
            waited_s += _WAIT_S
            if waited_s == _SAY_AFTER_S:
                where = "a node that has" if len(self._bundles[owner]) == 1 else "nodes that have"
                log.warning("%s: waits for %s %s free", owner, where, _shown(self._bundles[owner]))
            await asyncio.sleep(0 if owner in self._groups else _WAIT_S)

    def worker(self, worker_id: str, role: Role, setup: Setup, on_line: OnLine) -> ProcessGroup:
        if (needed := _bundles(setup.config, role)) != (has := self._bundles[worker_id]):
            raise OSError(0, f"its place on the cluster has {_shown(has)}, not {_shown(needed)}")
        ranks = ranks_of(worker_id, len(needed))
        group = tuple(ranks) if len(ranks) > 1 else ()

        def place(index: int) -> dict[str, Any]:
            strategy = PlacementGroupSchedulingStrategy(self._groups[worker_id], placement_group_bundle_index=index)
            bundle = needed[index]
            return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}

        orders = [RunWorker(setup.config, rank, role, setup.generation, group) for rank in ranks]
        return ProcessGroup([RayProcess(order, partial(place, index), on_line) for index, order in enumerate(orders)])

    def frontend_nodes(self) -> Sequence[str] | None:
        return None if self._nodes is None else list(self._nodes)

    def frontend(self, name: str, index: int, node: str, setup: Setup, on_line: OnLine) -> RayProcess:
        def place() -> dict[str, Any]:
            strategy = NodeAffinitySchedulingStrategy((self._nodes or {})[node], soft=False)
            return {"num_cpus": 0, "scheduling_strategy": strategy}

        if node not in (self._nodes or {}):
            raise OSError(0, f"node {node} is gone" if self._nodes is not None else "the cluster's nodes are not known")
        return RayProcess(RunFrontend(setup.config, name, index, setup.generation), place, on_line)

    def _has_place(self, owner: str) -> bool:
        """Whether a worker's placement group has its place. Makes the group if there is none. It runs in a thread,
        which goes on when the caller is cancelled. If the place was given back meanwhile, it removes the group."""
        try:
            if owner not in self._groups and (bundles := self._bundles.get(owner)) is not None:
                self._groups[owner] = _find_or_make_group(group_name(self._config, owner), bundles)
            group = self._groups.get(owner)
            return group is not None and group.wait(_WAIT_S)
        except (RayError, RuntimeError) as error:
            log.warning("%s: the cluster finds no place: %s", owner, _first_line(error))
            return False
        finally:
            if owner not in self._bundles:
                self._remove_group(owner)

    def _remove_group(self, owner: str) -> None:
        if (group := self._groups.pop(owner, None)) is not None:
            try:
                remove_placement_group(group)
            except (RayError, RuntimeError) as error:
                log.warning("%s: its placement group stays until `orchestrator down`: %s", owner, _first_line(error))


def _bundles(config: Config, role: Role) -> list[dict[str, float]]:
    """What each worker of a unit takes. Raises ConfigError."""
    launcher = config.launcher
    per_rank = launcher.gpus_per_rank
    if per_rank is None:
        per_rank = 1.0 if config.engine == "vllm" and has_cuda_vllm() else 0.0
    bundle = {"CPU": 1.0} | ({"GPU": per_rank * ranks(config, role)} if per_rank else {})
    return [bundle] * group_size(config, role)


def _find_or_make_group(name: str, bundles: list[dict[str, float]]) -> PlacementGroup:
    """The ranks of a group are on as few nodes as hold them."""
    try:
        return get_placement_group(name)
    except ValueError:
        strategy = "PACK" if len(bundles) > 1 else "SPREAD"
        return placement_group(bundles, strategy=strategy, name=name, lifetime="detached")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _shown(bundles: list[dict[str, float]]) -> str:
    each = " and ".join(f"{amount:g} {name}" for name, amount in bundles[0].items())
    return each if len(bundles) == 1 else f"{each} for each of {len(bundles)} ranks"
