"""How far a tenant that asks for more than its share of the fleet goes behind the others.

Each tenant has a clock that every request of its advances by the request's work over the tenant's share, and that is
never behind the present: L. Zhang, "VirtualClock" (1990). Who asks for less than its share is never delayed. The lead
of a clock is bounded, so that work done while nobody else asked is soon forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

OTHERS = "*"  # the share of tenants that have none of their own
_ACTIVE_S = 30.0  # a tenant that has asked for nothing for as long lends its share
_REMEMBERED = 10_000  # tenants


class Shares:
    """The clocks of one router. Several routers see a part of each tenant's requests, in the same proportions."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: by tenant."""
        self._weights = weights
        self._clocks: OrderedDict[str, float] = OrderedDict()  # by tenant, the one that asked last at the end
        self._asked: dict[str, float] = {}
        self._active = 0.0  # weights of those that share the fleet now

    def lead_s(self, tenant: str, now: float) -> float:
        """How long what the tenant has asked for beyond its share would take; 0 while nobody else asks. `now`: seconds
        of a clock that never goes back."""
        self._forget_idle(now)
        alone = self._clocks.keys() <= {tenant}
        return 0.0 if alone else max(0.0, self._clocks.get(tenant, now) - now)

    def count(self, tenant: str, work_s: float, now: float, most_s: float) -> None:
        """Count a request of this tenant that keeps the whole fleet busy for `work_s`. Its clock leads by at most
        `most_s`."""
        self._forget_idle(now)
        if tenant not in self._clocks:
            self._active += self._weight(tenant)
        clock = max(now, self._clocks.get(tenant, now))
        self._clocks[tenant] = min(clock + work_s * self._active / self._weight(tenant), now + most_s)
        self._clocks.move_to_end(tenant)
        self._asked[tenant] = now

    def _forget_idle(self, now: float) -> None:
        """Those that lend their shares. A client may name any number of tenants, so none is looked at twice."""
        while self._clocks:
            tenant = next(iter(self._clocks))
            if now - self._asked[tenant] <= _ACTIVE_S and len(self._clocks) <= _REMEMBERED:
                return
            del self._clocks[tenant], self._asked[tenant]
            self._active -= self._weight(tenant)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant) or self._weights.get(OTHERS, 1.0)
