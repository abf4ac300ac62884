"""A simulated request: a job. Each of its attempts on a worker is a stay (`engine/stay.py`)."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, field

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.decode_choice import EXPECTED_OUTPUT_TOKENS, RequestInfo
from orchestrator.policy.prefix_keys import key_of_beginning
from orchestrator.simulator.engine.stay import Phase, Stay
from orchestrator.simulator.trace import Arrival


@dataclass(slots=True, eq=False)
class Job:
    """One request: its arrival, its progress and its outcome. Times are simulated seconds."""

    id: int
    arrival: Arrival
    unit_tokens: InitVar[int]  # the load's prefix unit, for which the arrival has one key each
    adapter: int = field(init=False)  # its LoRA adapter, as the router knows it
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

    def __post_init__(self, unit_tokens: int) -> None:
        self.adapter = self.arrival.adapter
        self.prefix_key = key_of_beginning(self.arrival.keys, unit_tokens)

    @property
    def prompt_tokens(self) -> int:
        return self.arrival.prompt_tokens + self.generated

    @property
    def output_tokens(self) -> int:
        return self.arrival.output_tokens - self.generated

    def times(self) -> tuple[float, float] | None:
        """TTFT and TPOT, seconds; None unless it has ended well."""
        if self.outcome != "ok" or self.first_at is None or self.done_at is None:
            return None
        return self.first_at - self.arrival.at, (self.done_at - self.first_at) / max(1, self.arrival.output_tokens - 1)

    def met(self, slo: SLOConfig) -> tuple[bool, bool]:
        """Whether each is within its own objective, else that of the fleet; neither is unless it has ended well."""
        own, (ttft_s, tpot_s) = self.arrival, self.times() or (math.inf, math.inf)
        return ttft_s <= (own.ttft_slo_s or slo.ttft_s), tpot_s <= (own.tpot_slo_s or slo.tpot_s)

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

    def stay(self, phase: Phase, order: float, expected_hit_tokens: int = 0) -> Stay:
        """An attempt on a worker."""
        arrival, tokens = self.arrival, 0 if phase == "prefill" else self.output_tokens
        keys, adapter = arrival.keys, arrival.adapter
        return Stay(self, phase, self.prompt_tokens, tokens, keys, order, expected_hit_tokens, adapter)
