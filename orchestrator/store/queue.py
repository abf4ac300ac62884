"""The prefill queue in Redis: waiting jobs in score order, claims as leases, atomic verbs (`lua/queue/`).

Claims are at-least-once: an expired lease returns the job, so results are fenced by attempt, not by claim.
Not responsible for what a job's body means, nor for when to claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from orchestrator.process.tasks import cancelled, set_whenever, until_told
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.fields import text, whole
from orchestrator.store.keys import QUEUE, Keys
from orchestrator.types import Claimer, JobState, PrefillJob, QueueDepth, WindowJob

log = logging.getLogger("pd.queue")

# A job that nobody touches for this long disappears from Redis, so a fleet that dies at once leaves nothing.
JOB_TTL_S = 3600
MAX_BODY_BYTES = 64 << 20  # Redis closes the connection of a client that sends far more, and others' calls with it
# One call holds up every other client: these bound what it looks at.
MAX_CLAIM_JOBS = 256
SWEEP_LEASES = 25
SWEEP_WAITING = 25
SWEEP_ROUNDS = 80
LEASE_S = 10.0  # for so long a claim holds unless it is renewed
MAX_JOBS = 10_000  # that may wait
MAX_DELIVERIES = 3  # a job fails when this many workers that had claimed it died
_LONG_STR_HEAD = {0xD9: 2, 0xDA: 3, 0xDB: 5}  # msgpack's str 8, 16 and 32, and the bytes before their content


class JobTooLarge(ValueError):
    """The job's body is larger than MAX_BODY_BYTES. One line with the request."""


class QueueFull(Exception):
    """As many jobs wait as may. Prefill locally, or answer 429."""


class Claim(msgspec.Struct, frozen=True):
    """A job that a worker holds until `lease_until` (unix seconds, the server's clock) or longer, if it renews."""

    job: PrefillJob
    queued_s: float  # from enqueue to claim, the server's clock
    lease_until: float


class ClaimedRow(msgspec.Struct, array_like=True):
    """A row of `take` in claim.lua. Raw: a Lua string, which need not be text."""

    request_id: msgspec.Raw
    reply_to: msgspec.Raw
    cached: msgspec.Raw
    body_bytes: int
    attempt: int
    tokens: int
    uncached_tokens: int
    deliveries: int
    arrived_at: float
    ttft_s: float


class ClaimReply(msgspec.Struct, array_like=True):
    """What both claiming verbs answer before the bodies. Times are unix seconds, the server's clock."""

    now: float
    lease_until: float
    claims: list[ClaimedRow]
    window: list[WindowJob]
    waits: bool  # the next job wakes the claimer
    share_tokens: int  # of what waits, where other workers are idle; -1 where none is


_decode_reply = msgspec.msgpack.Decoder(ClaimReply).decode


class SweepResult(msgspec.Struct, frozen=True):
    """The results of one sweep. The caller tells the frontend of each failed job."""

    returned: list[str]
    failed: list[tuple[str, int, str]]  # request id, attempt, reply_to
    orphaned: list[str]


