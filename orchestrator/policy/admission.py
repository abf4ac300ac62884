"""What objectives decide: whether a placed request may start now, by its predicted TTFT, the TTFT objective and its
priority; and which objective counts where many requests share one (`LatestObjective`).

`admit` runs after `placement`, on its decision. As configured, a request that would be late is rejected with 429 and a
predicted `Retry-After`, or deferred behind the requests that can still be in time.

`Shares` says how far a tenant that asks for more than its share goes behind the others. Each tenant has a clock that
every request of its advances by the request's work over the tenant's share, and that is never behind the present: L.
Zhang, "VirtualClock" (1990). Who asks for less than its share is never delayed. The lead of a clock is bounded, so that
work done while nobody else asked is soon forgotten.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Union

import msgspec

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.decode_choice import Candidate, RequestInfo
from orchestrator.policy.placement import ITL_MARGIN, Decision, Local, PrefillView, Reject, Remote
from orchestrator.policy.predict.predictor import Predictor

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
OTHERS = "*"  # the share of tenants that have none of their own
_ACTIVE_S = 30.0  # a tenant that has asked for nothing for as long lends its share
_REMEMBERED = 10_000  # tenants
LATEST = 64  # requests
TPOT_BROUGHT_BY = 1 / 2  # of them, for a tighter TPOT objective than the fleet's: it costs the others room


class Admitted(msgspec.Struct, frozen=True):
    """`deferred`: the request would be late and goes behind those in time (`LATE_OBJECTIVES` of `policies`)."""

    decision: Local | Remote
    predicted_ttft_s: float
    deferred: bool = False


Admission = Union[Admitted, Reject]


def predicted_ttft_s(
    decision: Local | Remote,
    request: RequestInfo,
    candidates: Sequence[Candidate],
    prefill: PrefillView,
    predictor: Predictor,
) -> float:
    """The predicted TTFT in seconds from now of a request that is placed as decided.

    Raises ValueError if a local decision names a worker that is not among the candidates.
    """
    if isinstance(decision, Remote):
        if decision.ttft_s is not None:
            return decision.ttft_s
        if prefill.queue is None:
            return predictor.prefill_s(request.prompt_tokens)
        compute = max(0, request.prompt_tokens - prefill.cached_tokens)
        return predictor.remote_ttft_s(compute, request.prompt_tokens, prefill.queue, prefill.workers_ready)
    for candidate in candidates:
        if candidate.worker_id == decision.worker_id:
            return predictor.local_ttft_s((candidate,), request.prompt_tokens)[0]
    raise ValueError(f"placed on {decision.worker_id}, which is no candidate")


def admit(
    decision: Decision,
    request: RequestInfo,
    candidates: Sequence[Candidate],
    prefill: PrefillView,
    slo: SLOConfig,
    predictor: Predictor,
) -> Admission:
    """Admit, defer or reject. `Retry-After` is the time by which the predicted TTFT exceeds its bound, 1 to 60 s.

    The bound is the TTFT objective. As in vLLM a lower priority number is more important. Each step below 0 adds the
    objective to the bound once more, and each step above 0 takes a quarter off the bound, so that unimportant requests
    are refused first.
    """
    if isinstance(decision, Reject):
        return decision
    ttft_s = predicted_ttft_s(decision, request, candidates, prefill, predictor)
    if slo.admission == "off":
        return Admitted(decision, ttft_s)
    bound_s = slo.ttft_s * _slack_factor(request.priority)
    if ttft_s <= bound_s:
        return Admitted(decision, ttft_s)
    if slo.admission == "queue":
        return Admitted(decision, ttft_s, deferred=True)
    return Reject("slo_ttft", min(MAX_RETRY_S, max(MIN_RETRY_S, ttft_s - bound_s)))


def _slack_factor(priority: int) -> float:
    return 1.0 - priority if priority <= 0 else 0.75**priority


class Shares:
    """The clocks of one router. Several routers see a part of each tenant's requests, in the same proportions."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: by tenant. Without any, nobody is delayed."""
        self._weights = weights
        self._clocks: OrderedDict[str, float] = OrderedDict()  # by tenant, the one that asked last at the end
        self._asked: dict[str, float] = {}
        self._active = 0.0  # weights of those that share the fleet now

    @property
    def given(self) -> bool:
        return bool(self._weights)

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


class LatestObjective:
    """The objective of many at once: for what is claimed before those that come next, for who decodes beside whom, and
    for the split. A request's own one decides its own place, admission and deadline (`policies`).

    A tighter objective than the fleet's counts where that share of the latest requests has one as tight: clients
    name theirs, and a few of them do not slow down all others. A looser one does not count: the next may bring none.
    """

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
