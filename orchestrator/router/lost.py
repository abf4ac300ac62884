"""What requests lose: a worker, its engine, a connection, the queue, or the time that their state may last. Each gets
another attempt, as does one in the queue that would be served sooner elsewhere, or from where nobody claims it.

Waiting costs the client time, and another attempt costs the fleet work, so a request that may only be slow keeps its
attempt.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Mapping

from orchestrator.config.settings import Config
from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.view import Fleet
from orchestrator.policy.placement import claim_timeout_s
from orchestrator.policy.policies import RECALL_S
from orchestrator.router.decider import Decider
from orchestrator.router.dispatch import Dispatch
from orchestrator.router.learning import Learning
from orchestrator.router.request import ActiveRequest, ActiveRequests, Failure, State
from orchestrator.types import JobState
from orchestrator.wire.messages import EngineCrashed

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


class Lost:
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

    # ---- deadlines ---------------------------------------------------------------------------------------------

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
            self._leave_queue("no_prefill_worker")

    def check_suspects(self, now: float) -> None:
        """Release the next suspect when a trial takes too long, and fail those that have waited too long for one."""
        if self._dispatch.quarantine.overdue(now):
            self._dispatch.release_suspects()
        why = "it may have crashed an engine, and no worker could try it alone within its deadline"
        for active in self._dispatch.quarantine.expired(now, self._routing.placement_timeout_s):
            with self._dispatch.guarding(active):
                self._dispatch.fail(active, Failure.of_fleet(why))

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

    # ---- workers -----------------------------------------------------------------------------------------------

    def worker_lost(self, *lost: str) -> None:
        """Retry the requests of workers that are gone. Those that they decoded continue on another worker; the prompts
        that they were computing, or had claimed unheard, are prefilled locally. Where one had ended, its KV may be
        there already: `check` waits a moment. Call it once for all that go together."""
        self._leave("lost", frozenset(lost), frozenset(lost))
        for worker_id in lost:
            self._learning.forget(worker_id)

    def worker_quiet(self, *quiet: str) -> None:
        """Move requests away from workers that are slow, stopped or cut off: of all that become so together."""
        self._leave("quiet", frozenset(quiet), frozenset(filter(self._fleet.has_other_decode_worker, quiet)))

    def _leave(self, how: str, away: frozenset[str], decoding: frozenset[str]) -> None:
        lost = how == "lost"
        for active in self._requests.of(*away):
            with self._dispatch.guarding(active):
                prefills = active.computing_worker if lost else active.prefill_worker
                if active.decode_worker in decoding:
                    self._dispatch.retry(active, f"decode_worker_{how}", avoid=active.decode_worker, charge=lost)
                elif active.state is State.TRANSFERRING and prefills in away:
                    self._dispatch.retry(active, f"prefill_worker_{how}", charge=False)
        self._dispatch.background(self._leave_claimers(away, f"prefill_worker_{how}"))
        self.check_claimers()

    async def _leave_claimers(self, worker_ids: Collection[str], why: str) -> None:
        """Retry requests whose jobs these silent workers have claimed, and have not said so."""
        queued = {active.id: active.attempt for active in self._requests.all() if active.state is State.QUEUED}
        claims = await asyncio.gather(*map(self._queue.claims_of, worker_ids)) if queued else []
        for request_id in queued.keys() & itertools.chain(*claims):
            active = self._requests.current(request_id, queued[request_id])
            if active is not None and active.state is State.QUEUED:
                with self._dispatch.guarding(active):
                    self._dispatch.retry(active, why, charge=False)

    def engine_crashed(self, there: str, crash: EngineCrashed) -> None:
        """Retry the requests of the worker `there`. Those that may have caused the crash go to quarantine. The attempt
        of the others counts only where another rank is blamed, which may be wrong: none goes on without end."""
        if (view := self._fleet.workers.get(there)) is not None:
            view.disconnect(time.monotonic())  # the worker leaves, whatever its last report says
        victims = [one for one in self._requests.of(there) if there in (one.decode_worker, one.computing_worker)]
        dispatch, quarantine = self._dispatch, self._dispatch.quarantine
        guilty = quarantine.crashed(victims, crash)
        for active in victims:
            with dispatch.guarding(active):
                suspected = crash.suspect is None and quarantine.suspects(active, there)
                if active in guilty:
                    dispatch.withdraw(active)
                    said = f"it crashed {active.crashes} engines, the last on {there}: {crash.why}"
                    dispatch.fail(active, Failure(said))
                elif suspected:
                    dispatch.give_up(active, "engine_crashed")
                    active.avoid_worker(there)  # has no effect if that worker prefilled
                    active.next_attempt("engine_crashed")
                    quarantine.add(active)
                else:
                    dispatch.retry(active, "engine_crashed", there, charge=crash.suspect == "", said=crash.why)
        dispatch.release_suspects()

    def connection_reset(self, worker_id: str) -> None:
        """A worker's connection was made again: requests or tokens may be lost with the old one."""
        self._retry_decoding(worker_id, "connection_reset", charge=False)

    def outputs_lost(self, worker_id: str) -> None:
        """A message of a worker is lost, and whose tokens it had is unknown."""
        self._retry_decoding(worker_id, "corrupt_outputs", avoid=worker_id)

    def _retry_decoding(self, worker_id: str, why: str, charge: bool = True, avoid: str | None = None) -> None:
        """Retry all requests that a worker decodes: an answer must not have a gap."""
        for active in self._requests.of(worker_id):
            with self._dispatch.guarding(active):
                if active.decode_worker == worker_id:
                    self._dispatch.retry(active, why, avoid=avoid, charge=charge)

    # ---- the queue ---------------------------------------------------------------------------------------------

    def queue_lost(self) -> None:
        """Take all requests out of the queue: while Redis is away no worker can claim their jobs."""
        self._leave_queue("queue_unavailable")

    def _leave_queue(self, why: str) -> None:
        """Place all queued requests elsewhere: in the queue they would wait until their claim deadline."""
        for active in self._requests.all():
            with self._dispatch.guarding(active):
                if active.state is State.QUEUED:
                    self._dispatch.retry(active, why)

    def job_failed(self, request_id: str, attempt: int) -> None:
        """The queue gave this job up, because too many workers that had claimed it died."""
        active = self._requests.current(request_id, attempt)
        if active is not None and active.state is State.QUEUED:
            with self._dispatch.guarding(active):
                self._dispatch.retry(active, "prefill_failed")
