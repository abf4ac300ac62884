"""What a simulated worker, the first argument of each method, tells the simulation."""

from __future__ import annotations

from typing import Any, Protocol

from orchestrator.simulator.job import Stay


class Events(Protocol):
    """What a worker calls in the simulation."""

    def on_start(self, worker: Any, stay: Stay, now: float) -> None:
        """The blocks of a stay are allocated."""

    def on_prefilled(self, worker: Any, stay: Stay, now: float) -> None:
        """The prompt of a "prefill" stay is computed."""

    def on_first(self, worker: Any, stay: Stay, at: float) -> None:
        """A stay gets its first token at time `at`, which may be later than now."""

    def on_done(self, worker: Any, stay: Stay, now: float) -> None: ...

    def on_boundary(self, worker: Any, tokens: int, seconds: float, now: float) -> None:
        """A step of `seconds` that computed this many prompt tokens has ended."""
