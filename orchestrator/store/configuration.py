"""The registry's documents in Redis: the fleet's configuration; how members come to run it, by a rollout to the next
generation, or a restart; and the LoRA adapters that frontends serve.

Workers and launchers of every host read the configuration, so it has neither the URL of Redis nor the frontends'
section. `launch/rollout.py` carries a rollout out, and `fleet/adapters.py` follows the adapters.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from orchestrator.types import WorkerInfo


class Phase(str, enum.Enum):
    FORWARD = "forward"  # to the new configuration
    BACK = "back"  # to the old one: an operator aborted it, or a new worker cannot start
    DONE = "done"
    UNDONE = "undone"


class Version(msgspec.Struct, frozen=True):
    """A configuration, as `config.shared.shared` makes it, and its generation: every rollout has a new one."""

    generation: int
    config: dict[str, Any]


def refuses_local(config: Mapping[str, Any]) -> bool:
    """Whether a long prompt is refused where no worker is there to prefill it. `config`: as in `Version`."""
    routing = config.get("routing", {})
    return bool(routing.get("fallback") == "refuse")


class Rollout(msgspec.Struct, frozen=True):
    """The last rollout that was ordered. In every phase, `target` is the version that all members should run. A restart
    is a rollout to the version that they run: `restart` has the units to replace, and the process that each had when it
    was ordered. Its version has no configuration where each member runs that of its own file."""

    old: Version
    new: Version
    max_unavailable: int = 1
    phase: Phase = Phase.FORWARD
    why: str = ""  # it rolls back, or has rolled back
    restart: dict[str, str] = {}
    ordered: int = 0  # the highest generation of the rollouts before a restart

    @property
    def highest(self) -> int:
        """Of all generations that were ordered, also of a rollout that went back: the next one has another number."""
        return max(self.new.generation, self.ordered)

    @property
    def target(self) -> Version:
        return self.new if self.phase in (Phase.FORWARD, Phase.DONE) else self.old

    @property
    def under_way(self) -> bool:
        return self.phase in (Phase.FORWARD, Phase.BACK)

    @property
    def settled(self) -> Version:
        """The version that a new process starts with: the old one, until the rollout has ended."""
        return self.old if self.under_way else self.target

    @property
    def name(self) -> str:
        return "restart" if self.restart else f"rollout to generation {self.new.generation}"

    def replaces(self, unit: WorkerInfo) -> bool:
        if self.restart:
            return self.restart.get(unit.id) == unit.process
        return unit.generation != self.target.generation

    def as_ended(self, later: Rollout) -> Rollout | None:
        """This rollout as it ended, by one that was ordered after it: that began with what this one had left. None
        where `later` does not say, as one that is older: Redis had lost this one, and was told that again."""
        is_later = later.highest > self.highest or (later.restart and later.highest == self.highest)
        if self.restart or not is_later:
            return None
        done = later.old.generation == self.new.generation
        return self.to(Phase.DONE) if done else self.to(Phase.UNDONE, f"before the {later.name} was ordered")

    def to(self, phase: Phase, why: str = "") -> Rollout:
        return msgspec.structs.replace(self, phase=phase, why=why or self.why)

    def given_up(self, why: str) -> Rollout:
        """A restart has nothing to go back to."""
        return self.to(Phase.UNDONE if self.restart else Phase.BACK, why)


class Adapter(msgspec.Struct, frozen=True):
    """`number`: by which engines know it; see `wire.adapters`. `path`: as workers read it."""

    name: str
    path: str
    number: int
    base_model: str | None = None
    is_3d: bool = False  # the layout of its MoE weights, as vLLM's `is_3d_lora_weight`


class AdapterList(msgspec.Struct, frozen=True):
    """Without those of frontends' configurations. Every change raises the revision; a frontend says which it serves."""

    revision: int = 0
    adapters: dict[str, Adapter] = {}  # by name

    def changed(self, name: str, adapter: Adapter | None) -> AdapterList:
        """With this adapter in the place of the one of this name, or without it (None)."""
        others = {known: one for known, one in self.adapters.items() if known != name}
        # Microseconds of the clock, so that it grows even when Redis has lost the earlier ones.
        revision = max(self.revision + 1, int(time.time() * 1e6))
        return AdapterList(revision, others if adapter is None else {**others, name: adapter})
