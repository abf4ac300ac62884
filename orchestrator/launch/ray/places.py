"""The placement groups of a fleet's units on a Ray cluster: one for each, with a bundle for each of its workers.

| wanted  | the cluster has | then |
|---------|-----------------|------|
| nothing | a group         | it is removed; Ray ends what still runs in it |
| bundles | nothing         | one is made, and waits for nodes that have room |
| bundles | other bundles   | that group is removed, and one is made |
| bundles | the same        | nothing: it outlives restarts of its workers, and launchers |
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from orchestrator.process.tasks import in_thread

log = logging.getLogger("pd.launcher")

Bundles = list[dict[str, float]]  # what each worker of a unit takes, in the order of its ranks

_WAIT_S = 1.0  # how long one check waits for nodes
_ANSWERS_WITHIN_S = 10.0  # a cluster without its head does not answer


class Places:
    """A unit's place is made once it `has` to be there, until it is told to `give_back`."""

    def __init__(self, prefix: str) -> None:
        """`prefix`: of their names, which are common to all namespaces of a cluster."""
        self.groups: dict[str, PlacementGroup] = {}  # by unit, as last seen
        self._prefix = prefix
        self._wanted: dict[str, Bundles] = {}
        self._asking: dict[str, asyncio.Task[bool]] = {}  # by unit, until the cluster has what is wanted by then

    def standing(self) -> dict[str, Bundles]:
        """What is there, by unit. Blocks. Raises RayError, RuntimeError."""
        groups = [table for table in placement_group_table().values() if table["state"] != "REMOVED"]
        return {
            table["name"].removeprefix(self._prefix): list(table["bundles"].values())
            for table in groups
            if table["name"].startswith(self._prefix)
        }

    def remove_all(self) -> None:
        """Blocks. Raises RayError, RuntimeError."""
        for unit in self.standing():
            self._settle(unit, None)

    async def has(self, unit: str, bundles: Bundles) -> bool:
        """Whether these, wanted from now on, are on nodes. Waits for a second, and for an answer in bounded time."""
        self._wanted[unit] = bundles
        return await self._settled(unit)

    async def give_back(self, unit: str) -> None:
        """Returns when there is nothing, or the cluster does not answer in time."""
        self._wanted.pop(unit, None)
        await self._settled(unit)

    async def _settled(self, unit: str) -> bool:
        """Whether the cluster has what is wanted. False too where it does not answer in time: it is asked on, once for
        each unit, so that an answer that is late makes nothing that nobody wants any more."""
        if unit not in self._asking:
            self._asking[unit] = asyncio.create_task(self._ask(unit), name=f"place-{unit}")
        asking = self._asking[unit]
        done, _ = await asyncio.wait({asking}, timeout=_ANSWERS_WITHIN_S)
        if not done:
            log.warning("%s: no answer from the cluster on its place in %g s", unit, _ANSWERS_WITHIN_S)
            self.groups.pop(unit, None)  # nobody knows: the next check is made later, not at once
        return bool(done) and asking.result()

    async def _ask(self, unit: str) -> bool:
        try:
            while True:
                wanted, group, there = self._wanted.get(unit), None, False
                try:
                    group, there = await in_thread(partial(self._made, unit, wanted))
                except (RayError, RuntimeError, ValueError) as error:  # ValueError: another one has this name
                    problem = "finds no place" if wanted else "keeps its placement group until `orchestrator down`"
                    log.warning("%s: the cluster %s: %s", unit, problem, first_line(error))
                self.groups.pop(unit, None)
                if group is not None:
                    self.groups[unit] = group
                if self._wanted.get(unit) == wanted:
                    return there
        finally:
            del self._asking[unit]

    def _made(self, unit: str, wanted: Bundles | None) -> tuple[PlacementGroup | None, bool]:
        """The group, and whether all of it is on nodes. Blocks."""
        group = self._settle(unit, wanted)
        return group, group is not None and group.wait(_WAIT_S)

    def _settle(self, unit: str, wanted: Bundles | None) -> PlacementGroup | None:
        """Makes what the cluster has equal to what is wanted. Blocks. Raises RayError, RuntimeError, ValueError."""
        name = f"{self._prefix}{unit}"
        group = _found(name)
        if group is not None and group.bundle_specs != wanted:
            if wanted is not None:
                log.info("%s: needs %s, and gives back %s", unit, shown(wanted), shown(group.bundle_specs))
            remove_placement_group(group)
            group = None
        if group is None and wanted is not None:
            # The ranks of a group are on as few nodes as hold them.
            strategy = "PACK" if len(wanted) > 1 else "SPREAD"
            group = placement_group(wanted, strategy=strategy, name=name, lifetime="detached")
        return group


def _found(name: str) -> PlacementGroup | None:
    try:
        return get_placement_group(name)
    except ValueError:
        return None


def shown(bundles: Bundles) -> str:
    each = " and ".join(f"{amount:g} {name}" for name, amount in bundles[0].items())
    return each if len(bundles) == 1 else f"{each} for each of {len(bundles)} ranks"


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
