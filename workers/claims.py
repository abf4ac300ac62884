"""The claim loop: claims jobs from the shared queue while the engine has token budget, and renews their leases.

A claim is a lease, renewed until its prefill has ended. `prefills` runs a claimed job; `lifecycle` decides whether this
worker prefills at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

from orchestrator.config.settings import Config
from orchestrator.policy.claims import (
    AFFINITY_WINDOW,
    BROUGHT_BY,
    CLAIM_BATCHES,
    choose_claims,
    claim_budget,
    claim_limits,
    claims_as,
    most_claimed,
    takes_any_size,
)
from orchestrator.policy.predict.estimates import LatestObjective
from orchestrator.process.tasks import left_s, until_told
from orchestrator.store.client import RedisAway
from orchestrator.store.queue import Claim
from orchestrator.types import Claimer
from workers.prefills import Parts, Prefills

log = logging.getLogger("pd.claims")

WAIT_S = 0.5  # wait for work before asking again
LEFT_WAIT_S = 0.2  # the same, after jobs were left in the queue: for workers with their prefix, or until they fit
MEMORY_WAIT_S = 0.05  # wait for free KV blocks
AWAY_PAUSE_S = 0.25


class ClaimLoop:
    """Claims jobs for this worker, renews its leases, and takes part in the sweep of expired leases."""

    def __init__(self, parts: Parts, prefills: Prefills, config: Config, active: Callable[[], bool]) -> None:
        """`active`: whether this worker may claim now."""
        self._info, _, self._queue, self._frontends, self._attempts, self._load = parts
        self._prefills, self._active, self._lease_s, self._slo = prefills, active, config.workers.lease_s, config.slo
        self._latest = LatestObjective(config.slo.ttft_s, BROUGHT_BY)
        self._room = asyncio.Event()  # set when there may be more room
        self._claiming = False
        self._left = False  # the last claim saw jobs and left them in the queue

    @property
    def busy(self) -> bool:
        """Whether a claim is being made."""
        return self._claiming

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._claim_forever(), name="claim")
            tasks.create_task(self._watch_room(), name="room")
            tasks.create_task(self._renew_forever(), name="renew")
            tasks.create_task(self._sweep_forever(), name="sweep")

    # ---- claiming ----------------------------------------------------------------------------------------------

    @property
    def _free_tokens(self) -> int:
        return self._load.engine.blocks_free * self._info.identity.block_size

    @property
    def _claimer(self) -> Claimer:
        held, claimed, batch = len(self._attempts), self._attempts.claimed_tokens, self._info.max_num_batched_tokens
        return claims_as(held, claimed, batch, self._free_tokens, self._info.lockstep)

    def _limits(self) -> tuple[int, int]:
        """Prompt tokens, and jobs, that may be claimed now."""
        batch, claimed = self._info.max_num_batched_tokens, self._attempts.claimed_tokens
        # Ranks in lockstep share the work of each step, so that a claimed job waits for no other.
        lockstep, s_per_token = self._info.lockstep, self._prefills.fetches.s_per_token
        decodes = self._attempts.decode_count > 0
        most = CLAIM_BATCHES * batch
        if not lockstep:
            most = most_claimed(batch, self._slo, self._latest.seconds, s_per_token, decodes)
        idle, jobs = self._claimer != "busy", self._info.max_num_seqs - len(self._attempts)
        budget = claim_budget(most, claimed, idle, self._free_tokens)
        return claim_limits(self._attempts.prefill_count, budget, idle, self._free_tokens, jobs)

    async def _claim_forever(self) -> None:
        while True:
            budget, jobs = self._limits()
            if not self._active() or budget <= 0 or jobs <= 0:
                with contextlib.suppress(RedisAway):
                    await self._queue.leave()
                await until_told(self._room, MEMORY_WAIT_S if self._active() else left_s(WAIT_S))
                continue
            self._claiming = True
            try:
                claims, self._left = await self._claim(budget, jobs)
                for claim in claims:
                    self._latest.came(claim.job.ttft_s)
                    self._prefills.begin(claim)
            except RedisAway as error:
                log.debug("claims pause: %s", error)
                await asyncio.sleep(AWAY_PAUSE_S)
                continue
            finally:
                self._claiming = False
            if self._left:
                await self._queue.wait_for_work(LEFT_WAIT_S, self._claimer, left=True)
            elif self._queue.waits or not claims:
                await self._queue.wait_for_work(left_s(WAIT_S), self._claimer)

    async def _claim(self, budget: int, jobs: int) -> tuple[list[Claim], bool]:
        """The new claims, and whether jobs were seen and all of them left in the queue. Raises RedisAway."""
        claimer, self._queue.away = self._claimer, self._frontends.away(time.monotonic())
        if self._info.lockstep:
            s_per_token = self._prefills.fetches.s_per_token
            self._queue.done_s = (self._attempts.claimed_tokens * s_per_token, s_per_token)
        claims, window = await self._queue.claim(self._info.id, budget, jobs, AFFINITY_WINDOW, claimer, WAIT_S)
        idle = takes_any_size(claimer, self._queue.share_tokens is not None)
        if not window:
            # Jobs that do not fit, or are left to other workers, look like an empty queue. Asking again at once would
            # make a busy loop.
            return claims, not claims and (not idle or bool(self._queue.away)) and not self._queue.waits
        s_per_token = self._prefills.fetches.s_per_token
        chosen = choose_claims(window, budget, idle, s_per_token, share_tokens=self._queue.share_tokens)[:jobs]
        # Another worker may have claimed some of them meanwhile.
        return await self._queue.claim_chosen(self._info.id, chosen, idle and bool(chosen)), not chosen

    def wake(self) -> None:
        """Check again whether jobs can be claimed: the role or the free memory has changed."""
        self._room.set()
        if not self._active():
            self._queue.wake()  # it waits for no job

    async def _watch_room(self) -> None:
        """Ask the queue again when there is more room: a job that was left may fit now."""
        while True:
            await self._attempts.room.wait()
            self._attempts.room.clear()
            self._room.set()
            if self._left or not self._attempts.prefill_count or (self._info.lockstep and self._claimer == "idle"):
                self._queue.wake()

    # ---- leases ------------------------------------------------------------------------------------------------

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._renew()
            except RedisAway as error:
                log.debug("leases not renewed: %s", error)

    async def _renew(self) -> None:
        await self._prefills.acknowledge_again()
        leased = {attempt.request_id: attempt for attempt in self._attempts.prefills() if attempt.leased}
        for request_id in await self._queue.renew(self._info.id, list(leased)):
            await self._prefills.lease_lost(leased[request_id])

    async def _sweep_forever(self) -> None:
        while True:
            # All prefill workers sweep; the jitter spreads them.
            await asyncio.sleep(self._lease_s / 2 * random.uniform(0.75, 1.25))
            try:
                await self._sweep()
            except RedisAway as error:
                log.debug("no sweep: %s", error)

    async def _sweep(self) -> None:
        """Raises RedisAway."""
        for request_id, number, reply_to in (await self._queue.sweep()).failed:
            self._prefills.give_job_up(request_id, number, reply_to)

    async def peer_died(self, worker_id: str) -> None:
        """Expire the leases of a dead worker, so that claims unknown to frontends need not wait for them."""
        try:
            if self._active() and await self._queue.expire_leases(worker_id):
                await self._sweep()  # only by the worker that expired them
        except RedisAway as error:
            log.debug("the leases of %s will run out: %s", worker_id, error)
