"""The prefill claim loop: takes jobs from the shared queue while the engine has token budget, and answers for them.

A claim is a lease, renewed until its prefill has ended. Frontends hear of a claim before it is computed, so that the
decode side reserves memory meanwhile. Not responsible for whether this worker should prefill at all.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

from orchestrator.config.settings import QueueConfig
from orchestrator.policy.claims import choose_claims, claim_budget
from orchestrator.store.client import RedisAway
from orchestrator.store.queue import Claim, PrefillQueue
from orchestrator.types import FinishReason, KVEndpoint, KVSource, PrefillJob, engine_key
from orchestrator.wire.messages import Claimed, MessageError, Prefilled, PrefillFailed, unpack_frames
from workers.attempts import Attempts, Held
from workers.engine import Engine, EngineInfo, EngineOutput, EngineRequest, Phase
from workers.loads import LoadReporter
from workers.serving import Serving

log = logging.getLogger("pd.claims")

WAIT_S = 0.5  # for work, before looking again
LEFT_WAIT_S = 0.2  # the same, where jobs were left: to workers that have their prefixes cached, or until they fit
MEMORY_WAIT_S = 0.05  # for KV blocks to come free
GREETING_TIMEOUT_S = 1.0  # for a frontend that has not said hello to this worker yet
AWAY_PAUSE_S = 0.25
_ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)


class ClaimLoop:
    """Owns the claims of this worker, from the queue to their acknowledgement."""

    def __init__(
        self,
        worker_id: str,
        info: EngineInfo,
        queue: PrefillQueue,
        queue_config: QueueConfig,
        claim_batches: float,
        engine: Engine,
        attempts: Attempts,
        load: LoadReporter,
        serving: Serving,
        active: Callable[[], bool],
    ) -> None:
        """`active`: whether this worker may claim now."""
        self._worker_id, self._info, self._queue = worker_id, info, queue
        self._lease_s, self._claim_batches = queue_config.lease_s, claim_batches
        self._window, self._prior_s_per_token = queue_config.affinity_window, queue_config.seconds_per_token
        self._engine, self._attempts, self._load, self._serving = engine, attempts, load, serving
        self._active = active
        self._unacked: dict[str, int] = {}  # request id -> attempt that ended while Redis was away
        self._tasks: set[asyncio.Task[None]] = set()
        self._claiming = False
        self._left = False  # jobs were seen, and left in the queue
        self.endpoint: KVEndpoint = info.kv

    @property
    def settled(self) -> bool:
        """No claim is being made, and none ended whose end Redis could still be told."""
        return not self._claiming and not self._tasks

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._claim_forever(), name="claim")
            tasks.create_task(self._renew_forever(), name="renew")
            tasks.create_task(self._sweep_forever(), name="sweep")

    # ---- claiming ----------------------------------------------------------------------------------------------

    def _budget(self) -> int:
        free_tokens = self._load.engine.blocks_free * self._info.identity.block_size
        return claim_budget(
            self._claim_batches,
            self._info.max_num_batched_tokens,
            self._attempts.claimed_tokens,
            len(self._attempts),
            free_tokens,
        )

    async def _claim_forever(self) -> None:
        claim_lost = False
        while True:
            budget, room = self._budget(), self._info.max_num_seqs - self._attempts.claims
            if not self._active() or budget <= 0 or room <= 0:
                await self._wait_for_room(MEMORY_WAIT_S if self._active() else WAIT_S)
                continue
            self._claiming = True
            try:
                if claim_lost and not self._tasks:
                    await self._return_unknown()
                    claim_lost = False
                claims, self._left = await self._claim(budget, room)
                for claim in claims:
                    self._take(claim)
            except RedisAway as error:
                log.debug("claims pause: %s", error)
                claim_lost = True  # Redis may have granted what we never heard of
                await asyncio.sleep(AWAY_PAUSE_S)
                continue
            finally:
                self._claiming = False
            if self._left:
                await self._queue.wait_for_work(LEFT_WAIT_S, "left")
            elif not claims:
                await self._queue.wait_for_work(WAIT_S, "busy" if len(self._attempts) else "idle")

    async def _claim(self, budget: int, room: int) -> tuple[list[Claim], bool]:
        """Claims, and whether all that was seen was left where it is. Raises RedisAway."""
        idle = len(self._attempts) == 0
        claims, window = await self._queue.claim(self._worker_id, budget, room, self._window, idle)
        if not window:
            # Without a window a head that does not fit looks like an empty queue: asking again at once would not end.
            return claims, not claims and not idle and self._window == 0
        rate = self._load.rate.tokens_per_s
        s_per_token = 1 / rate if rate else self._prior_s_per_token
        chosen = choose_claims(window, budget, idle, s_per_token)[:room]
        # Another may have been quicker: then those that are left are looked at afresh.
        return await self._queue.claim_chosen(self._worker_id, chosen, idle), not chosen

    async def _return_unknown(self) -> None:
        """Raises RedisAway. Without it such a job would wait for its lease to run out."""
        known = [held.request_id for held in self._attempts.claimed()]
        for request_id in await self._queue.release_unknown(self._worker_id, [*known, *self._unacked]):
            log.info("gave %s back: its claim was answered while Redis could not be heard", request_id)

    def wake(self) -> None:
        """Something changed that may allow claiming."""
        self._attempts.changed.set()

    def progressed(self) -> None:
        """Some of what was claimed is computed, or given up: there is more room."""
        self._attempts.changed.set()
        if self._left or not len(self._attempts):
            self._queue.wake()  # what was left may fit now; once idle, what is others' is this worker's too

    async def _wait_for_room(self, timeout_s: float) -> None:
        self._attempts.changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._attempts.changed.wait()
        except TimeoutError:
            return

    def _take(self, claim: Claim) -> None:
        job = claim.job
        # A second delivery is another attempt to the engine, which must not meet the first one's KV.
        key = engine_key(job.request_id, job.attempt) + (f"@{job.deliveries}" if job.deliveries > 1 else "")
        if self._unacked.get(job.request_id) == job.attempt:
            self._start(self._ack(job.request_id, job.attempt))
            return
        older = self._attempts.find(Phase.PREFILL, job.request_id)
        if older is not None and older.attempt == job.attempt:
            older.leased = True  # the lease had run out while Redis was away; what computes goes on
            return
        held = Held(
            key,
            job.request_id,
            job.attempt,
            job.reply_to,
            Phase.PREFILL,
            job.tokens_at(self._worker_id),
            time.monotonic(),
            leased=True,
        )
        if not self._active() or self._attempts.get(key) is not None:
            self._start(self._release(held))
            return
        self._attempts.add(held)
        self._load.held()
        self._start(self._prefill(held, job, claim.queued_s, older))

    async def _prefill(self, held: Held, job: PrefillJob, queued_s: float, older: Held | None) -> None:
        if older is not None:  # an earlier attempt that nobody waits for any more
            self._attempts.remove(older)
            await self._engine.abort([older.key])
        try:
            frames = unpack_frames(job.body)
        except MessageError as error:
            await self._fail(held, f"invalid: {error}")
            return
        claimed = Claimed(held.request_id, held.attempt, self._worker_id, KVSource(self.endpoint, held.key), queued_s)
        # Told before it is computed: the decode side reserves its blocks meanwhile.
        while not self._serving.send(held.frontend_id, claimed):
            if not await self._serving.greeted(held.frontend_id, GREETING_TIMEOUT_S):
                log.warning("released %s: frontend %s is not connected", held.key, held.frontend_id)
                self._attempts.remove(held)
                await self._release(held)
                return
            if not self._attempts.holds(held):
                return  # given back meanwhile
        if not self._attempts.holds(held):
            return  # aborted meanwhile
        held.since = time.monotonic()
        why = await self._serving.start(held, EngineRequest(held.key, Phase.PREFILL, frames), job.tokens)
        if why is not None:
            await self._fail(held, why)
        elif not self._attempts.holds(held):
            await self._engine.abort([held.key])

    # ---- ends --------------------------------------------------------------------------------------------------

    def finished(self, held: Held, output: EngineOutput, timestamp: float) -> None:
        """The engine computed it, or gave it up; it is not in the attempts any more. `timestamp`: its step's."""
        payload: list[bytes] = []
        if output.finish_reason in _ENDED_WELL:
            self._attempts.note_pushing(held)
            stats = getattr(output, "prefill_stats", None)
            output.request_id = held.request_id
            payload = self._engine.encode_outputs([output], timestamp)
            now = time.monotonic()
            message: Prefilled | PrefillFailed = Prefilled(
                held.request_id,
                held.attempt,
                self._worker_id,
                prefill_s=now - held.since,
                cached_tokens=stats.num_cached_tokens if stats is not None else 0,
                sent_at=now,
            )
        else:
            why = f"the engine ended it: {output.finish_reason!s}"
            log.warning("prefill of %s failed: %s", held.key, why)
            message = PrefillFailed(held.request_id, held.attempt, self._worker_id, why)
        self._serving.send(held.frontend_id, message, payload)
        self._start(self._ack(held.request_id, held.attempt))

    def aborted(self, held: Held) -> None:
        """Its frontend does not want it any more; it is not in the attempts any more."""
        self._start(self._ack(held.request_id, held.attempt))

    async def _fail(self, held: Held, why: str) -> None:
        if not self._attempts.holds(held):
            return
        log.warning("prefill of %s failed: %s", held.key, why)
        self._attempts.remove(held)
        self._serving.send(held.frontend_id, PrefillFailed(held.request_id, held.attempt, self._worker_id, why))
        await self._ack(held.request_id, held.attempt)

    async def give_back(self, why: str) -> None:
        """End every claim that is not prefilled yet; their frontends prefill elsewhere."""
        held = self._attempts.claimed()
        for each in held:
            await self._fail(each, why)
        await self._engine.abort([each.key for each in held if each.submitted])

    async def _ack(self, request_id: str, attempt: int) -> None:
        try:
            await self._queue.ack(self._worker_id, request_id, attempt)
            if self._unacked.get(request_id) == attempt:
                del self._unacked[request_id]
        except RedisAway as error:
            log.debug("acknowledged later: %s", error)
            self._unacked[request_id] = attempt

    async def _release(self, held: Held) -> None:
        try:
            await self._queue.release(self._worker_id, held.request_id, held.attempt)
        except RedisAway as error:
            log.debug("its lease will return %s: %s", held.key, error)

    # ---- leases ------------------------------------------------------------------------------------------------

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._renew()
            except RedisAway as error:
                log.debug("leases not renewed: %s", error)

    async def _renew(self) -> None:
        for request_id, attempt in list(self._unacked.items()):
            await self._ack(request_id, attempt)
        leased = {held.request_id: held for held in self._attempts.claimed() if held.leased}
        for request_id in await self._queue.renew(self._worker_id, list(leased)):
            held = leased[request_id]
            if not self._attempts.holds(held):
                continue
            # Cancelled, taken over, or lost with Redis's data. Its frontend knows which, and aborts a claim that it
            # does not want; computing on keeps a running request alive through a Redis that came back empty.
            held.leased = False
            source = KVSource(self.endpoint, held.key)
            if not self._serving.send(
                held.frontend_id, Claimed(held.request_id, held.attempt, self._worker_id, source, 0.0)
            ):
                self._attempts.remove(held)
                await self._engine.abort([held.key])

    async def _sweep_forever(self) -> None:
        while True:
            # Everybody sweeps: jitter spreads it.
            await asyncio.sleep(self._lease_s / 2 * random.uniform(0.75, 1.25))
            try:
                await self._sweep()
            except RedisAway as error:
                log.debug("no sweep: %s", error)

    async def _sweep(self) -> None:
        """Raises RedisAway."""
        for request_id, attempt, reply_to in (await self._queue.sweep()).failed:
            log.error("prefill job %s failed: its claims died too often", request_id)
            failed = PrefillFailed(request_id, attempt, self._worker_id, "its claims died too often")
            self._serving.send(reply_to, failed)

    async def peer_died(self, worker_id: str) -> None:
        """Claims that it told nobody of need not wait for their leases to run out."""
        try:
            if self._active() and await self._queue.expire_leases(worker_id):
                await self._sweep()  # by whoever was first to end them
        except RedisAway as error:
            log.debug("the leases of %s will run out: %s", worker_id, error)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.progressed()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a claim ended with an error: %s: %s", type(error).__name__, error)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._queue.aclose()
