"""A request in the router: its states, their legal transitions, the results of each stage; the requests of one frontend
that have not ended; and the interface through which the router reads and makes the engine's own requests and outputs,
whose types it ignores.

No I/O and no decisions: `router` moves requests, this file has the table of transitions. The results of a stage are one
struct, made by one module. Times are seconds of the router's monotonic clock, unless a comment says otherwise.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from orchestrator.policy.decode_choice import RequestInfo
from orchestrator.policy.placement import RETRY_AFTER_S, Reject
from orchestrator.process.telemetry.requests import RequestLine
from orchestrator.types import KVSource, PrefillJob
from orchestrator.wire.messages import Prefilled


class State(enum.Enum):
    PLACING = "placing"  # the decision is being made, or no worker exists yet
    QUEUED = "queued"  # in the prefill queue
    TRANSFERRING = "transferring"  # claimed by a prefill worker and bound to a decode worker; decode waits for the KV
    LOCAL = "local"  # sent to a decode worker that prefills it too; no token yet
    DECODING = "decoding"  # tokens flow
    FINISHED = "finished"
    ABORTED = "aborted"  # the client left
    FAILED = "failed"  # the client got an error
    INVALID = "invalid"  # the client got a 400: an engine says that no worker can serve it
    REJECTED = "rejected"  # 429 or 503: before it was accepted, or, without a token yet, by `routing.fallback: refuse`


_WITH_A_WORKER = frozenset({State.FINISHED, State.PLACING, State.ABORTED, State.FAILED, State.INVALID})
SUCCESSORS: dict[State, frozenset[State]] = {
    # PLACING to FINISHED: its worker was lost, and then a stop string was found in the tokens already received.
    State.PLACING: frozenset({State.QUEUED, State.LOCAL, State.FINISHED, State.ABORTED, State.FAILED, State.REJECTED}),
    State.QUEUED: frozenset({State.TRANSFERRING, State.PLACING, State.ABORTED, State.FAILED}),
    State.TRANSFERRING: _WITH_A_WORKER | {State.DECODING},
    State.LOCAL: _WITH_A_WORKER | {State.DECODING},
    State.DECODING: _WITH_A_WORKER,
    State.FINISHED: frozenset(),
    State.ABORTED: frozenset(),
    State.FAILED: frozenset(),
    State.INVALID: frozenset(),
    State.REJECTED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A transition that the table does not have: a bug in the router."""


class Overloaded(Exception):
    """The fleet cannot take this request now. `status` is 429 (full) or 503 (no decode worker, or no remote prefill
    where nothing else may be done)."""

    def __init__(self, rejected: Reject) -> None:
        super().__init__(rejected.reason)
        self.reason = rejected.reason
        self.retry_after_s = rejected.retry_after_s
        self.status = 503 if rejected.reason == "no_decode_worker" or rejected.no_fallback else 429


# What an engine says of a request that it had. All else for which an attempt ends is of the fleet.
_OF_THE_REQUEST = {"engine_error", "prefill_refused", "rejected"}


class Failure(msgspec.Struct, frozen=True):
    """Why a request failed, for its client. `by_client`: no worker can serve it, so the status is 400, not 500.
    `rejected`: it was accepted, and the fleet cannot serve it now; 429 or 503."""

    why: str
    by_client: bool = False
    rejected: Reject | None = None

    @classmethod
    def of_fleet(cls, why: str) -> Failure:
        """503: the client may ask again."""
        return cls(why, rejected=Reject(why, RETRY_AFTER_S, no_fallback=True))


class ParsedRequest(msgspec.Struct, frozen=True):
    """The client's request. Made once, by the codec."""

    info: RequestInfo
    frames: list[bytes]  # the engine request, encoded once
    label: str  # the id that the client knows
    early_token: bool  # the client streams, and both engines sample the same first token
    prefix_keys: list[int]  # of the prompt's blocks; empty where the prompt shares no prefix
    has_media: bool = False  # images, video or sound
    frames_with_kv: list[bytes] | None = None  # for a decode worker that gets the prompt's KV, if it needs less
    received_at: float = 0.0  # at the frontend, unix seconds; 0 if unknown
    on_request_ended: Callable[[RequestLine], None] | None = None  # called with the log line when the request has ended


