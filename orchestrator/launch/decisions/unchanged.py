"""How long what is waited for has not changed, which a rollout and `orchestrator model` give up for. Does no I/O."""

from __future__ import annotations


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
