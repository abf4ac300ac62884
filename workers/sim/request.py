"""A request in the simulated engine, the table of its states, and what answers it: tokens instead of a model's."""

from __future__ import annotations

import enum
import zlib
from array import array

import msgspec

from orchestrator.types import KVSource
from workers.engine import Phase

_EOS_AFTER_MIN, _EOS_AFTER_SPREAD = 64, 192


class TokenStream:
    """The tokens that follow a prompt: a pure function of the prompt and the position, so that a request that was
    retried, moved or prefilled elsewhere can be checked token by token. They are taken from the prompt's own tokens,
    which are valid in any vocabulary."""

    def __init__(self, prompt: list[int], eos_token_id: int | None = None) -> None:
        self._prompt = prompt
        self._eos = eos_token_id
        self._hash = zlib.crc32(array("q", prompt).tobytes())
        # The position at which the text ends, if the request has an end-of-sequence token.
        self.eos_at = _EOS_AFTER_MIN + self._hash % _EOS_AFTER_SPREAD

    def token(self, position: int) -> int:
        """Token number `position` after the prompt, from 0. Never the end-of-sequence token."""
        mixed = (self._hash + (position + 1) * 2654435761) & 0xFFFFFFFF
        token = self._prompt[(mixed ^ (mixed >> 15)) % len(self._prompt)]
        return token if token != self._eos else abs(token - 1)


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
