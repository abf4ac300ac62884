"""Deadlines of requests: one whose state has lasted too long gets another attempt, as does one in the queue that would
be served sooner elsewhere, or from where nobody claims it.

Waiting costs the client time, and another attempt costs the fleet work, so a request that may only be slow keeps its
attempt.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Mapping

from orchestrator.config.settings import Config
from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.view import Fleet
from orchestrator.policy.placement import claim_timeout_s
from orchestrator.policy.policies import RECALL_S
from orchestrator.router.active_requests import ActiveRequests
from orchestrator.router.decider import Decider
from orchestrator.router.dispatch import Dispatch
from orchestrator.router.learning import Learning
from orchestrator.router.request import ActiveRequest, State
from orchestrator.types import JobState

WITH_A_WORKER = (State.TRANSFERRING, State.LOCAL, State.DECODING)
# A worker reports a claim within milliseconds. After this time a missing job is lost, and so is an unreported claim.
UNHEARD_S = 1.0
STALL_TIMEOUT_S = 600.0  # a request without output for this long is started again on another worker
# One without a token yet also has this many times as long as computing its prompt takes, and those that wait before it.
STALLED_PREFILLS = 3.0
MAX_LOOKUPS = 64  # jobs looked up at a time: the ones that wait longest
# Most of a prompt's KV has arrived when its prefill ends. If the rest takes longer than this, and longer than computing
# the prompt again would, the link is probably cut.
LATE_KV_S = 3.5


class Overdue:
    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        queue: QueueView,
        requests: ActiveRequests,
        decider: Decider,
        dispatch: Dispatch,
        learning: Learning,
    ) -> None:
        self._routing, self._fleet, self._queue = config.routing, fleet, queue
        self._requests, self._decider, self._dispatch, self._learning = requests, decider, dispatch, learning
        self._slo, self._recall_at = config.slo, 0.0
        self._claimed: set[str] = set()  # request ids whose jobs had an unreported claim at the last look

    def check(self, now: float) -> None:
        """Check all deadlines but that of unreported claims. Time before the end of a pause of the fleet does not
        count."""
        longest: dict[str | None, int] = {}  # by decode worker: prompt tokens of a request whose KV is to come
        for active in self._requests.all():
            if active.state is State.TRANSFERRING:
                before = longest.get(active.decode_worker, 0)
                longest[active.decode_worker] = max(before, active.parsed.info.prompt_tokens)
        for active in self._requests.all():
            with self._dispatch.guarding(active):
                self._check(active, now, longest)

    def _check(self, active: ActiveRequest, now: float, longest: Mapping[str | None, int]) -> None:
        if active.state is State.QUEUED and self._claim_is_late(active, now):
            self._dispatch.retry(active, "claim_timeout")
        elif active.state in WITH_A_WORKER and active.decode_worker not in self._fleet.workers:
            self._dispatch.retry(active, "decode_worker_lost", avoid=active.decode_worker)
        elif active.state is State.TRANSFERRING and self._fleet.is_quiet(active.prefill_worker):
            self._dispatch.retry(active, "prefill_worker_quiet", charge=False)
        elif active.state is State.TRANSFERRING and active.prefill_worker not in self._fleet.workers:
            self._dispatch.retry(active, "prefill_worker_lost", charge=False)
        elif active.state is State.TRANSFERRING and self._kv_is_late(active, now, longest):
            link = self._fleet.places.link(active.prefill_worker, active.decode_worker)
            self._learning.kv_late(active, link, now)
            self._dispatch.retry(active, "kv_late")
        elif active.state in WITH_A_WORKER and self._makes_nothing(active, now):
            self._dispatch.retry(active, "stalled", avoid=active.decode_worker)

    def recall(self, now: float) -> None:
        """Take requests out of the queue that a decode worker would serve sooner: a look each RECALL_S."""
        if now >= self._recall_at:
            self._recall_at = now + RECALL_S
            queued = [active for active in self._requests.all() if active.state is State.QUEUED]
            for active in self._decider.recalled(queued):
                with self._dispatch.guarding(active):
                    self._dispatch.retry(active, "recalled")

    def check_claimers(self) -> None:
        """Take all out of it once nobody claims from it."""
        if not self._fleet.claims():
            self._dispatch.leave_queue("no_prefill_worker")

    async def check_queue(self, now: float) -> None:
        """Retry requests whose job Redis has lost, and those whose prefill worker does not report its claim."""
        waiting = [active for active in self._requests.all() if active.state is State.QUEUED]
        waiting = sorted(waiting, key=lambda active: active.moved_at)[:MAX_LOOKUPS]
        overdue = {active.id: active.attempt for active in waiting if now - active.moved_at > UNHEARD_S}
        states = await self._queue.states(list(overdue)) if overdue else {}
        claimed = set()
        for request_id, state in states.items():
            active = self._requests.current(request_id, overdue[request_id])
            if active is None or active.state is not State.QUEUED:
                continue  # it moved on meanwhile
            with self._dispatch.guarding(active):
                if state is JobState.ABSENT:
                    self._dispatch.retry(active, "job_lost")
                elif state is JobState.CLAIMED and request_id in self._claimed:
                    self._dispatch.retry(active, "claimer_unheard", charge=False)
                elif state is JobState.CLAIMED:
                    claimed.add(request_id)
        self._claimed = claimed

    async def leave_claimers(self, worker_ids: Collection[str], why: str) -> None:
        """Retry requests whose jobs these silent workers have claimed, and have not said so."""
        queued = {active.id: active.attempt for active in self._requests.all() if active.state is State.QUEUED}
        claims = await asyncio.gather(*map(self._queue.claims_of, worker_ids)) if queued else []
        for request_id in queued.keys() & itertools.chain(*claims):
            active = self._requests.current(request_id, queued[request_id])
            if active is not None and active.state is State.QUEUED:
                with self._dispatch.guarding(active):
                    self._dispatch.retry(active, why, charge=False)

    def _claim_is_late(self, active: ActiveRequest, now: float) -> bool:
        timeout_s = claim_timeout_s(self._routing, self._slo, active.parsed.info.ttft_slo_s)
        return self._fleet.pause.waited_s(active.moved_at, now) > timeout_s

    def _makes_nothing(self, active: ActiveRequest, now: float) -> bool:
        waited_s = self._fleet.pause.waited_s(active.last_output_at, now)
        if waited_s <= STALL_TIMEOUT_S or active.state is State.DECODING or active.decode is None:
            return waited_s > STALL_TIMEOUT_S
        tokens = active.parsed.info.prompt_tokens + active.decode.ahead_tokens
        return waited_s > STALLED_PREFILLS * self._learning.predictor.prefill_s(tokens)

    def _kv_is_late(self, active: ActiveRequest, now: float, longest: Mapping[str | None, int]) -> bool:
        """Whether KV should have arrived. False while the decode worker may lack memory for the request: blocks are
        free also while a longer prompt before it waits for more of them."""
        view = self._fleet.workers.get(active.decode_worker or "")
        if active.prefill is None or active.prefill.ended_at is None or view is None or view.load is None:
            return False
        tokens = active.parsed.info.prompt_tokens
        has_room = view.load.running < view.info.max_num_seqs
        free_tokens = view.load.blocks_free * view.info.identity.block_size
        has_room = has_room and free_tokens >= longest[active.decode_worker]
        waited_s = self._fleet.pause.waited_s(active.prefill.ended_at, now)
        return has_room and waited_s > max(LATE_KV_S, self._learning.predictor.prefill_s(tokens))
