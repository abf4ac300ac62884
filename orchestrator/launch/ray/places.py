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
import contextlib
import logging
import threading

from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

log = logging.getLogger("pd.launcher")

Bundles = list[dict[str, float]]  # what each worker of a unit takes, in the order of its ranks

_WAIT_S = 1.0  # how long one check waits for nodes
_REMOVED_WITHIN_S = 10.0  # a cluster without its head does not answer


class Places:
    """A unit's place is made once it `has` to be there, until it is told to `give_back`."""

    def __init__(self, prefix: str) -> None:
        """`prefix`: of their names, which are common to all namespaces of a cluster."""
        self.groups: dict[str, PlacementGroup] = {}  # by unit, as last seen
        self._prefix = prefix
        self._wanted: dict[str, Bundles] = {}
        self._lock = threading.Lock()  # Ray's calls block, so threads make them; one that is late has no say

    def standing(self) -> dict[str, Bundles]:
        """What is there, by unit. Raises RayError, RuntimeError."""
        groups = [table for table in placement_group_table().values() if table["state"] != "REMOVED"]
        return {
            table["name"].removeprefix(self._prefix): list(table["bundles"].values())
            for table in groups
            if table["name"].startswith(self._prefix)
        }

    async def has(self, unit: str, bundles: Bundles) -> bool:
        """Whether these bundles, which are wanted from now on, are on nodes. Waits for a second."""
        self._wanted[unit] = bundles
        return await asyncio.to_thread(self._has, unit)

    async def give_back(self, unit: str) -> None:
        """Returns when there is nothing, or the cluster does not answer in time."""
        self._wanted.pop(unit, None)
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def settle() -> None:
            try:
                self.settle(unit)
            except (RayError, RuntimeError) as error:
                log.warning("%s: its placement group stays until `orchestrator down`: %s", unit, first_line(error))
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=settle, daemon=True).start()  # not one of the loop's, for which its end would wait
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REMOVED_WITHIN_S):
                await done.wait()

    def _has(self, unit: str) -> bool:
        try:
            group = self.settle(unit)
            return group is not None and group.wait(_WAIT_S)
        except (RayError, RuntimeError, ValueError) as error:  # ValueError: another one has this name
            log.warning("%s: the cluster finds no place: %s", unit, first_line(error))
            self.groups.pop(unit, None)  # nobody knows: the next check is made later, not at once
            return False

    def settle(self, unit: str) -> PlacementGroup | None:
        """Make what the cluster has equal to what is wanted: the table above. Raises RayError, RuntimeError,
        ValueError."""
        with self._lock:
            wanted, name = self._wanted.get(unit), f"{self._prefix}{unit}"
            group = _found(name)
            if group is not None and group.bundle_specs != wanted:
                if wanted is not None:
                    log.info("%s: needs %s, and gives back %s", unit, shown(wanted), shown(group.bundle_specs))
                self.groups.pop(unit, None)
                remove_placement_group(group)
                group = None
            if wanted is None:
                self.groups.pop(unit, None)
                return None
            if group is None:
                # The ranks of a group are on as few nodes as hold them.
                strategy = "PACK" if len(wanted) > 1 else "SPREAD"
                group = placement_group(wanted, strategy=strategy, name=name, lifetime="detached")
            self.groups[unit] = group
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
