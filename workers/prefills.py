"""The prefills of a worker, from the claim of a job to its acknowledgement.

A frontend is told of a claim before the prompt is computed, so that the decode worker can reserve memory meanwhile.
`claims` chooses the jobs and keeps their leases.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from orchestrator.policy.decode_choice import could_gain, wait_limit_s
from orchestrator.policy.predict.estimates import LatePairs
from orchestrator.policy.predict.predictor import PRIOR_S_PER_TOKEN
from orchestrator.process.tasks import cancelled
from orchestrator.store.client import RedisAway
from orchestrator.store.queue import Claim, PrefillQueue
from orchestrator.types import FinishReason, KVSource, PrefillJob, WorkerInfo
from orchestrator.wire.messages import (
    Claimed,
    MessageError,
    Prefilled,
    PrefillFailed,
    Prefix,
    engine_key,
    unpack_frames,
)
from workers.attempts import Attempt, Attempts
from workers.engine import Engine, EngineOutput, EngineRequest, Phase, submit
from workers.load.reports import LoadReporter
from workers.peers import Frontends

log = logging.getLogger("pd.prefills")

GREETING_TIMEOUT_S = 1.0  # how long to wait for the `Hello` of a frontend
ANSWER_TIMEOUT_S = 0.25  # of a frontend that was asked which worker has a prefix
_HERE, LATE_FETCHES = "", 5  # this worker, in pairs with engines that lend; so many late ones in a row are no chance
_ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)


class Parts(NamedTuple):
    """What all that a worker does shares."""

    info: WorkerInfo
    engine: Engine
    queue: PrefillQueue
    frontends: Frontends
    attempts: Attempts
    load: LoadReporter


class Fetches:
    """Prefixes fetched from other workers' caches, before the prompts that begin with them are computed here.

    A prefix is received as the prompt of an engine request of its own, which leaves it in the prefix cache. However
    that ends, and at the latest after a bound, the request that needs it is computed, and what has not come with it.
    Nobody waits for an engine from which nothing has come in time again and again, as through a firewall.
    """

    def __init__(self, engine: Engine, load: LoadReporter, attempts: Attempts) -> None:
        self._engine, self._load, self._attempts, self.late = engine, load, attempts, LatePairs(LATE_FETCHES)
        self._asked: dict[str, asyncio.Future[Prefix | None]] = {}  # engine key of a prefill -> a frontend's answer
        self._coming: dict[str, asyncio.Future[EngineOutput]] = {}  # key of a fetch -> its only output
        # `late` has this worker first in each pair, so that it names the holders that rest: frontends then ask none of
        # them to lend.
        load.rests_from = lambda: self.late.resting(_HERE, time.monotonic())

    @property
    def s_per_token(self) -> float:
        """Of computing a prompt here."""
        rate = self._load.rate.tokens_per_s
        return 1 / rate if rate else PRIOR_S_PER_TOKEN

    # ---- which worker has it -----------------------------------------------------------------------------------

    def answer(self, key: str, prefix: Prefix | None) -> None:
        if (asked := self._asked.get(key)) is not None and not asked.done():
            asked.set_result(prefix)

    async def answered(self, key: str) -> Prefix | None:
        """What to fetch for the prefill of this key; None for nothing, also if no answer comes. Call it right after a
        frontend was asked."""
        asked = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await asked
        except TimeoutError:
            return None
        finally:
            del self._asked[key]

    # ---- the fetch ---------------------------------------------------------------------------------------------

    async def fetch(self, prefix: Prefix, frames: list[bytes]) -> None:
        """Returns when it is cached here, or will not be. `frames`: the request that needs it. Raises EngineDead."""
        key, tokens, holder = prefix.source.key, prefix.tokens, prefix.source.endpoint.engine_id
        if holder in self.late.resting(_HERE, now := time.monotonic()):  # its frontend had not heard of it yet
            self._load.fetched("late", 0)
            return
        self.late.tried(_HERE, holder, now)
        request = EngineRequest(key, Phase.DECODE, frames, prefix.source, prefix_tokens=tokens)
        coming = self._coming[key] = asyncio.get_running_loop().create_future()
        self._attempts.sources.add(holder)
        received, outcome = 0, "late"
        try:
            if await submit(self._engine, request) is not None:
                outcome = "refused"
                return
            async with asyncio.timeout(wait_limit_s(tokens, self.s_per_token)):
                output = await coming
            received = getattr(getattr(output, "prefill_stats", None), "num_external_cached_tokens", 0)
            outcome = "fetched" if received else "missed"
        except TimeoutError:
            log.info("gave up the prefix of %d tokens that %s fetches", tokens, key)
        finally:
            del self._coming[key]
            self._load.fetched(outcome, received)
            if outcome == "late":
                self.late.late(_HERE, holder, time.monotonic())
                await self._engine.abort([key])
            elif outcome != "refused":  # by this engine: nothing was asked of the holder
                self.late.came(_HERE, holder)

    def take(self, output: EngineOutput) -> None:
        """An output of the engine that is no attempt's."""
        coming = self._coming.get(output.request_id)
        if coming is not None and output.finish_reason is not None and not coming.done():
            coming.set_result(output)


