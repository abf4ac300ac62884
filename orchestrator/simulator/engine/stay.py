"""One attempt of a request on one engine (a stay), and what an engine tells of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

# What a stay does. "prefill": the prompt only. "local": prefill and decode. "remote": decode with received KV.
Phase = Literal["prefill", "local", "remote"]


@dataclass(slots=True, eq=False)
class Stay:
    """Its memory, its progress, and the other stay of its KV transfer (`peer`)."""

    job: Any  # the caller's: whom it serves
    phase: Phase
    context: int  # tokens whose KV it holds, or will hold after its prefill
    remaining: int  # output tokens to generate here
    keys: Sequence[int]  # one per whole prefix unit of the prompt
    order: float  # the waiting stay with the least is admitted first, the running one with the most preempted
    expected_hit_tokens: int = 0  # cached tokens, as the router believes
    adapter: int = 0  # the number of its LoRA adapter; 0: none
    tail: int = 1  # tokens to compute after those whose KV is received: the last at least, which samples the next
    compute: int = 0  # prompt tokens left to compute
    computed: int = 0  # prompt tokens computed or cached
    hit_tokens: int = 0  # cached tokens, when its blocks were allocated
    first_step: int = 0  # the worker's step counter when decoding began
    from_step: int = 0  # the first of the worker's steps that can be scheduled with it
    epoch: int = 0  # one more with each preemption, so that older entries in the batch's heap are ignored
    emitted: int = 0  # output tokens before it came into the batch
    peer: Stay | None = None
    started: bool = False  # its blocks are allocated
    started_at: float = 0.0
    computed_at: float | None = None
    worker: str = ""  # name of the worker that it was submitted to


def steps_until_ready(stays: Iterable[Stay], steps_ended: int) -> int:
    """Steps until the next of these can be scheduled; a very large number if none waits for that."""
    behind = [stay.from_step for stay in stays if stay.from_step > steps_ended]
    return min(behind, default=1 << 60) - steps_ended


class Events(Protocol):
    """What an engine, the first argument of each method, calls."""

    def on_start(self, engine: Any, stay: Stay, now: float) -> None:
        """The blocks of a stay are allocated."""

    def on_prefilled(self, engine: Any, stay: Stay, now: float) -> None:
        """The prompt of a "prefill" stay is computed."""

    def on_first(self, engine: Any, stay: Stay, at: float) -> None:
        """A stay gets its first token at time `at`, which may be later than now."""

    def on_done(self, engine: Any, stay: Stay, now: float) -> None: ...