class Placed(msgspec.Struct, frozen=True):
    """Where one attempt goes, and why. Made by `decider`. Remote if it has a job, else local."""

    reason: str
    uncached_tokens: int  # prompt tokens to compute on the worker that prefills; at least 1
    worker_id: str = ""  # the decode worker of a local placement
    cached_tokens: int = 0  # prompt tokens cached on that decode worker, by the prefix index
    job: PrefillJob | None = None  # the job for the prefill queue
    backlog_s: float = 0.0  # predicted seconds of work ahead of the job in the queue
    at_prefill_tokens: int = 1  # prompt tokens to compute on the prefill worker with most of the prompt cached
    at_decode_tokens: int = 1  # the same, on the decode worker with most of the prompt cached
    delay_s: float = 0.0  # added to its arrival for its place in the decode engine's queue
    adapter_tokens: int = 0  # what it spends there on its LoRA adapter, as prompt tokens

    def with_cached(self, cached_tokens: int, prompt_tokens: int) -> Placed:
        """The same, with so many of the prompt's tokens in its worker's cache before it is computed."""
        uncached_tokens = max(1, prompt_tokens - cached_tokens)
        return msgspec.structs.replace(self, cached_tokens=cached_tokens, uncached_tokens=uncached_tokens)

    @property
    def decision(self) -> str:
        return "local" if self.job is None else "remote"


class Prefilling(msgspec.Struct, frozen=True):
    """What is known of a remote prefill. Made by `router` from `Claimed`, completed from `Prefilled`."""

    worker_id: str
    source: KVSource
    queued_s: float  # enqueue to claim, by the queue's clock
    claim_s: float = 0.0  # from the claim until this frontend knew of it, plus the job's way to the queue
    compute_s: float = 0.0  # claim to the last chunk
    ended_at: float | None = None
    cached_tokens: int = 0  # the prefill worker's own prefix-cache hit
    created_cache_tokens: int = 0  # prompt tokens that it added to its prefix cache
    chunk_ends_s: list[float] = []  # seconds from the claim to the end of each chunk but the last

    def completed(self, said: Prefilled, now: float) -> Prefilling:
        return msgspec.structs.replace(
            self,
            compute_s=said.prefill_s,
            cached_tokens=said.cached_tokens,
            created_cache_tokens=said.created_cache_tokens,
            chunk_ends_s=said.chunk_ends_s,
            ended_at=now,
        )


class Submitted(msgspec.Struct, frozen=True):
    """Which decode worker has the attempt. Made by `dispatch`."""

    worker_id: str
    at: float
    ahead_tokens: int  # prompt tokens that waited there when it was sent
    concurrent_requests: int  # requests that were there when it was sent
    lacking_tokens: int = 0  # prompt tokens that it has not cached, by the prefix index: their KV comes from elsewhere


