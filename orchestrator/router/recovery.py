"""Retries: a request whose attempt failed gets another attempt on another worker, or fails.

A retry waits for room on a worker, since the request was accepted already. With `routing.fallback: refuse` it is
refused all the same where only a local prefill is left and the client has no token.
"""

from __future__ import annotations

import asyncio
import logging
import time

from orchestrator.config.settings import RoutingConfig
from orchestrator.config.values import strict_label
from orchestrator.fleet.view import Fleet
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.router.active_requests import ActiveRequests
from orchestrator.router.dispatch import Dispatch
from orchestrator.router.quarantine import Quarantine
from orchestrator.router.request import ActiveRequest, Failure, State
from orchestrator.types import Role
from orchestrator.wire.messages import EngineCrashed

log = logging.getLogger("pd.router")

MAX_ATTEMPTS = 4  # after which a request fails
SOUND_TOKENS = 1024  # an attempt that has made so many was none of a request that fails everywhere
LEAVING_S = 0.1  # pause before a worker that gave the same request back twice is asked again


class Recovery:
    def __init__(
        self,
        routing: RoutingConfig,
        fleet: Fleet,
        requests: ActiveRequests,
        dispatch: Dispatch,
        metrics: Metrics,
    ) -> None:
        self._routing, self._fleet, self._requests = routing, fleet, requests
        self._dispatch, self._metrics = dispatch, metrics
        self._quarantine = Quarantine()

    def retry(
        self, active: ActiveRequest, why: str, avoid: str | None = None, charge: bool = True, said: str = ""
    ) -> None:
        """Give the current attempt up and start the next, which prefills locally (`routing.fallback`).

        `avoid`: a decode worker not to use again. `charge`: the failure counts against `MAX_ATTEMPTS`; so does
        that of any remote prefill where the next attempt may be remote too.
        `said`: the worker's own words, for the client should this have been the last attempt.
        """
        remote = active.state in (State.QUEUED, State.TRANSFERRING) and self._routing.fallback == "refuse"
        if active.ended or not self._give_up(active, why):
            return
        if len(active.answer.tokens) - active.resumed >= SOUND_TOKENS:
            active.charged = 0
        active.charged += charge or remote
        if active.charged >= MAX_ATTEMPTS:
            last = f"; the last: {said}" if said else ""
            self._fail(active, f"{active.attempt} attempts failed: {', '.join(active.retries)}{last}")
            return
        again = avoid in active.avoid
        if avoid is not None:
            active.avoid_worker(avoid)
        active.next_attempt(why)
        # A leaving worker is chosen twice only if there is no other one and its new state is not known here yet.
        self._dispatch.background(self._place_again(active, LEAVING_S if again and not charge else 0.0))

    def unbound(self, active: ActiveRequest) -> None:
        """No decode worker can get the KV from the prefill worker that has claimed its job."""
        if strict_label(self._routing.pairing):
            self.retry(active, "no_paired_worker")
        else:
            self.retry(active, "no_decode_worker")

    def diverged(self, active: ActiveRequest) -> None:
        """The engines sampled different first tokens: continue after the one that the client has, if possible on the
        same decode worker, where the prompt is cached. `MAX_ATTEMPTS` does not apply, since nothing failed."""
        worker_id, placed = active.decode_worker, active.placed
        if not self._give_up(active, "first_token_mismatch"):
            return
        active.next_attempt("first_token_mismatch")
        if worker_id in self._fleet.workers and self._dispatch.send(active, worker_id, State.LOCAL):
            active.placed = placed
            return
        self._dispatch.background(self._place_again(active))

    def leave_queue(self, why: str) -> None:
        """Place all queued requests elsewhere: in the queue they would wait until their claim deadline."""
        for active in self._requests.all():
            if active.state is State.QUEUED:
                self.retry(active, why)

    def fail_withdrawn(self, active: ActiveRequest, failure: Failure) -> None:
        """Fail a request that no worker can answer: withdraw it from all workers and tell the client."""
        self._dispatch.withdraw(active)
        self._end_as(active, failure)

    def fail_defective(self, active: ActiveRequest | None, request_id: str) -> None:
        """Fail a request one of whose outputs could not be taken: its answer would have a gap. Call it in the handling
        of that exception."""
        self._metrics.dropped.labels("error").inc()
        log.exception("could not take an output of request %s", request_id)
        if active is not None and not active.ended:
            self.fail_withdrawn(active, Failure("an output of it met a defect"))

    # ---- engines that crash ------------------------------------------------------------------------------------

    def engine_crashed(self, there: str, crash: EngineCrashed) -> None:
        """Retry the requests of the worker `there`. Those that may have caused the crash go to quarantine; the attempt
        of the others does not count against `MAX_ATTEMPTS`."""
        if (view := self._fleet.workers.get(there)) is not None:
            view.disconnect(time.monotonic())  # the worker leaves, whatever its last report says
        victims = [
            active for active in self._requests.of(there) if there in (active.decode_worker, active.computing_worker)
        ]
        guilty = self._quarantine.crashed(victims, crash)
        for active in victims:
            suspected = crash.suspect is None and self._quarantine.suspects(active, there)
            if active in guilty:
                said = f"it crashed {active.crashes} engines, the last on {there}: {crash.why}"
                self.fail_withdrawn(active, Failure(said))
            elif self._give_up(active, "engine_crashed"):
                active.avoid_worker(there)  # has no effect if that worker prefilled
                active.next_attempt("engine_crashed")
                if suspected:
                    self._quarantine.add(active)
                else:
                    self._dispatch.background(self._place_again(active))
        self._release_next()

    def clear_suspect(self, active: ActiveRequest) -> None:
        """The request has produced a token or has ended, so it does not crash its engine."""
        if active.crashes and self._quarantine.cleared(active):
            self._release_next()

    def check(self, now: float) -> None:
        """Release the next suspect when a trial takes too long, and fail those that have waited too long for one."""
        if self._quarantine.overdue(now):
            self._release_next()
        for active in self._quarantine.expired(now, self._routing.placement_timeout_s):
            self._fail(active, "it may have crashed an engine, and no worker could try it alone within its deadline")

    def _release_next(self) -> None:
        for active in self._quarantine.release(self._fleet.ready(Role.DECODE)):
            self._dispatch.background(self._place_again(active))

    # ---- shared ------------------------------------------------------------------------------------------------

    def _give_up(self, active: ActiveRequest, why: str) -> bool:
        """End the current attempt. False if the request fails with it, because the client has part of an answer that
        no other worker can continue."""
        self._metrics.retries.labels(why).inc()
        active.retries.append(why)
        self._dispatch.withdraw(active)
        if active.answer.tokens and not active.parsed.resumable:
            self._fail(active, f"its worker was lost ({why}) and its output cannot be continued elsewhere")
            return False
        return True

    async def _place_again(self, active: ActiveRequest, after_s: float = 0.0) -> None:
        try:
            if after_s:
                await asyncio.sleep(after_s)
                if active.ended:
                    return
            rejected = await self._dispatch.place(active, wait_for_room=True)
            if rejected is not None and rejected.no_fallback:
                self._requests.refuse(active, rejected)
                self.clear_suspect(active)
            elif rejected is not None:
                self._fail(active, f"no decode worker took it over within its deadline ({rejected.reason})")
        except Exception:
            log.exception("request %s could not be placed again", active.parsed.label)
            if not active.ended:  # nothing else would ever end it
                self._fail(active, "placing it again met a defect")

    def _fail(self, active: ActiveRequest, why: str) -> None:
        self._end_as(active, Failure(why))

    def _end_as(self, active: ActiveRequest, failure: Failure) -> None:
        self._requests.fail(active, failure)
        self.clear_suspect(active)
