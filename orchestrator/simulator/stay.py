"""One attempt of a request on one simulated worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.simulator.worker import Worker


class Stay:
    """What a worker keeps of it: memory, progress, and its counterpart on the other side of a transfer (`peer`)."""

    __slots__ = (
        "compute",
        "computed",
        "computed_at",
        "context",
        "emitted",
        "epoch",
        "first_step",
        "hit_tokens",
        "keys",
        "peer",
        "phase",
        "remaining",
        "request",
        "started",
        "started_at",
        "submitted_at",
        "worker",
    )

    def __init__(self, request: Any, phase: str, context: int, remaining: int, keys: Sequence[int]) -> None:
        self.request = request
        self.phase = phase  # "prefill": prompt only; "local": prompt and decode; "remote": KV comes from elsewhere
        self.context = context  # tokens whose KV it holds, or will hold once prefilled
        self.remaining = remaining  # output tokens to generate here
        self.keys = keys  # whole prefix units of the prompt
        self.compute = 0  # prompt tokens left to compute
        self.computed = 0  # and those that are done, or were cached
        self.hit_tokens = 0
        self.first_step = 0  # the worker's step counter when decoding began
        self.epoch = 0  # outdates entries in the worker's heap
        self.emitted = 0  # output tokens of earlier stays
        self.peer: Stay | None = None
        self.submitted_at = 0.0
        self.started = False  # its blocks are allocated
        self.started_at = 0.0
        self.computed_at: float | None = None
        self.worker: Worker | None = None
