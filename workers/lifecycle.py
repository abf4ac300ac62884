"""The states of a worker process and the legal moves between them, in one table; and its role. No I/O.

Finer than what is registered: a worker that changes role and one that leaves are both DRAINING to the fleet.
"""

from __future__ import annotations

import enum

from orchestrator.types import Role, WorkerState


class Life(enum.Enum):
    STARTING = "starting"  # the engine loads its model
    READY = "ready"
    FLIPPING = "flipping"  # ends what it holds, then takes the other role
    LEAVING = "leaving"  # ends what it holds, then exits
    GONE = "gone"  # takes and gives nothing any more


LEGAL: dict[Life, frozenset[Life]] = {
    Life.STARTING: frozenset({Life.READY, Life.GONE}),
    Life.READY: frozenset({Life.FLIPPING, Life.LEAVING, Life.GONE}),
    Life.FLIPPING: frozenset({Life.READY, Life.LEAVING, Life.GONE}),
    Life.LEAVING: frozenset({Life.GONE}),
    Life.GONE: frozenset(),
}

REGISTERED: dict[Life, WorkerState] = {
    Life.STARTING: WorkerState.STARTING,
    Life.READY: WorkerState.READY,
    Life.FLIPPING: WorkerState.DRAINING,
    Life.LEAVING: WorkerState.DRAINING,
    Life.GONE: WorkerState.DRAINING,
}


class IllegalMove(RuntimeError):
    """A defect in the agent: a move that is not in the table."""


class Lifecycle:
    def __init__(self, role: Role) -> None:
        self.state = Life.STARTING
        self.role = role

    @property
    def registered(self) -> WorkerState:
        return REGISTERED[self.state]

    @property
    def claims(self) -> bool:
        """It takes prefill jobs."""
        return self.state is Life.READY and self.role is Role.PREFILL

    def refusal(self) -> str | None:
        """Why it takes no submission, or None."""
        if self.state is Life.READY:
            return None if self.role is Role.DECODE else "this is a prefill worker"
        return "draining" if self.registered is WorkerState.DRAINING else self.state.value

    def can_enter(self, state: Life) -> bool:
        return state in LEGAL[self.state]

    def enter(self, state: Life) -> None:
        """Raises IllegalMove."""
        if not self.can_enter(state):
            raise IllegalMove(f"a worker that is {self.state.value} cannot become {state.value}")
        self.state = state
