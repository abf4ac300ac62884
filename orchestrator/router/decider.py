"""Gathers what a decision is made on and asks the policies: where a request is prefilled, and which worker decodes it.

Stands between `router`, which does what is decided, and `policy`, which does not know who is there. Sends nothing.
"""

from __future__ import annotations

import time

from orchestrator.config.settings import Config
from orchestrator.fleet.prefixes import PrefixView
from orchestrator.fleet.queue_view import PrefillLink
from orchestrator.fleet.view import Fleet
from orchestrator.policy.admission import admit
from orchestrator.policy.candidate import Candidate, DecodeChoice
from orchestrator.policy.placement import Decision, Local, PrefillView, Reject, place
from orchestrator.policy.queue_order import delay_s
from orchestrator.router.learning import Learning
from orchestrator.router.request import ActiveRequest
from orchestrator.types import PrefillJob, RequestInfo, Role


class Decider:
    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        prefill: PrefillLink,
        prefixes: PrefixView,
        choose: DecodeChoice,
        learning: Learning,
    ) -> None:
        self._routing, self._slo, self._queue = config.routing, config.slo, config.queue
        self._fleet, self._prefill, self._prefixes = fleet, prefill, prefixes
        self._choose, self._learning = choose, learning

    def probe(self) -> Decision:
        """Whether any request could be taken."""
        info = RequestInfo(id="", prompt_tokens=1, max_new_tokens=1, arrived_at=time.time())
        view = PrefillView(self._fleet.ready(Role.PREFILL), self._prefill.depth)
        return self._place(info, self._fleet.decode_candidates(), view)

    def decide(self, active: ActiveRequest) -> Decision:
        """For a request that has arrived, or whose attempt failed. Notes on it what is cached of its prompt where."""
        info, hits = active.info, self._prefixes.look_up(active.keys)
        candidates, active.cached_at_prefill = self._fleet.look(active.avoid, hits)
        best = max(active.cached_at_prefill.values(), default=0)
        view = PrefillView(self._fleet.ready(Role.PREFILL), self._prefill.depth, best)
        decision = self._place(info, candidates, view)
        if active.attempt == 1:  # what was accepted once is not refused when it moves
            if not active.decision:
                self._learning.arrived(info, info.prompt_tokens - best)
            if self._slo.admission != "off":
                admission = admit(decision, info, candidates, view, self._slo, self._learning.predictor)
                if isinstance(admission, Reject):
                    return admission
                active.deferred, decision = admission.deferred, admission.decision
        at_decode = hits.blocks(decision.worker_id) if isinstance(decision, Local) else 0
        active.cached_tokens = at_decode * self._fleet.block_size
        return decision

    def bind(self, active: ActiveRequest) -> Candidate | None:
        """The decode worker of a request whose prefill begins now: on load, and hits, as fresh as they are."""
        candidates = self._fleet.decode_candidates(active.avoid, self._prefixes.look_up(active.keys))
        return (self._choose(active.info, candidates) or candidates[0]) if candidates else None

    def job(self, active: ActiveRequest, reply_to: str, body: bytes) -> PrefillJob:
        """What waits in the queue for a request that was decided to be remote."""
        info, cached = active.info, active.cached_at_prefill
        uncached_tokens = max(1, info.prompt_tokens - max(cached.values(), default=0))
        if (depth := self._prefill.depth) is not None:
            active.backlog_s = self._learning.predictor.backlog_s(depth, self._fleet.ready(Role.PREFILL))
        return PrefillJob(
            request_id=info.id,
            attempt=active.attempt,
            tokens=info.prompt_tokens,
            uncached_tokens=uncached_tokens,
            arrived_at=info.arrived_at,
            reply_to=reply_to,
            body=body,
            delay_s=delay_s(
                uncached_tokens,
                self._queue.weight,
                self._queue.seconds_per_token,
                self._slo.ttft_s,
                info.priority,
                active.deferred,
            ),
            cached=cached,
        )

    def _place(self, info: RequestInfo, candidates: list[Candidate], view: PrefillView) -> Decision:
        predictor = self._learning.predictor
        return place(info, candidates, view, self._routing, self._choose, predictor, self._slo)
