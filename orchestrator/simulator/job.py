"""A simulated request (a job), each of its attempts on a worker (a stay), and what a worker tells of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, Protocol

from orchestrator.policy.decode_choice import EXPECTED_OUTPUT_TOKENS, RequestInfo
from orchestrator.policy.prefix_keys import key_of_beginning
from orchestrator.simulator.trace import Arrival

# What a stay does. "prefill": the prompt only. "local": prefill and decode. "remote": decode with received KV.
Phase = Literal["prefill", "local", "remote"]


@dataclass(slots=True, eq=False)
class Job:
    """One request: its arrival, its progress and its outcome. Times are simulated seconds."""

    id: int
    arrival: Arrival
    unit_tokens: InitVar[int]  # the load's prefix unit, for which the arrival has one key each
    adapters: InitVar[bool] = True  # the router knows its LoRA adapter
    adapter: int = field(init=False)
    adapter_at: dict[str, int] = field(default_factory=dict)  # prompt tokens saved, by prefill worker with its adapter
    prefix_key: int | None = field(init=False)
    generated: int = 0  # output tokens that the client has from earlier attempts
    first_at: float | None = None
    decoding_at: float | None = None  # a decode worker's first token, which may come after a prefill worker's
    done_at: float | None = None
    outcome: str = ""
    hits: dict[str, int] = field(default_factory=dict)  # cached prompt tokens by worker
    hits_at: float = 0.0
    uncached: int = 0
    backlog_s: float = 0.0
    placed_at: float = 0.0
    enqueued_at: float = -1.0
    local_tokens: int = 0
    exposed_s: float | None = None  # of its KV transfer: from the end of the prefill until all had come
    beside: int = 0  # requests on its decode worker when it was placed there
    claimed: bool = False
    bound: str | None = None  # the decode worker that was chosen at arrival (dispatch `push`)

    def __post_init__(self, unit_tokens: int, adapters: bool) -> None:
        self.adapter = self.arrival.adapter if adapters else 0
        self.prefix_key = key_of_beginning(self.arrival.keys, unit_tokens)

    @property
    def prompt_tokens(self) -> int:
        return self.arrival.prompt_tokens + self.generated

    @property
    def output_tokens(self) -> int:
        return self.arrival.output_tokens - self.generated

    def info(self) -> RequestInfo:
        """What a router knows of the request. It does not know the output length."""
        return RequestInfo(
            str(self.id),
            self.prompt_tokens,
            16 * EXPECTED_OUTPUT_TOKENS,
            self.arrival.at,
            self.arrival.priority,
            prefix_key=self.prefix_key,
            ttft_slo_s=self.arrival.ttft_slo_s,
            tpot_slo_s=self.arrival.tpot_slo_s,
            tenant=self.arrival.tenant,
            adapter=self.adapter,
        )


@dataclass(slots=True, eq=False)
class Stay:
    """One attempt of a job on one worker: its memory, its progress, and the other stay of its KV transfer (`peer`)."""

    job: Job
    phase: Phase
    context: int  # tokens whose KV it holds, or will hold after its prefill
    remaining: int  # output tokens to generate here
    keys: Sequence[int]  # one per whole prefix unit of the prompt
    order: float  # the waiting stay with the least is admitted first, the running one with the most preempted
    expected_hit_tokens: int = 0  # cached tokens, as the router believes
    compute: int = 0  # prompt tokens left to compute
    computed: int = 0  # prompt tokens computed or cached
    hit_tokens: int = 0  # cached tokens, when its blocks were allocated
    first_step: int = 0  # the worker's step counter when decoding began
    from_step: int = 0  # the first of the worker's steps that can be scheduled with it
    epoch: int = 0  # one more with each preemption, so that older entries in the batch's heap are ignored
    emitted: int = 0  # output tokens of earlier stays
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
    """What a worker, the first argument of each method, calls in the simulation."""

    def on_start(self, worker: Any, stay: Stay, now: float) -> None:
        """The blocks of a stay are allocated."""

    def on_prefilled(self, worker: Any, stay: Stay, now: float) -> None:
        """The prompt of a "prefill" stay is computed."""

    def on_first(self, worker: Any, stay: Stay, at: float) -> None:
        """A stay gets its first token at time `at`, which may be later than now."""

    def on_done(self, worker: Any, stay: Stay, now: float) -> None: ...

    def on_boundary(self, worker: Any, tokens: int, seconds: float, now: float) -> None:
        """A step of `seconds` that computed this many prompt tokens has ended."""
