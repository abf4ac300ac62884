"""A request in the simulated engine, and the table of its states."""

from __future__ import annotations

import enum

import msgspec

from orchestrator.types import KVSource
from workers.engine import Phase
from workers.sim.tokens import TokenStream


class SimState(enum.Enum):
    """The state of a request. The scheduler forgets the request once its blocks are free."""

    WAITING = "waiting"  # for admission; may hold received blocks
    AWAITING_KV = "awaiting_kv"  # blocks are reserved, the prompt's KV has not arrived
    RUNNING = "running"
    PUSHING = "pushing"  # prefill has ended, blocks held until the receiver has them
    LEAVING = "leaving"  # aborted or failed while a transfer could still touch its blocks


LEGAL: dict[SimState, frozenset[SimState]] = {
    SimState.WAITING: frozenset({SimState.AWAITING_KV, SimState.RUNNING, SimState.LEAVING}),
    SimState.AWAITING_KV: frozenset({SimState.WAITING, SimState.LEAVING}),
    SimState.RUNNING: frozenset({SimState.WAITING, SimState.PUSHING, SimState.LEAVING}),
    SimState.PUSHING: frozenset({SimState.LEAVING}),
    SimState.LEAVING: frozenset(),
}


class SimRequest(msgspec.Struct, eq=False):
    """One attempt in the simulated engine. `computed` counts tokens whose KV is in its blocks."""

    key: str
    phase: Phase
    prompt: list[int]
    resume_tokens: int  # tokens generated elsewhere before, part of the context here
    max_tokens: int  # tokens to generate here
    min_tokens: int
    eos_token_id: int | None
    stop_token_ids: frozenset[int]
    stream: TokenStream
    kv_source: KVSource | None = None
    state: SimState = SimState.WAITING
    computed: int = 0
    generated: int = 0
    blocks: int = 0
    preemptions: int = 0
    external_tokens: int = 0  # prompt tokens whose KV was received
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prefix: list[int] = []  # keys of the prompt's blocks; none if it shares nothing
    queued_at: float = 0.0
    scheduled_at: float = 0.0  # 0 until first scheduled
    order: float = 0.0  # in the waiting queue: the smallest is next
    adapter: int = 0  # the number of its LoRA adapter; 0: none
    pushed_blocks: int = 0  # blocks of the prompt given to `transfers`; 0 again after a preemption

    @property
    def context(self) -> int:
        """Tokens whose KV the next token needs."""
        return len(self.prompt) + self.resume_tokens + self.generated

    def enter(self, state: SimState) -> None:
        if state not in LEGAL[self.state]:
            raise RuntimeError(f"simulated request {self.key}: {self.state.value} cannot become {state.value}")
        self.state = state
