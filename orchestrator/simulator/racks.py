"""The racks of a simulated fleet: workers are in them by turns, and KV passes more slowly from one to another."""

from __future__ import annotations

from orchestrator.config.values import strict_label
from orchestrator.policy.decode_choice import Candidate
from orchestrator.simulator.settings import Settings
from orchestrator.types import Link, link_of

_LABEL = "rack"


class Racks:
    def __init__(self, settings: Settings) -> None:
        self._count, self._between = settings.racks, settings.between_racks
        self._strict = strict_label(settings.stack.config.routing.pairing) if self._count > 1 else ""

    def labels(self, worker: str) -> dict[str, str]:
        """None in a fleet without racks. `worker`: its name, as p0 or d3."""
        return {_LABEL: f"r{int(worker[1:]) % self._count}"} if self._count > 1 else {}

    def names(self, worker: str) -> list[str]:
        return [f"{name}={value}" for name, value in self.labels(worker).items()]

    def link(self, one: str, other: str) -> Link:
        """The class of the link between two workers."""
        return link_of(self.labels(one), self.labels(other))

    def links(self, worker: str, others: list[str]) -> dict[str, Link]:
        """Of the links from a worker to each other one; none in a fleet without racks."""
        return {other: self.link(worker, other) for other in others} if self._count > 1 else {}

    def permits(self, one: str, other: str) -> bool:
        """Whether KV may pass between two workers."""
        return not self._strict or self._strict in self.link(one, other)

    def permitted(self, worker: str, others: list[Candidate]) -> list[Candidate]:
        """Those to which KV may pass from this worker."""
        return [it for it in others if self.permits(worker, it.worker_id)] if self._strict else others

    def slowness(self, one: str, other: str) -> float:
        """How many times as long as over a worker's own link KV takes between two workers."""
        return self._between if self._count > 1 and not self.link(one, other) else 1.0
