"""One request's state while the router walks it: the states, their legal successors, and what is remembered.

No I/O and no decisions: `router` moves requests, this file says which moves exist.
"""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field

from orchestrator.types import KVSource, RequestInfo


class State(enum.Enum):
    PLACING = "placing"  # being decided, or waiting for a worker to exist
    QUEUED = "queued"  # in the prefill queue
    TRANSFERRING = "transferring"  # claimed by a prefill worker and bound to a decode worker; no token yet
    LOCAL = "local"  # sent to a decode worker that prefills it too; no token yet
    DECODING = "decoding"  # tokens flow
    FINISHED = "finished"
    ABORTED = "aborted"  # the client went away
    FAILED = "failed"  # the client was told so
    REJECTED = "rejected"  # never accepted: 429 or 503


SUCCESSORS: dict[State, frozenset[State]] = {
    State.PLACING: frozenset({State.QUEUED, State.LOCAL, State.ABORTED, State.FAILED, State.REJECTED}),
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


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request and its current attempt. Times are the router's monotonic clock, seconds."""

    info: RequestInfo
    frames: list[bytes]  # the engine request, encoded once
    resumable: bool  # can be continued elsewhere after tokens were sent
    label: str  # the id that the client knows
    accepted_at: float
    state: State = State.PLACING
    attempt: int = 1
    decision: str = ""
    reason: str = ""
    decode_worker: str | None = None
    prefill_worker: str | None = None
    kv_source: KVSource | None = None
    tokens: list[int] = field(default_factory=list)  # delivered to the client
    early_wanted: bool = False  # its first token may come from prefill
    early: int | None = None  # the token that did, until decode's own first one has come
    avoid: set[str] = field(default_factory=set)  # decode workers that refused or lost it
    retries: list[str] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)  # of its prompt's blocks; none where it shares them with nobody
    cached_at_prefill: dict[str, int] = field(default_factory=dict)  # believed cached tokens, by prefill worker
    cached_tokens: int = 0  # of its prompt where it is prefilled: believed when decided, known after a remote prefill
    backlog_s: float = 0.0  # predicted work ahead of it in the queue when it was enqueued
    deferred: bool = False  # predicted to miss its objective: waits behind those that can be in time
    ahead_tokens: int = 0  # prompt tokens waiting at its decode worker when it was sent there
    queued_s: float = 0.0
    prefill_s: float = 0.0
    submitted_at: float | None = None
    prefilled_at: float | None = None
    first_token_at: float | None = None  # the client's
    decoding_at: float | None = None  # decode's first
    last_heard_at: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def move(self, to: State) -> None:
        """Raises IllegalTransition."""
        if to not in SUCCESSORS[self.state]:
            raise IllegalTransition(f"request {self.info.id}: {self.state.value} -> {to.value} is not a legal move")
        self.state = to
        self.cancel_timer()

    def sent(self, to: State, worker_id: str, decision: str, reason: str) -> None:
        """A decode worker has it. Raises IllegalTransition."""
        self.move(to)
        self.decision, self.reason = decision, reason
        self.decode_worker = worker_id
        self.submitted_at = self.last_heard_at = time.monotonic()

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    @property
    def ended(self) -> bool:
        return not SUCCESSORS[self.state]