class Prefills:
    """Owns the prefill attempts. However one ends, its frontend is told, and its job is acknowledged or released."""

    def __init__(self, parts: Parts, active: Callable[[], bool], fetch: bool) -> None:
        """`active`: whether this worker may claim now. `fetch`: whether prefixes are fetched."""
        info, self._engine, self._queue, self._frontends, self._attempts, self._load = parts
        self._worker_id, self._domain, self._endpoint, self._active = info.id, info.domain, info.kv, active
        self.fetches, self._fetch = Fetches(parts.engine, parts.load, parts.attempts), fetch
        self._unacked: dict[str, int] = {}  # request id -> attempt that ended while Redis was away
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Whether a claim is on its way to a frontend or the engine, or an end to the queue."""
        return bool(self._tasks)

    # ---- begin -------------------------------------------------------------------------------------------------

    def begin(self, claim: Claim) -> None:
        """Prefill a claimed job, or give it back if this worker may not claim any more, now or when its frontend is
        there."""
        job = claim.job
        older = self._attempts.find(Phase.PREFILL, job.request_id)
        # Its end was not told, or Redis was restored from a time before the attempt that is here now.
        if self._unacked.get(job.request_id) == job.attempt or (older is not None and older.number > job.attempt):
            self._start(self._ack(job.request_id, job.attempt))
            return
        if older is not None and older.number == job.attempt:
            older.leased = True  # its lease had expired while Redis was away; the computation goes on
            return
        attempt = Attempt(
            # A second delivery is another attempt to the engine, which must not meet the first one's KV.
            key=engine_key(job.request_id, job.attempt) + (f"@{job.deliveries}" if job.deliveries > 1 else ""),
            request_id=job.request_id,
            number=job.attempt,
            frontend_id=job.reply_to,
            phase=Phase.PREFILL,
            tokens=job.tokens_at(self._worker_id),
            since=time.monotonic(),
            leased=True,
        )
        # Redis has lost its end, and an engine ends at a key that it has.
        if self._attempts.was_prefilled(attempt.request_id, attempt.key):
            self._start(self._ack(job.request_id, job.attempt))
            return
        if not self._active() or self._attempts.get(attempt.key) is not None:
            self._start(self._release(job))
            return
        self._attempts.add(attempt)
        self._load.added()
        self._start(self._prefill(attempt, claim, older))

    async def _prefill(self, attempt: Attempt, claim: Claim, older: Attempt | None) -> None:
        job = claim.job
        if older is not None:  # an earlier attempt, which no frontend waits for
            self._attempts.remove(older)
            await self._engine.abort([older.key])
        try:
            frames = unpack_frames(job.body)
        except MessageError as error:
            await self._fail(attempt, f"invalid: {error}")
            return
        asks = self._fetch and could_gain(job.lacking_at(self._worker_id), self.fetches.s_per_token)
        cached_tokens = job.cached.get(self._worker_id, 0) if asks else None
        if not self._attempts.holds(attempt):
            return  # aborted meanwhile
        if not self._tell_claimed(attempt, claim.queued_s, cached_tokens):
            self._attempts.remove(attempt)
            await self._begin_later(claim)
            return
        attempt.since = time.monotonic()
        if asks:
            prefix = await self.fetches.answered(attempt.key)
            if prefix is not None and self._attempts.holds(attempt):
                await self.fetches.fetch(prefix, frames)
            if not self._attempts.holds(attempt):
                return
        refusal = await submit(self._engine, EngineRequest(attempt.key, Phase.PREFILL, frames))
        attempt.submitted = refusal is None
        if refusal is not None:
            await self._fail(attempt, refusal.why, refusal.final, by_engine=not refusal.late)
        elif not self._attempts.holds(attempt):
            await self._engine.abort([attempt.key])

    async def _begin_later(self, claim: Claim) -> None:
        """When its frontend is there. Meanwhile it is no attempt: it takes nothing of what this worker may claim."""
        job = claim.job
        if await self._frontends.wait_for_hello(job.reply_to, GREETING_TIMEOUT_S):
            self.begin(claim)
            return
        log.warning("released %s#%d: frontend %s is not connected", job.request_id, job.attempt, job.reply_to)
        await self._release(job)

    def _tell_claimed(self, attempt: Attempt, queued_s: float, cached_tokens: int | None = None) -> bool:
        source = KVSource(self._endpoint, attempt.key)
        claimed = Claimed(attempt.request_id, attempt.number, source, queued_s, self._domain, cached_tokens)
        return bool(self._frontends.send(attempt.frontend_id, claimed))

    # ---- end ---------------------------------------------------------------------------------------------------

    def output(self, attempt: Attempt, output: EngineOutput, timestamp: float, refused: str | None = None) -> None:
        """The engine computed the prompt, or gave it up, in the step of this `timestamp`. `refused`: why it takes no
        such request."""
        if output.finish_reason is None:
            return
        self._attempts.remove(attempt)
        if output.finish_reason in _ENDED_WELL:
            self._attempts.note_pushing(attempt)
            self._tell_prefilled(attempt, output, timestamp)
        else:
            why = f"the engine ended it: {output.finish_reason!s}" if refused is None else f"invalid: {refused}"
            self._tell_failed(attempt, why, refused is not None, output.finish_reason is FinishReason.ERROR)
        self._start(self._ack(attempt.request_id, attempt.number))

    def _tell_prefilled(self, attempt: Attempt, output: EngineOutput, timestamp: float) -> None:
        stats = getattr(output, "prefill_stats", None)
        output.request_id = attempt.request_id
        now = time.monotonic()
        prefilled = Prefilled(
            attempt.request_id,
            attempt.number,
            prefill_s=now - attempt.since,
            cached_tokens=stats.num_cached_tokens if stats is not None else 0,
            created_cache_tokens=stats.num_cache_creation_tokens if stats is not None else 0,
            sent_at=now,
            chunk_ends_s=[end - attempt.since for end in attempt.chunk_ends],
        )
        payload = self._engine.encode_outputs([output], timestamp) if output.new_token_ids else []
        self._frontends.send(attempt.frontend_id, prefilled, payload)

    def _tell_failed(self, attempt: Attempt, why: str, refused: bool, by_engine: bool) -> None:
        log.warning("prefill of %s failed: %s", attempt.key, why)
        failed = PrefillFailed(attempt.request_id, attempt.number, why, refused, by_engine)
        self._frontends.send(attempt.frontend_id, failed)

    def give_job_up(self, request_id: str, number: int, frontend_id: str) -> None:
        """Tell the frontend of a job that the sweep gave up, whichever worker had claimed it."""
        log.error("prefill job %s failed: its claims died too often", request_id)
        failed = PrefillFailed(request_id, number, "its claims died too often")
        self._frontends.send(frontend_id, failed)

    def aborted(self, attempt: Attempt) -> None:
        """The frontend aborted this attempt, which has been removed from the attempts: acknowledge its job."""
        self._start(self._ack(attempt.request_id, attempt.number))

    async def _fail(self, attempt: Attempt, why: str, refused: bool = False, by_engine: bool = False) -> None:
        if not self._attempts.holds(attempt):
            return
        self._attempts.remove(attempt)
        self._tell_failed(attempt, why, refused, by_engine)
        await self._ack(attempt.request_id, attempt.number)

    async def give_back(self, why: str) -> None:
        """End all prefills that have not been computed. Their frontends have them computed by other workers."""
        attempts = self._attempts.prefills()
        for attempt in attempts:
            await self._fail(attempt, why)
        await self._engine.abort([attempt.key for attempt in attempts if attempt.submitted])

    # ---- the job behind it -------------------------------------------------------------------------------------

    async def lease_lost(self, attempt: Attempt) -> None:
        """The job was cancelled, claimed by another worker, or lost with Redis's data.

        The frontend is told of the claim again, and aborts it if it does not want it. The computation goes on
        meanwhile, so a running request survives a Redis that comes back empty.
        """
        if not self._attempts.holds(attempt):
            return
        attempt.leased = False
        if not self._tell_claimed(attempt, 0.0):
            self._attempts.remove(attempt)
            await self._engine.abort([attempt.key])

    async def acknowledge_again(self) -> None:
        """Acknowledge the jobs that ended while Redis was away."""
        for request_id, number in list(self._unacked.items()):
            await self._ack(request_id, number)

    async def _ack(self, request_id: str, number: int) -> None:
        try:
            await self._queue.ack(self._worker_id, request_id, number)
            if self._unacked.get(request_id) == number:
                del self._unacked[request_id]
        except RedisAway as error:
            log.debug("acknowledged later: %s", error)
            self._unacked[request_id] = number

    async def _release(self, job: PrefillJob) -> None:
        try:
            await self._queue.release(self._worker_id, job.request_id, job.attempt)
        except RedisAway as error:
            log.debug("its lease will return %s: %s", job.request_id, error)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._attempts.room.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a prefill ended with an error: %s: %s", type(error).__name__, error)

    async def close(self) -> None:
        await cancelled(*self._tasks)