class PrefillQueue:
    """Verbs of the queue. Every method but `wait_for_work` raises RedisAway."""

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        waiter_id: str = "",
        *,
        lease_s: float = LEASE_S,
        max_jobs: int = MAX_JOBS,
        max_deliveries: int = MAX_DELIVERIES,
    ) -> None:
        """`waiter_id`: the worker's id. A job whose prompt is cached on a waiting worker wakes that worker first."""
        self.keys = Keys(namespace)
        self._redis = redis
        self._lease_s, self._max_jobs, self._max_deliveries = lease_s, max_jobs, max_deliveries
        self._waiter_id = waiter_id or uuid.uuid4().hex[:12]
        self._listener: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self.waits = False  # since the last `claim` the next job wakes this worker
        self._listed = False  # it may be among those that a job wakes
        self.away: list[str] = []  # frontends whose jobs claims leave to other workers
        # Seconds until what this worker has is computed, and for each token that it claims: of busy workers that wait,
        # the one that is done first is told first. Zeros: the one that has waited longest.
        self.done_s = (0.0, 0.0)
        self.share_tokens: int | None = None  # of what waits, as of the last `claim`; None where no other is idle

    async def enqueue(self, job: PrefillJob) -> None:
        """Add a job; the server's clock dates it. Raises QueueFull, JobTooLarge. Idempotent. A higher attempt of the
        same request replaces the older one at its place; an older one changes nothing."""
        if len(job.body) > MAX_BODY_BYTES:
            raise JobTooLarge(f"{job.request_id}: a body of {len(job.body)} bytes, the largest has {MAX_BODY_BYTES}")
        place = (job.tokens, job.uncached_tokens, job.delay_s, self._max_jobs, JOB_TTL_S)
        kept = (job.reply_to, job.body, cached_text(job.cached), job.ttft_s)
        outcome = await self.call("enqueue", job.request_id, job.attempt, *place, *kept)
        if outcome == b"full":
            raise QueueFull(f"{self._max_jobs} prefills wait already; add prefill workers")

    async def claim(
        self, worker_id: str, max_tokens: int, max_jobs: int, window: int, claimer: Claimer, wait_s: float = 0.0
    ) -> tuple[list[Claim], list[WindowJob]]:
        """Take jobs from the head of the queue, in order, while they fit `max_tokens`; or see what to choose from.

        The first job of an idle worker fits any budget above 0, and of one that is ahead while no other is idle. Jobs
        that cannot be read, or whose frontend is gone, are dropped. Where `choose_claims` may prefer another order,
        with one of the first `window` jobs cached on a claiming worker or a head that does not fit, nothing is claimed,
        and those jobs are returned for `claim_chosen`.
        While other workers are idle an idle one gets its share of the tokens that wait, and others none.
        With `wait_s` a worker that took all and has room for more waits from now on, and `waits` says so: nothing that
        is enqueued before `wait_for_work` is called goes unnoticed.
        """
        self.waits = False
        if max_tokens <= 0 or max_jobs <= 0:
            return [], []
        size = (max_tokens, min(max_jobs, MAX_CLAIM_JOBS), window, claimer, wait_s)
        packed = await self.call("claim", *self._claimer(worker_id), *size, *self.done_s)
        try:
            reply, bodies = _read_reply(packed)
        except UnicodeDecodeError:  # no id of ours in the window: claimed in order, which drops it
            return await self.claim(worker_id, max_tokens, max_jobs, 0, "idle", wait_s)
        self.waits = self._listed = reply.waits
        self.share_tokens = reply.share_tokens if reply.share_tokens >= 0 else None
        return await self._read_claims(worker_id, reply, bodies), reply.window

    async def claim_chosen(self, worker_id: str, request_ids: list[str], idle: bool = False) -> list[Claim]:
        """Claim those of these jobs that still wait. If jobs are left, an idle worker is woken. `idle`: if other
        workers have claimed all of them, claim the head of the queue instead of choosing again."""
        packed = await self.call("claim_chosen", *self._claimer(worker_id), int(idle), *request_ids)
        return await self._read_claims(worker_id, *_read_reply(packed))

    def _claimer(self, worker_id: str) -> tuple[object, ...]:
        return worker_id, self._lease_s, JOB_TTL_S, self._lease_s, self._waiter_id, " ".join(self.away)

    async def _read_claims(self, worker_id: str, reply: ClaimReply, bodies: bytes) -> list[Claim]:
        claims = []
        end = 0
        for row in reply.claims:
            begin, end = end, end + row.body_bytes
            request_id = _raw_bytes(row.request_id)
            try:
                job = PrefillJob(
                    request_id=request_id.decode(),
                    attempt=row.attempt,
                    tokens=row.tokens,
                    uncached_tokens=row.uncached_tokens,
                    arrived_at=row.arrived_at,
                    reply_to=_raw_bytes(row.reply_to).decode(),
                    body=bodies[begin:end],
                    deliveries=row.deliveries,
                    cached=read_cached(_raw_bytes(row.cached).decode()),
                    ttft_s=row.ttft_s,
                )
            except UnicodeDecodeError as error:
                log.warning("dropped a corrupt prefill job %r: %s", request_id[:80], error)
                await self.call("ack", worker_id, request_id, row.attempt)
                continue
            claims.append(Claim(job, max(reply.now - job.arrived_at, 0.0), reply.lease_until))
        return claims

    async def renew(self, worker_id: str, request_ids: list[str]) -> list[str]:
        """Extend leases by `lease_s` from now. Returns the ids that this worker does not hold any more."""
        if not request_ids:
            return []
        lost = await self.call("renew", worker_id, self._lease_s, JOB_TTL_S, *request_ids)
        return [request_id.decode() for request_id in lost]

    async def ack(self, worker_id: str, request_id: str, attempt: int) -> bool:
        """The job is done: forget it. False when this worker did not hold this attempt."""
        return bool(await self.call("ack", worker_id, request_id, attempt))

    async def release(self, worker_id: str, request_id: str, attempt: int) -> bool:
        """Give a job back to its old place in the queue. False when this worker did not hold this attempt."""
        return bool(await self.call("release", worker_id, request_id, attempt, JOB_TTL_S))

    async def expire_leases(self, worker_id: str) -> int:
        """End the leases of a dead worker, unless it is registered again, for the next sweep. Returns how many."""
        return int(await self.call("expire_leases", worker_id))

    async def cancel(self, request_id: str, attempt: int) -> Literal["waiting", "claimed", "absent"]:
        """Remove this attempt, or an older one, claimed or not. Returns its state before."""
        outcome: Literal["waiting", "claimed", "absent"] = (await self.call("cancel", request_id, attempt)).decode()
        return outcome

    async def sweep(self) -> SweepResult:
        """Return jobs with expired leases, fail those delivered too often, drop those without a frontend: of all leases
        and a slice of what waits, in bounded steps. Several processes may sweep at once."""
        result = SweepResult([], [], [])
        for _ in range(SWEEP_ROUNDS):
            returned, failed, orphaned = await self.call(
                "sweep", SWEEP_LEASES, SWEEP_WAITING, self._max_deliveries, JOB_TTL_S, self._lease_s
            )
            result.returned.extend(map(text, returned))
            result.failed.extend((text(request_id), attempt, text(to)) for request_id, attempt, to in failed)
            result.orphaned.extend(map(text, orphaned))
            if not (returned or failed or orphaned):
                break
        return result

    async def depth(self) -> QueueDepth:
        """O(1)."""
        return QueueDepth(*await self.call("depth"))

    async def poll(self) -> QueueDepth:
        """As `depth`. Raises RedisAway also where Redis refuses writes: nothing can be claimed then. O(1)."""
        return QueueDepth(*await self.call("poll"))

    async def states(self, request_ids: Sequence[str]) -> dict[str, JobState]:
        """The state of each of these jobs. O(1) for each."""
        found = await self.call("states", *request_ids)
        return {name: JobState(state.decode()) for name, state in zip(request_ids, found, strict=True)}

    async def claims_of(self, worker_id: str) -> list[str]:
        """The requests whose jobs this worker has claimed. O(n) in their number."""
        return [text(request_id) for request_id in await self.call("claims_of", worker_id)]

    async def server_run(self) -> str:
        """The run id of the server. If it changes, jobs may be lost. Empty if the server does not tell it."""
        try:
            return str((await self._redis.info("server")).get("run_id", ""))
        except RedisAway as error:
            log.debug("the server does not tell its run: %s", error)  # INFO may be forbidden by an ACL
            return ""

    async def wait_for_work(self, timeout_s: float, claimer: Claimer = "idle", left: bool = False) -> None:
        """Wait until a job is enqueued, at most `timeout_s`; so long while Redis is away. Returns at once if jobs wait
        that this worker has not `left` to others. May return without work. Claim then, wait again, or `leave`. Idle
        workers are woken before busy ones. Call it only with budget to claim."""
        deadline = time.monotonic() + timeout_s
        if self._listener is None or self._listener.done():
            # A reconnection wakes too: what was published while the connection was down is lost.
            told = self._redis.listen(self.keys.wake(self._waiter_id))
            self._listener = asyncio.create_task(set_whenever(self._woken, told), name="queue-listener")
        try:
            if not (self.waits or self._woken.is_set()):
                self._listed = True
                if await self.call("wait", self._waiter_id, timeout_s, claimer, int(left), self.done_s[0]):
                    return
        except RedisAway as error:
            log.debug("waiting for work without Redis: %s", error)
            await asyncio.sleep(max(deadline - time.monotonic(), 0))
            return
        await until_told(self._woken, max(deadline - time.monotonic(), 0))
        self.waits = False

    def wake(self) -> None:
        """End the present `wait_for_work`, or the next one."""
        self._woken.set()

    async def leave(self) -> None:
        """This worker does not claim for now: no job wakes it, and one that has wakes another worker."""
        if self._listed:
            self._listed = False
            await self.call("leave", self._waiter_id)

    async def aclose(self) -> None:
        """Ends what is behind `wait_for_work`; the connection belongs to the caller."""
        await cancelled(self._listener)
        with contextlib.suppress(RedisAway):
            await self.leave()

    async def call(self, verb: str, *args: Any) -> Any:
        """A verb of `lua/queue/`."""
        return await self._redis.call(QUEUE, verb, self.keys.prefix, *args)


def cached_text(cached: dict[str, int]) -> str:
    """Tokens by worker as redis-cli shows them, most first: "w1=512 w2=256"."""
    return " ".join(f"{name}={tokens}" for name, tokens in sorted(cached.items(), key=lambda item: -item[1]))


def read_cached(told: str) -> dict[str, int]:
    """The inverse of the function above. Parts of another form are left out."""
    pairs = (part.rpartition("=") for part in told.split())
    return {name: count for name, _, tokens in pairs if name and (count := whole(tokens))}


def _read_reply(packed: bytes) -> tuple[ClaimReply, bytes]:
    """A line with a length, that much msgpack, and bodies. Raises UnicodeDecodeError."""
    length, _, rest = packed.partition(b"\n")
    return _decode_reply(rest[: int(length)]), rest[int(length) :]


def _raw_bytes(raw: msgspec.Raw) -> bytes:
    """The bytes of a msgpack str: what follows its head of 1 byte, or of 2, 3 or 5 where it is longer than 31 bytes."""
    packed = bytes(raw)
    return packed[_LONG_STR_HEAD.get(packed[0], 1) :]
