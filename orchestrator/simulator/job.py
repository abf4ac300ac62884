"""A simulated request (a job), and each of its attempts on a worker (a stay)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from orchestrator.policy.candidate import EXPECTED_OUTPUT_TOKENS, RequestInfo
from orchestrator.policy.prefix_keys import key_of_beginning
from orchestrator.simulator.trace import Arrival

# What a stay does. "prefill": the prompt only. "local": prefill and decode. "remote": decode with received KV.
Phase = Literal["prefill", "local", "remote"]


class Job:
    """One request: its arrival, its progress and its outcome. Times are simulated seconds."""

    __slots__ = (
        "adapter",
        "adapter_at",
        "arrival",
        "backlog_s",
        "beside",
        "bound",
        "claimed",
        "decoding_at",
        "done_at",
        "enqueued_at",
        "exposed_s",
        "first_at",
        "generated",
        "hits",
        "hits_at",
        "id",
        "local_tokens",
        "outcome",
        "placed_at",
        "prefix_key",
        "uncached",
    )

    def __init__(self, number: int, arrival: Arrival, unit_tokens: int, adapters: bool = True) -> None:
        """`unit_tokens`: the load's prefix unit, for which the arrival has one key each. `adapters`: the router knows
        its LoRA adapter."""
        self.id = number
        self.arrival = arrival
        self.adapter = arrival.adapter if adapters else 0
        self.adapter_at: dict[str, int] = {}  # by prefill worker that has its adapter, what that saves in prompt tokens
        self.prefix_key = key_of_beginning(arrival.keys, unit_tokens)
        self.generated = 0  # output tokens that the client has from earlier attempts
        self.first_at: float | None = None
        self.decoding_at: float | None = None  # a decode worker's first token, which may come after a prefill worker's
        self.done_at: float | None = None
        self.outcome = ""
        self.hits: dict[str, int] = {}  # cached prompt tokens by worker
        self.hits_at = 0.0
        self.uncached = 0
        self.backlog_s = 0.0
        self.placed_at = 0.0
        self.enqueued_at = -1.0
        self.local_tokens = 0
        self.exposed_s: float | None = None  # of its KV transfer: from the end of the prefill until all had come
        self.beside = 0  # requests on its decode worker when it was placed there
        self.claimed = False
        self.bound: str | None = None  # the decode worker that was chosen at arrival (dispatch `push`)

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


class Stay:
    """One attempt of a job on one worker: its memory, its progress, and the other stay of its KV transfer (`peer`)."""

    __slots__ = (
        "compute",
        "computed",
        "computed_at",
        "context",
        "emitted",
        "epoch",
        "expected_hit_tokens",
        "first_step",
        "from_step",
        "hit_tokens",
        "job",
        "keys",
        "order",
        "peer",
        "phase",
        "remaining",
        "started",
        "started_at",
        "worker",
    )

    def __init__(
        self,
        job: Job,
        phase: Phase,
        context: int,
        remaining: int,
        keys: Sequence[int],
        order: float,
        expected_hit_tokens: int = 0,
    ) -> None:
        self.job = job
        self.phase = phase
        self.order = order  # the waiting stay with the least is admitted first, the running one with the most preempted
        self.context = context  # tokens whose KV it holds, or will hold after its prefill
        self.remaining = remaining  # output tokens to generate here
        self.keys = keys  # one per whole prefix unit of the prompt
        self.compute = 0  # prompt tokens left to compute
        self.computed = 0  # prompt tokens computed or cached
        self.expected_hit_tokens = expected_hit_tokens  # cached tokens, as the router believes
        self.hit_tokens = 0  # cached tokens, when its blocks were allocated
        self.first_step = 0  # the worker's step counter when decoding began
        self.from_step = 0  # the first of the worker's steps that can be scheduled with it
        self.epoch = 0  # one more with each preemption, so that older entries in the batch's heap are ignored
        self.emitted = 0  # output tokens of earlier stays
        self.peer: Stay | None = None
        self.started = False  # its blocks are allocated
        self.started_at = 0.0
        self.computed_at: float | None = None
        self.worker = ""  # name of the worker that it was submitted to


def steps_until_ready(stays: Iterable[Stay], steps_ended: int) -> int:
    """Steps until the next of these can be scheduled; a very large number if none waits for that."""
    behind = [stay.from_step for stay in stays if stay.from_step > steps_ended]
    return min(behind, default=1 << 60) - steps_ended
