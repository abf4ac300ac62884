"""The objective that counts where many requests share one: the fleet's, or what its latest requests bring instead.

A request's own objective decides its own place, admission and deadline (`policies`). What is done to many at once needs
one for all of them: what is claimed before those that come next, who decodes beside whom, and the split.
"""

from __future__ import annotations

from collections import deque

from orchestrator.config.settings import SLOConfig

LATEST = 64  # requests
TPOT_BROUGHT_BY = 1 / 2  # of them, for a tighter TPOT objective than the fleet's: it costs the others room


class LatestObjective:
    """A tighter objective than the fleet's counts where that share of the latest requests has one as tight: clients
    name theirs, and a few of them do not slow down all others. A looser one does not count: the next may bring none."""

    def __init__(self, of_fleet_s: float, share: float) -> None:
        self.seconds = self._of_fleet_s = of_fleet_s
        self._latest = deque([of_fleet_s] * LATEST, LATEST)
        self._tight = round(share * LATEST) - 1  # its place among the latest in order
        self._left = 0  # so many more requests until all of the latest have the fleet's

    def came(self, own_s: float | None) -> None:
        """The next request has come. None (or 0): it has no objective of its own."""
        if not own_s and not self._left:
            return
        self._left = LATEST if own_s else self._left - 1
        self._latest.append(own_s or self._of_fleet_s)
        self.seconds = min(self._of_fleet_s, sorted(self._latest)[self._tight])


def latest_tpot(slo: SLOConfig) -> LatestObjective:
    """For those who decode beside each other, and for the split."""
    return LatestObjective(slo.tpot_s, TPOT_BROUGHT_BY)
