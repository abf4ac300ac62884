"""One request's state while the router walks it: the states, their legal successors, and what each stage left behind.

No I/O and no decisions: `router` moves requests, this file says which moves exist. Each stage's facts are one struct,
made by one module. Times are the router's monotonic clock in seconds, unless a name says otherwise.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from orchestrator.policy.placement import Reject
from orchestrator.telemetry.request_line import RequestLine
from orchestrator.types import KVSource, PrefillJob, RequestInfo


class State(enum.Enum):
    PLACING = "placing"  # being decided, or waiting for a worker to exist
    QUEUED = "queued"  # in the prefill queue
    TRANSFERRING = "transferring"  # claimed by a prefill worker and bound to a decode worker; decode waits for the KV
    LOCAL = "local"  # sent to a decode worker that prefills it too; no token yet
    DECODING = "decoding"  # tokens flow
    FINISHED = "finished"
    ABORTED = "aborted"  # the client went away
    FAILED = "failed"  # the client was told so
    REJECTED = "rejected"  # never accepted: 429 or 503


SUCCESSORS: dict[State, frozenset[State]] = {
    # To FINISHED: its last worker was lost, and then a stop string was met in what that one had sent.
    State.PLACING: frozenset({State.QUEUED, State.LOCAL, State.FINISHED, State.ABORTED, State.FAILED, State.REJECTED}),
    State.QUEUED: frozenset({State.TRANSFERRING, State.PLACING, State.ABORTED, State.FAILED}),
    State.TRANSFERRING: frozenset({State.DECODING, State.FINISHED, State.PLACING, State.ABORTED, State.FAILED}),
    State.LOCAL: frozenset({State.DECODING, State.FINISHED, State.PLACING, State.ABORTED, State.FAILED}),
    State.DECODING: frozenset({State.FINISHED, State.PLACING, State.ABORTED, State.FAILED}),
    State.FINISHED: frozenset(),
    State.ABORTED: frozenset(),
    State.FAILED: frozenset(),
    State.REJECTED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A move that the table does not have: a bug in the router, never the client's doing."""


class Overloaded(Exception):
    """The fleet cannot take this request now. `status` is 429 (full) or 503 (nobody to answer)."""

    def __init__(self, rejected: Reject) -> None:
        super().__init__(rejected.reason)
        self.reason = rejected.reason
        self.retry_after_s = rejected.retry_after_s
        self.status = 503 if rejected.reason == "no_decode_worker" else 429


class Failure(msgspec.Struct, frozen=True):
    """Why a request failed, as its client is told: 400 where the client asked for what nobody can do, else 500."""

    why: str
    by_client: bool = False


class Asked(msgspec.Struct, frozen=True):
    """What the client asked for. Made once, by the codec."""

    info: RequestInfo
    frames: list[bytes]  # the engine request, encoded once
    label: str  # the id that the client knows
    resumable: bool  # another worker can continue it after tokens were sent
    early_token: bool  # its first token is the same whichever engine samples it, and the client streams
    prefix_keys: list[int]  # of the prompt's blocks; none where it shares them with nobody
    received_at: float = 0.0  # at the frontend, unix seconds; 0 where nobody says
    tell: Callable[[RequestLine], None] | None = None  # who wants to know how it ended


class Placed(msgspec.Struct, frozen=True):
    """Where one attempt goes, and why. Made by `decider`. Remote where it has a job, else local."""

    reason: str
    uncached_tokens: int  # of the prompt, where it is prefilled; at least 1
    worker_id: str = ""  # the decode worker of a local placement
    cached_tokens: int = 0  # prompt tokens believed cached there
    job: PrefillJob | None = None  # what waits in the prefill queue
    backlog_s: float = 0.0  # predicted work ahead of the job in the queue
    at_prefill_tokens: int = 1  # to compute on the prefill worker that has most of the prompt cached
    at_decode_tokens: int = 1  # and on such a decode worker
    delay_s: float = 0.0  # behind its arrival, among those that wait in the decode worker's engine

    @property
    def decision(self) -> str:
        return "local" if self.job is None else "remote"