@dataclass(slots=True)
class Answer:
    """The part of the answer that the client has. Written by `router`."""

    tokens: list[int] = field(default_factory=list)
    early_token: int | None = None  # the prefill engine's token, until the decode engine has sampled the same one
    first_token_at: float | None = None  # when the client's first token came
    decoding_at: float | None = None  # when the decode engine's first token came
    last_output_at: float = 0.0  # when the last output of a decode worker came
    held: list[Any] = field(default_factory=list)  # decode's outputs that wait for `Prefilled`
    held_since: float = 0.0

    def hold(self, output: Any, now: float) -> None:
        self.held_since = self.held_since or now
        self.held.append(output)


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request and its current attempt. Its own fields are written by `router`."""

    parsed: ParsedRequest
    accepted_at: float
    state: State = State.PLACING
    attempt: int = 1
    # Why each attempt failed that counts against `MAX_ATTEMPTS` of `dispatch`.
    charged: list[str] = field(default_factory=list)
    resumed: int = 0  # tokens of the answer that earlier attempts have made
    crashes: int = 0  # engines that crashed with this request, which may have caused it
    suspect: bool = False  # it may run only as the single suspect of a worker; written by `quarantine`
    placed: Placed | None = None
    prefill: Prefilling | None = None
    decode: Submitted | None = None
    answer: Answer = field(default_factory=Answer)
    local_reason: str | None = None  # why this attempt is not queued, or why the one before failed
    avoid: dict[str, None] = field(default_factory=dict)  # decode workers that refused or lost it, the latest last
    retries: list[str] = field(default_factory=list)  # why each attempt but the first began
    moved_at: float = field(default_factory=time.monotonic)  # when its present state began
    by_worker: dict[str, dict[str, ActiveRequest]] = field(default_factory=dict)  # as in `ActiveRequests`

    @property
    def id(self) -> str:
        return self.parsed.info.id

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
        """The prefill worker that still computes the prompt."""
        return self.prefill.worker_id if self.prefill is not None and self.prefill.ended_at is None else None

    @property
    def cached_tokens(self) -> int:
        """Cached prompt tokens on the worker that prefills: counted by a remote prefill, else by the prefix index."""
        if self.prefill is not None:
            return self.prefill.cached_tokens
        return self.placed.cached_tokens if self.placed is not None else 0

    @property
    def last_output_at(self) -> float:
        """When the decode worker last sent an output, or, before that, when the attempt was sent there."""
        return max(self.decode.at if self.decode is not None else 0.0, self.answer.last_output_at)

    def exhausted(self, said: str) -> Failure:
        """Its last attempt has failed. `said`: the worker's words. Not the request's fault, if only one was lost."""
        last = f"; the last: {said}" if said else ""
        why = f"{self.attempt} attempts failed: {', '.join(self.retries)}{last}"
        return Failure(why) if _OF_THE_REQUEST.issuperset(self.charged) else Failure.of_fleet(why)

    def move(self, to: State) -> None:
        """Raises IllegalTransition."""
        if to not in SUCCESSORS[self.state]:
            raise IllegalTransition(f"request {self.id}: {self.state.value} -> {to.value} is not a legal move")
        self.state, self.moved_at = to, time.monotonic()

    def give_to(self, prefill: Prefilling | None, decode: Submitted | None) -> None:
        """These workers have it now, and no others."""
        self.leave_workers()
        self.prefill, self.decode = prefill, decode
        for worker_id in (self.prefill_worker, self.decode_worker):
            if worker_id is not None:
                self.by_worker.setdefault(worker_id, {})[self.id] = self

    def leave_workers(self) -> None:
        """It is not in `by_worker` any more. Idempotent."""
        for worker_id in (self.prefill_worker, self.decode_worker):
            if worker_id is not None and (theirs := self.by_worker.get(worker_id)) is not None:
                theirs.pop(self.id, None)
                if not theirs:
                    del self.by_worker[worker_id]

    def avoid_worker(self, worker_id: str) -> None:
        """Avoid this decode worker from now on. If all are avoided, the one avoided longest ago is used."""
        self.avoid.pop(worker_id, None)
        self.avoid[worker_id] = None

    def next_attempt(self, why: str) -> None:
        """Go back to PLACING and drop the results of the failed attempt."""
        self.move(State.PLACING)
        self.attempt += 1
        self.resumed = len(self.answer.tokens)
        self.local_reason = why
        self.give_to(None, None)
        self.placed = self.answer.early_token = None
        self.answer.held, self.answer.held_since = [], 0.0


class ActiveRequests:
    """The requests of one frontend that have not ended."""

    def __init__(self) -> None:
        self.by_id: dict[str, ActiveRequest] = {}
        # Those that a worker has, by its id and theirs: one that is lost or reset among hundreds concerns few of them.
        self._by_worker: dict[str, dict[str, ActiveRequest]] = {}

    def add(self, active: ActiveRequest) -> None:
        self.by_id[active.id], active.by_worker = active, self._by_worker

    def remove(self, active: ActiveRequest) -> None:
        del self.by_id[active.id]
        active.leave_workers()

    def all(self) -> list[ActiveRequest]:
        """A copy, so that a loop over it may end requests."""
        return list(self.by_id.values())

    def of(self, *worker_ids: str) -> list[ActiveRequest]:
        """Those that one of these workers prefills, has prefilled or decodes. A copy too."""
        found: dict[str, ActiveRequest] = {}
        for worker_id in worker_ids:
            found |= self._by_worker.get(worker_id, {})
        return list(found.values())

    def current(self, request_id: str, attempt: int) -> ActiveRequest | None:
        """The request, if it has not ended and this attempt is its current one; else None."""
        active = self.by_id.get(request_id)
        return active if active is not None and active.attempt == attempt else None


class Batch(msgspec.Struct):
    """Outputs of one engine step that belong to current attempts, in the engine's own type."""

    outputs: list[Any]
    timestamp: float  # this process's monotonic clock, seconds


class Codec(Protocol):
    """What the router needs to know of the engine's request and output types."""

    def read(self, request: Any, block_size: int) -> ParsedRequest:
        """The client's request. `block_size` (tokens): with 0 no prefix keys are made. Raises errors that the server
        answers with 4xx for a request that a fleet cannot serve."""
        ...

    def decode_outputs(self, frames: list[bytes], sent_at: float, now: float) -> Batch:
        """Raises messages.MessageError. Timestamps are rebased from the sender's clock to `now`'s."""
        ...

    def as_first(self, output: Any) -> Any:
        """The prefill engine's only output as the first one of an unfinished answer: token and log-probabilities."""
        ...

    def drop_told(self, output: Any, tokens: int) -> None:
        """Remove from an attempt's first output what the client's first one had already: so many tokens, and what is
        said of the prompt, and of when the engine took and began it."""
        ...

    def computed_alone(self, output: Any) -> int | None:
        """Of the prompt, the tokens that its engine has computed, as an attempt's first output says. None where it says
        nothing, or KV has come to it."""
        ...

    def count_prompt(self, output: Any, cached_tokens: int, created_cache_tokens: int) -> None:
        """Put the prefill engine's cached and newly cached token counts into decode's first output."""
        ...

    def failure(self, parsed: ParsedRequest, failure: Failure) -> Any:
        """An output that ends the request as failed, with `failure` as its stop reason."""
        ...
