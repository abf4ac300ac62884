"""The prefill queue in Redis: waiting jobs in score order, claims as leases, every transition one Lua script.

Claims are at-least-once: a lease that runs out returns the job, so results are fenced by attempt, not by claim.
Not responsible for what a job's body means, nor for when to claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, Literal

import msgspec

from orchestrator.config.settings import QueueConfig
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.keys import Keys, Script
from orchestrator.types import PrefillJob, QueueDepth, WindowJob

log = logging.getLogger("pd.queue")

# A job that nobody touches this long disappears from Redis: what is left when a whole fleet dies at once.
JOB_TTL_S = 3600
# One script holds up every other client: these bound what a single call looks at.
MAX_CLAIM_JOBS = 256
SWEEP_LEASES = 25
SWEEP_WAITING = 25
SWEEP_ROUNDS = 80
MAX_PEEK = 1000


class QueueFull(Exception):
    """As many jobs wait as `queue.max_requests` allows. Prefill locally, or answer 429."""


class Claim(msgspec.Struct, frozen=True):
    """A job this worker holds until `lease_until` (unix seconds, the server's clock), unless it renews."""

    job: PrefillJob
    queued_s: float  # from enqueue to claim, the server's clock
    lease_until: float


class SweepResult(msgspec.Struct, frozen=True):
    """What one sweep did. Whoever sweeps tells the frontend of each failed job."""

    returned: list[str]
    failed: list[tuple[str, int, str]]  # request id, attempt, reply_to
    orphaned: list[str]


class PrefillQueue:
    """Verbs of the queue. Every method but `wait_for_work` raises RedisAway."""

    def __init__(self, redis: Redis, namespace: str, config: QueueConfig, waiter_id: str = "") -> None:
        """`waiter_id`: the worker's, for whom jobs that are cached there are woken up for first."""
        self.keys = Keys(namespace)
        self.corrupt = 0
        self._redis = redis
        self._config = config
        self._waiter_id = waiter_id or uuid.uuid4().hex[:12]
        self._listener: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        names = (
            "enqueue claim claim_chosen renew ack release return_unknown end_leases cancel sweep depth peek show wait"
        )
        self._scripts = {name: Script(name) for name in names.split()}

    async def enqueue(self, job: PrefillJob) -> None:
        """Add a job; the server's clock dates it. Raises QueueFull.

        Idempotent. A higher attempt of the same request replaces the older one at its place; an older one changes
        nothing.
        """
        outcome = await self._run(
            "enqueue",
            job.request_id,
            job.attempt,
            job.tokens,
            job.uncached_tokens,
            job.delay_s,
            self._config.max_requests,
            JOB_TTL_S,
            job.reply_to,
            job.body,
            cached_text(job.cached),
        )
        if outcome == b"full":
            raise QueueFull(
                f"{self._config.max_requests} prefills wait already; add prefill workers or raise queue.max_requests"
            )

    async def claim(self, worker_id: str, max_tokens: int, max_jobs: int) -> list[Claim]:
        """Take jobs from the head while their tokens fit `max_tokens`; the first one fits any budget above 0.

        Jobs that cannot be read, or whose frontend is gone, are dropped and counted instead.
        """
        return (await self.claim_or_look(worker_id, max_tokens, max_jobs, 0, idle=True))[0]

    async def claim_or_look(
        self, worker_id: str, max_tokens: int, max_jobs: int, window: int, idle: bool
    ) -> tuple[list[Claim], list[WindowJob]]:
        """What `choose_claims` would take, in one call where that is plain: from the head, in order, while it fits.

        Otherwise, with some of the first `window` jobs cached on a claiming worker, or too long a job at the head of
        the queue, nothing is claimed, and those jobs are returned, to choose from for `claim_chosen`.
        """
        if max_tokens <= 0 or max_jobs <= 0:
            return [], []
        room = min(max_jobs, MAX_CLAIM_JOBS)
        reply = await self._run("claim", *self._claimer(worker_id), max_tokens, room, window, int(idle))
        if not reply.startswith(b"\n"):
            return await self._read_claims(worker_id, reply), []
        try:
            return [], list(_window(reply))
        except UnicodeDecodeError:  # no id of ours: claimed plainly, which drops it
            return await self.claim_or_look(worker_id, max_tokens, max_jobs, 0, idle=True)

    async def claim_chosen(self, worker_id: str, request_ids: list[str], idle: bool = False) -> list[Claim]:
        """Take those of these jobs that still wait. An idle worker is told of what is left.

        `idle`: where others were quicker each time, take the head of the queue: looking again would meet that crowd.
        """
        claimed = await self._run("claim_chosen", *self._claimer(worker_id), int(idle), *request_ids)
        return await self._read_claims(worker_id, claimed)

    def _claimer(self, worker_id: str) -> tuple[object, ...]:
        lease_s = self._config.lease_s
        return worker_id, lease_s, JOB_TTL_S, lease_s, self._waiter_id

    async def _read_claims(self, worker_id: str, reply: bytes) -> list[Claim]:
        now, lease_until = map(float, reply[: reply.index(b"\n")].split())
        claims = []
        at = reply.index(b"\n") + 1
        while at < len(reply):
            start = reply.index(b"\n", at) + 1
            attempt, tokens, uncached, arrived_at, deliveries, *lengths = reply[at:start].split()
            ends = list(accumulate(map(int, lengths), initial=start))
            request_id, reply_to, cached, body = (reply[a:b] for a, b in pairwise(ends))
            at = ends[-1]
            try:
                job = PrefillJob(
                    request_id=request_id.decode(),
                    attempt=int(attempt),
                    tokens=int(tokens),
                    uncached_tokens=int(uncached),
                    arrived_at=float(arrived_at),
                    reply_to=reply_to.decode(),
                    body=body,
                    deliveries=int(deliveries),
                    cached=read_cached(cached.decode()),
                )
            except UnicodeDecodeError as error:
                self.corrupt += 1
                log.warning("dropped a corrupt prefill job %r: %s", request_id[:80], error)
                await self._run("ack", worker_id, request_id, attempt)
                continue
            claims.append(Claim(job, max(now - job.arrived_at, 0.0), lease_until))
        return claims

    async def renew(self, worker_id: str, request_ids: list[str]) -> list[str]:
        """Extend leases by `lease_s` from now. Returns the ids that this worker does not hold any more."""
        if not request_ids:
            return []
        lost = await self._run("renew", worker_id, self._config.lease_s, JOB_TTL_S, *request_ids)
        return [request_id.decode() for request_id in lost]

    async def ack(self, worker_id: str, request_id: str, attempt: int) -> bool:
        """The job is done: forget it. False when this worker did not hold this attempt."""
        return bool(await self._run("ack", worker_id, request_id, attempt))

    async def release(self, worker_id: str, request_id: str, attempt: int) -> bool:
        """Give a job back to its old place in the queue. False when this worker did not hold this attempt."""
        return bool(await self._run("release", worker_id, request_id, attempt, JOB_TTL_S))

    async def return_unknown(self, worker_id: str, known: list[str]) -> list[str]:
        """Give back what this worker holds without knowing: claims whose answer was lost on the way. Returns their ids.

        `known`: every id that the worker is answering for, acknowledgements under way included.
        """
        returned = await self._run("return_unknown", worker_id, JOB_TTL_S, *known)
        return [request_id.decode() for request_id in returned]

    async def end_leases(self, worker_id: str) -> int:
        """Of a worker that died, unless it is registered again: the next sweep returns its claims. Returns how many."""
        return int(await self._run("end_leases", worker_id))

    async def cancel(self, request_id: str, attempt: int) -> Literal["waiting", "claimed", "absent"]:
        """Remove this attempt, or an older one, whoever holds it. Returns what it was."""
        outcome: Literal["waiting", "claimed", "absent"] = (await self._run("cancel", request_id, attempt)).decode()
        return outcome

    async def sweep(self) -> SweepResult:
        """Return the jobs of holders that died, fail those that died too often, drop those nobody waits for.

        Looks at all that expired and at a slice of what waits, going on while it finds something, in bounded steps;
        safe to run from many places at once.
        """
        result = SweepResult([], [], [])
        for _ in range(SWEEP_ROUNDS):
            returned, failed, orphaned = await self._run(
                "sweep", SWEEP_LEASES, SWEEP_WAITING, self._config.max_deliveries, JOB_TTL_S, self._config.lease_s
            )
            result.returned.extend(map(_text, returned))
            result.failed.extend(
                (_text(failed[at]), int(failed[at + 1]), _text(failed[at + 2])) for at in range(0, len(failed), 3)
            )
            result.orphaned.extend(map(_text, orphaned))
            if not (returned or failed or orphaned):
                break
        return result

    async def depth(self) -> QueueDepth:
        """O(1)."""
        requests, tokens, claimed = await self._run("depth")
        return QueueDepth(requests, tokens, claimed)

    async def dropped(self) -> dict[str, int]:
        """Jobs dropped since Redis started, by reason: corrupt, orphaned, failed, vanished."""
        counts: dict[bytes, bytes] = await self._redis.execute_command("HGETALL", self.keys.dropped)
        return {_text(reason): int(number) for reason, number in counts.items()}

    async def peek(self, limit: int) -> list[dict[str, Any]]:
        """The head of the queue, for people: id, tokens, uncached, age_s, score, attempt, reply_to."""
        rows = await self._run("peek", min(limit, MAX_PEEK)) if limit > 0 else []
        return [
            {
                "id": _text(request_id),
                "tokens": tokens,
                "uncached": uncached,
                "age_s": round(float(age_s), 3),
                "score": float(place),
                "attempt": attempt,
                "reply_to": _text(reply_to),
            }
            for request_id, tokens, uncached, age_s, place, attempt, reply_to in rows
        ]

    async def show(self, request_id: str) -> dict[str, Any] | None:
        """One job, waiting or claimed, for people: its fields as text or numbers, `age_s`, `body_bytes`."""
        reply = await self._run("show", request_id)
        if not reply:
            return None
        shown: dict[str, Any] = {"id": request_id}
        for at in range(2, len(reply), 2):
            shown[_text(reply[at])] = _number(_text(reply[at + 1]))
        if isinstance(shown.get("arrived_at"), (int, float)):
            shown["age_s"] = round(float(reply[0]) - shown["arrived_at"], 3)
        return {**shown, "body_bytes": reply[1]}

    async def wait_for_work(self, timeout_s: float, doing: Literal["idle", "busy", "left"] = "idle") -> None:
        """Return when a job was enqueued since the last call, at once if some wait already, else after `timeout_s`.

        Idle workers are woken before busy ones. `left`: busy, and what waits already is left to others.
        Early returns without work happen. Waits out the time when Redis is away. Ask only with budget to claim.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if self._listener is None or self._listener.done():
            self._listener = asyncio.create_task(self._listen(), name="queue-listener")
        try:
            if not self._woken.is_set() and await self._run("wait", self._waiter_id, timeout_s, doing):
                return
        except RedisAway as error:
            log.debug("waiting for work without Redis: %s", error)
            await asyncio.sleep(max(deadline - loop.time(), 0))
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self._woken.wait()
        except TimeoutError:
            return
        finally:
            self._woken.clear()

    def look_again(self) -> None:
        """End `wait_for_work`, or the next one: whoever waits has other reasons to look."""
        self._woken.set()

    async def aclose(self) -> None:
        """Ends the subscription behind `wait_for_work`; the connection belongs to the caller."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def _listen(self) -> None:
        # A reconnection wakes too: what was published while the connection was down is lost.
        async with contextlib.aclosing(self._redis.listen(self.keys.wake(self._waiter_id))) as wake_ups:
            async for _ in wake_ups:
                self._woken.set()

    async def _run(self, script: str, *args: Any) -> Any:
        return await self._redis.run(self._scripts[script], self.keys.prefix, *args)


def _window(reply: bytes) -> Iterator[WindowJob]:
    """An empty line, one of six numbers for each job, and their ids. Raises UnicodeDecodeError."""
    at = reply.index(b"\n", 1) + 1
    numbers = iter(reply[1:at].split())
    for place, tokens, waited_s, here, elsewhere, length in zip(*[numbers] * 6, strict=True):
        end = at + int(length)
        yield WindowJob(reply[at:end].decode(), float(place), int(tokens), float(waited_s), int(here), int(elsewhere))
        at = end


def cached_text(cached: dict[str, int]) -> str:
    """Tokens by worker as redis-cli shows them, most first: "w1=512 w2=256"."""
    return " ".join(f"{name}={tokens}" for name, tokens in sorted(cached.items(), key=lambda item: -item[1]))


def read_cached(text: str) -> dict[str, int]:
    """What is not of that form is left out."""
    pairs = (part.rpartition("=") for part in text.split())
    return {name: int(tokens) for name, _, tokens in pairs if name and tokens.isdecimal()}


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _number(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
