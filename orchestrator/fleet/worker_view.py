"""One worker as a frontend sees it: what it reported last, plus what this frontend has placed there since."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.policy.decode_choice import Candidate, blocks_for
from orchestrator.types import Role, WorkerInfo, WorkerLoad, WorkerState


@dataclass(slots=True)
class _Placed:
    sequence: int
    blocks: int
    tokens: int


class WorkerView:
    """One worker as this frontend sees it. `last_heard_at` and `reported_at` (when its last load report came) are
    the frontend's monotonic clock, seconds."""

    def __init__(self, info: WorkerInfo, last_heard_at: float, changed: set[str], numbers: Iterator[int]) -> None:
        """`changed` collects the ids of workers whose usability or load is not what it was; `numbers` number what is
        submitted."""
        self.added_at = self.last_heard_at = self.reported_at = last_heard_at
        self.load: WorkerLoad | None = None
        self.greeted = False  # it has answered `Hello`
        self.disconnected_at: float | None = None
        self.quiet = False  # silent for longer than a working one: slow, stopped or cut off
        self._info, self._changed, self._numbers = info, changed, numbers
        self._connected, self._registered = False, True
        self._placed: deque[_Placed] = deque()
        self._placed_blocks = self._placed_tokens = 0
        self._candidate: Candidate | None = None
        self._touch()

    def _touch(self) -> None:
        self._candidate = None
        self._changed.add(self._info.id)

    @property
    def info(self) -> WorkerInfo:
        return self._info

    @info.setter
    def info(self, info: WorkerInfo) -> None:
        self._info = info
        self._touch()

    @property
    def connected(self) -> bool:
        """Whether the connection is open, and the worker has answered `Hello` and reported its load."""
        return self._connected

    @connected.setter
    def connected(self, connected: bool) -> None:
        self._connected = connected
        self._touch()

    @property
    def registered(self) -> bool:
        """Whether Redis had it when it was read last. One that it has not may be cut off from Redis alone: it is heard,
        and claims nothing."""
        return self._registered

    @registered.setter
    def registered(self, registered: bool) -> None:
        if registered is not self._registered:
            self._registered = registered
            self._touch()

    def disconnect(self, now: float) -> None:
        """Nothing may be sent to it until it answers a greeting, and it is given up unless that is soon. What was sent
        and no report has seen may be lost, and no report would say so: it is not counted any more."""
        self._placed.clear()
        self._placed_blocks = self._placed_tokens = 0
        self.greeted, self.connected, self.disconnected_at = False, False, now

    def mark_quiet(self, quiet: bool = True) -> None:
        self.quiet = quiet
        self._touch()

    @property
    def usable_as(self) -> Role | None:
        """Its role if it can get requests, else None."""
        usable = self._connected and self._info.state is WorkerState.READY and self.may_claim
        return self._info.role if usable else None

    @property
    def may_claim(self) -> bool:
        """Whether jobs reach it if it is a prefill worker."""
        return self._registered or self._info.role is not Role.PREFILL

    def note_placed(self, context_tokens: int, compute_tokens: int) -> int:
        """Count a submission against this worker until a load report has seen it. Returns its sequence number.

        `compute_tokens`: of the context, those to prefill there.
        """
        sequence = next(self._numbers)
        blocks = blocks_for(context_tokens, self._info.identity.block_size)
        self._placed.append(_Placed(sequence, blocks, compute_tokens))
        self._placed_blocks += blocks
        self._placed_tokens += compute_tokens
        self._touch()
        return sequence

    def note_unsent(self) -> None:
        """Take back the last counted submission, which could not be sent."""
        self._uncount(self._placed.pop())

    def _uncount(self, placed: _Placed) -> None:
        self._placed_blocks -= placed.blocks
        self._placed_tokens -= placed.tokens
        self._touch()

    def note_load(self, load: WorkerLoad, seen: int, now: float) -> None:
        """Take a load report that includes every submission up to `seen`. Older reports are ignored."""
        self.last_heard_at = self.reported_at = now
        if self.load is not None and load.sequence <= self.load.sequence:
            return
        changed = self.load is None or _counts(self.load) != _counts(load)
        self.load = load
        while self._placed and self._placed[0].sequence <= seen:
            self._uncount(self._placed.popleft())
        if changed:  # in a large fleet most reports repeat the one before
            self._touch()

    @property
    def candidate(self) -> Candidate:
        """The worker for the policies: its report corrected by what this frontend has placed since."""
        if self._candidate is None:
            load = self.load
            total = load.blocks_total if load else self._info.blocks_total
            free = load.blocks_free if load else total
            self._candidate = Candidate(
                worker_id=self._info.id,
                blocks_total=total,
                blocks_free=max(0, free - self._placed_blocks),
                block_size=self._info.identity.block_size,
                running=load.running if load else 0,
                waiting=(load.waiting if load else 0) + len(self._placed),
                waiting_tokens=load.waiting_tokens if load else 0,
                placed_tokens=self._placed_tokens,
                max_num_seqs=self._info.max_num_seqs,
                group=self._info.unit if self._info.lockstep else "",
            )
        return self._candidate


def _counts(load: WorkerLoad) -> tuple[int, ...]:
    """The load figures of a candidate."""
    return load.blocks_free, load.running, load.waiting, load.waiting_tokens, load.blocks_total
