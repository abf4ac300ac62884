"""Requests that were running when an engine crashed: which of them crashed it, and which go on.

An engine that crashes takes every request on it down, and one of them may be the cause: it would crash the next engine
too. So each is on trial until its next engine has given a token. Suspects are those whose prompts the engine was
computing, and those that had been in a crash before; each goes on on a worker that has nobody else on trial, of
whichever frontend, and so as many at once as there are workers. If an engine crashes that has a suspect on trial, the
suspect is guilty, and nobody else is suspected. Without one, a request that alone was part of two crashes is guilty,
unless one of another frontend may be. Decides and remembers; sends nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from orchestrator.router.request import ActiveRequest, State
from orchestrator.wire.messages import EngineCrashed

MAX_CRASHES = 5  # whoever was part of so many is guilty, whoever else was there
TRIAL_S = 10.0  # a request that has neither crashed its engine nor a token by then no longer holds up the others


class Quarantine:
    def __init__(self) -> None:
        self._waiting: deque[ActiveRequest] = deque()
        self._tried: list[ActiveRequest] = []

    def crashed(self, victims: Collection[ActiveRequest], crash: EngineCrashed) -> list[ActiveRequest]:
        """An engine with these requests on it has crashed. Returns those that are guilty."""
        possible = [active for active in victims if crash.suspect in (None, active.id)]
        for active in possible:
            active.crashes += 1
        if crash.suspect is not None:
            return possible
        repeated = [active for active in possible if active.crashes > 1]
        if len(repeated) == 1 and not crash.others:
            return repeated
        return [active for active in repeated if active.crashes >= MAX_CRASHES]

    def suspects(self, active: ActiveRequest, worker_id: str) -> bool:
        """Asked of a victim before it leaves the engine of this worker."""
        computing = active.state is State.LOCAL or active.computing_worker == worker_id
        return computing or active.crashes > 1

    def add(self, active: ActiveRequest) -> None:
        """It may go on only alone on its worker."""
        self._forget(active)
        active.suspect = True
        self._waiting.append(active)

    def release(self, workers: int) -> list[ActiveRequest]:
        """Those that may go on now, where as many workers can try one each."""
        room = max(1, workers) - len(self._tried)
        released = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        self._tried += released
        return released

    def overdue(self, now: float) -> bool:
        """Whether some that are tried have had their time; they hold up nobody any more then."""
        before = len(self._tried)
        self._tried = [active for active in self._tried if now - active.moved_at <= TRIAL_S]
        return len(self._tried) < before

    def cleared(self, active: ActiveRequest) -> bool:
        """It has produced a token, or ended. True when that makes room for the next."""
        active.suspect = False
        if active in self._waiting:
            self._waiting.remove(active)
        return self._forget(active)

    def _forget(self, active: ActiveRequest) -> bool:
        tried = active in self._tried
        if tried:
            self._tried.remove(active)
        return tried
