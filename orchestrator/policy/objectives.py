"""The objective that counts where many requests share one: the fleet's, or what its latest requests bring instead.

A request's own objective decides its own place, admission and deadline (`policies`). What is done to many at once needs
one for all of them: what is claimed before those that come next, who decodes beside whom, and the split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.placement import ITL_MARGIN
from orchestrator.policy.predict.predictor import Predictor

LATEST = 64  # requests
TPOT_BROUGHT_BY = 1 / 2  # of them, for a tighter TPOT objective than the fleet's: it costs the others room


class LatestObjective:
    """A tighter objective than the fleet's counts where that share of the latest requests has one as tight: clients
    name theirs, and a few of them do not slow down all others. A looser one does not count: the next may bring none."""

    def __init__(self, of_fleet_s: float, share: float, least_s: Callable[[], float] = lambda: 0.0) -> None:
        """Who brings a tighter one than `least_s` says, which nobody can meet, brings none."""
        self.seconds = self._of_fleet_s = of_fleet_s
        self.of_all_s = of_fleet_s  # what all of the latest have, or a tighter one: it costs nobody else
        self._least_s = least_s
        self._latest = deque([of_fleet_s] * LATEST, LATEST)
        self._tight = round(share * LATEST) - 1  # its place among the latest in order
        self._left = 0  # so many more requests until all of the latest have the fleet's

    def came(self, own_s: float | None) -> None:
        """The next request has come. None (or 0): it has no objective of its own."""
        own_s = own_s if own_s and own_s >= self._least_s() else None
        if not own_s and not self._left:
            return
        self._left = LATEST if own_s else self._left - 1
        self._latest.append(own_s or self._of_fleet_s)
        ordered = sorted(self._latest)
        self.seconds, self.of_all_s = [min(self._of_fleet_s, ordered[place]) for place in (self._tight, -1)]


def latest_tpot(slo: SLOConfig, predictor: Predictor) -> LatestObjective:
    """For those who decode beside each other, and for the split. A sequence that decodes alone must meet it."""
    return LatestObjective(slo.tpot_s, TPOT_BROUGHT_BY, lambda: sum(predictor.tpot_line) / ITL_MARGIN)
