"""Requests that were running when an engine crashed: which of them crashed it, and which go on.

An engine that crashes takes every request on it down, and one of them may be the cause: it would crash the next engine
too. So each of them goes on alone, one after the other, until it has produced a token. One that crashes its engine
while alone, or that alone was part of two crashes, is guilty, unless a request of another frontend may be. Decides and
remembers; sends nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from orchestrator.router.request import ActiveRequest

MAX_CRASHES = 5  # whoever was part of so many is guilty, whoever else was there
ALONE_S = 10.0  # who crashes nothing for this long without a token does not hold the others up any more


class Quarantine:
    def __init__(self) -> None:
        self._waiting: deque[ActiveRequest] = deque()
        self._alone: ActiveRequest | None = None

    def crashed(self, victims: Collection[ActiveRequest], others: int) -> list[ActiveRequest]:
        """An engine with these requests on it has crashed, and with so many of other frontends that may be the cause.
        Returns those that are guilty."""
        for active in victims:
            active.crashes += 1
        if others and all(active.crashes < MAX_CRASHES for active in victims):
            return []
        repeated = [active for active in victims if active.crashes > 1]
        return [active for active in victims if active is self._alone or repeated == [active]]

    def add(self, active: ActiveRequest) -> None:
        """It may go on only alone."""
        if active is self._alone:
            self._alone = None
        self._waiting.append(active)

    def release(self) -> ActiveRequest | None:
        """The next that may go on now, if none is alone at present."""
        if self._alone is not None or not self._waiting:
            return None
        self._alone = self._waiting.popleft()
        return self._alone

    def overdue(self, now: float) -> bool:
        """Whether the one that is alone has had its time; it is alone no more then."""
        if self._alone is None or now - self._alone.moved_at <= ALONE_S:
            return False
        self._alone = None
        return True

    def cleared(self, active: ActiveRequest) -> bool:
        """It has produced a token, or ended. True when that makes room for the next."""
        if active is self._alone:
            self._alone = None
            return True
        if active in self._waiting:
            self._waiting.remove(active)
        return False
