"""Which workers a rollout or a restart replaces next, and for how long nothing has changed. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from orchestrator.types import Role, WorkerInfo, WorkerState


class MissingByHand:
    """How many workers that no launcher runs are missing: an operator or a service manager is to start them again. They
    are counted and not named, since one may come back under another id."""

    def __init__(self) -> None:
        self._most = 0
        self._drained: set[str] = set()  # told to leave for good

    def missing(self, present: Collection[str], drained: Collection[str], loading: Collection[str]) -> int:
        """How many are missing of the most that there ever were. `present` are registered, `loading` not yet."""
        self._drained |= {*drained} & {*present}
        accounted = {*present} | self._drained
        self._most = max(self._most, len(accounted))
        return max(0, self._most - len(accounted | {*loading}))


def to_replace(
    workers: Mapping[str, WorkerInfo], old: Collection[str], busy: Collection[str], loading: int, max_unavailable: int
) -> list[str]:
    """Which of the `old` workers to restart now, so that no more than `max_unavailable` of all do not serve, and one
    does, unless there is one only.

    `busy` have orders to carry out, `loading` are not registered yet, or missing. The role goes first of which the
    smaller share is replaced, and decode where both are equal: KV passes within a generation, and a new decode worker
    can serve without a new prefill worker, but not the other way round.
    """
    serving = {name: info for name, info in workers.items() if info.state is WorkerState.READY and name not in busy}
    room = max_unavailable - loading - (len(workers) - len(serving))
    room = min(room, len(serving) - min(1, len(workers) + loading - 1))
    left = {role: sorted(name for name in _of(serving, role) if name in old) for role in Role}
    new = {role: sum(name not in old for name in _of(workers, role)) for role in Role}
    chosen: list[str] = []
    while len(chosen) < room and any(left.values()):
        shares = {role: new[role] / (new[role] + len(left[role])) for role in Role if left[role]}
        role = min(shares, key=lambda r: (shares[r], r is Role.PREFILL))
        chosen.append(left[role].pop(0))
        new[role] += 1
    return chosen


def _of(workers: Mapping[str, WorkerInfo], role: Role) -> list[str]:
    return [name for name, info in workers.items() if info.role is role]


class Unchanged:
    """`look` at every picture of what is waited for; pictures are compared by value."""

    def __init__(self) -> None:
        self._picture: object = None
        self._changed_at = self._looked_at = 0.0  # monotonic
        self._was_away = False

    def was_away(self) -> None:
        """It cannot be seen, nor can it happen: the time between the looks before and after this does not count."""
        self._was_away = True

    def look(self, picture: object, now: float) -> float:
        """For how long it has been like this, in seconds. `now` is monotonic."""
        if self._was_away:
            self._changed_at += now - self._looked_at
        if picture != self._picture:
            self._picture, self._changed_at = picture, now
        self._looked_at, self._was_away = now, False
        return now - self._changed_at
