"""Finds the request that crashes engines, and keeps it from crashing more of them.

A crash ends every request of the engine, and one of them may be the cause, which would crash the next engine too. So
each of them is on trial until its next engine has given a token. Suspects are the requests whose prompts the engine was
computing, and those that were part of an earlier crash. A suspect runs only on a worker without another request on
trial, of any frontend; so as many suspects run at once as there are workers. If an engine crashes with a suspect on
trial, the suspect is guilty and no other request is suspected. Without a suspect, the only request that was part of two
crashes is guilty, unless a request of another frontend may be. Decides and remembers; sends nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from orchestrator.fleet.pause import Pause
from orchestrator.router.request import ActiveRequest, State
from orchestrator.wire.messages import EngineCrashed

MAX_CRASHES = 5  # a request that was part of this many crashes is guilty
TRIAL_S = 10.0  # a trial without a crash or a token ends after this, so that it does not delay the others


class Quarantine:
    def __init__(self, pause: Pause) -> None:
        self._pause = pause  # in which no trial can end
        self._waiting: deque[ActiveRequest] = deque()
        self._tried: list[ActiveRequest] = []

    def crashed(self, victims: Collection[ActiveRequest], crash: EngineCrashed) -> list[ActiveRequest]:
        """Record the crash of an engine with these requests. Returns the guilty ones."""
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
        """Whether a request of this crashed worker becomes a suspect. Call it before the request's next attempt."""
        computing = active.state is State.LOCAL or active.computing_worker == worker_id
        return computing or active.crashes > 1

    def add(self, active: ActiveRequest) -> None:
        """Make it a suspect: it waits for a worker without another request on trial."""
        self._forget(active)
        active.suspect = True
        self._waiting.append(active)

    def release(self, workers: int) -> list[ActiveRequest]:
        """The suspects that may run now, if this many workers can try one each."""
        room = max(1, workers) - len(self._tried)
        released = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        self._tried += released
        return released

    def overdue(self, now: float) -> bool:
        """End the trials that have lasted TRIAL_S. Returns whether there were any."""
        before = len(self._tried)
        self._tried = [active for active in self._tried if self._pause.waited_s(active.moved_at, now) <= TRIAL_S]
        return len(self._tried) < before

    def expired(self, now: float, timeout_s: float) -> list[ActiveRequest]:
        """The suspects that have waited this long for a worker to try them on. They wait no more."""
        late = [active for active in self._waiting if self._pause.waited_s(active.moved_at, now) > timeout_s]
        for active in late:
            self._waiting.remove(active)
        return late

    def cleared(self, active: ActiveRequest) -> bool:
        """The request has produced a token or has ended. Returns whether that makes room for the next suspect."""
        active.suspect = False
        if active in self._waiting:
            self._waiting.remove(active)
        return self._forget(active)

    def _forget(self, active: ActiveRequest) -> bool:
        tried = active in self._tried
        if tried:
            self._tried.remove(active)
        return tried