class Prefilling(msgspec.Struct, frozen=True):
    """What a remote prefill has said of itself. Made by `router` from `Claimed`, completed from `Prefilled`."""

    worker_id: str
    source: KVSource
    queued_s: float  # enqueue to claim, by the queue's clock
    claim_s: float = 0.0  # from the claim until it was heard here, and the job's way to the queue
    compute_s: float = 0.0  # claim to the last chunk
    ended_at: float | None = None
    cached_tokens: int = 0  # the prefill worker's own prefix-cache hit
    created_cache_tokens: int = 0  # prompt tokens that it wrote to its prefix cache
    chunk_ends_s: list[float] = []  # from the claim; of all chunks but the last

    def completed(
        self, compute_s: float, cached_tokens: int, created_cache_tokens: int, chunk_ends_s: list[float], now: float
    ) -> Prefilling:
        return msgspec.structs.replace(
            self,
            compute_s=compute_s,
            cached_tokens=cached_tokens,
            created_cache_tokens=created_cache_tokens,
            chunk_ends_s=chunk_ends_s,
            ended_at=now,
        )


class Submitted(msgspec.Struct, frozen=True):
    """Which decode worker has the attempt. Made by `dispatch`."""

    worker_id: str
    at: float
    ahead_tokens: int  # prompt tokens that waited there already
    beside: int  # requests that were there already


@dataclass(slots=True)
class Answer:
    """What the client has of its answer. Written by `answer`."""

    tokens: list[int] = field(default_factory=list)
    early_token: int | None = None  # prefill's, until decode's own first token has confirmed it
    first_token_at: float | None = None  # the client's
    decoding_at: float | None = None  # decode's first token
    heard_at: float = 0.0  # the last output of a decode worker
    held: list[Any] = field(default_factory=list)  # decode's outputs, until prefill has said what it had cached
    held_since: float = 0.0


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request and its current attempt. Its own fields are written by `router`."""

    asked: Asked
    accepted_at: float
    state: State = State.PLACING
    attempt: int = 1
    charged: int = 0  # attempts given up that count against `routing.max_attempts`
    crashes: int = 0  # engines that crashed while it was on them, and may have been the cause
    suspect: bool = False  # it may go on only alone; written by `quarantine`
    placed: Placed | None = None
    prefill: Prefilling | None = None
    decode: Submitted | None = None
    answer: Answer = field(default_factory=Answer)
    local_because: str | None = None  # why this attempt must be prefilled where it decodes
    avoid: dict[str, None] = field(default_factory=dict)  # decode workers that refused or lost it, the latest last
    retries: list[str] = field(default_factory=list)
    moved_at: float = field(default_factory=time.monotonic)  # into its present state

    @property
    def id(self) -> str:
        return self.asked.info.id

    @property
    def ended(self) -> bool:
        return not SUCCESSORS[self.state]

    @property
    def decode_worker(self) -> str | None:
        return self.decode.worker_id if self.decode is not None else None

    @property
    def prefill_worker(self) -> str | None:
        return self.prefill.worker_id if self.prefill is not None else None

    @property
    def computing_worker(self) -> str | None:
        """The prefill worker whose engine has not computed it yet."""
        return self.prefill.worker_id if self.prefill is not None and self.prefill.ended_at is None else None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, where it is prefilled: counted by a remote prefill, else believed when placed."""
        if self.prefill is not None:
            return self.prefill.cached_tokens
        return self.placed.cached_tokens if self.placed is not None else 0

    @property
    def heard_at(self) -> float:
        """The last sign of the attempt's decode worker: an output, or that the attempt was sent there."""
        return max(self.decode.at if self.decode is not None else 0.0, self.answer.heard_at)

    def move(self, to: State) -> None:
        """Raises IllegalTransition."""
        if to not in SUCCESSORS[self.state]:
            raise IllegalTransition(f"request {self.id}: {self.state.value} -> {to.value} is not a legal move")
        self.state, self.moved_at = to, time.monotonic()

    def shun(self, worker_id: str) -> None:
        """Decode elsewhere from now on; where there is nobody else, with who was shunned longest ago."""
        self.avoid.pop(worker_id, None)
        self.avoid[worker_id] = None

    def next_attempt(self, why: str) -> None:
        """Back to PLACING, with nothing left of the attempt that failed. The next one is prefilled locally."""
        self.move(State.PLACING)
        self.attempt += 1
        self.local_because = self.local_because or why
        self.placed = self.prefill = self.decode = self.answer.early_token = None
        self.answer.held = []
