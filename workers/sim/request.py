"""A request in the simulated engine, and what answers it: tokens instead of a model's."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, field

from orchestrator.simulator.engine.stay import Phase as StayPhase
from orchestrator.simulator.engine.stay import Stay
from orchestrator.types import FinishReason, KVSource
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


@dataclass(slots=True, eq=False)
class SimRequest:
    """One attempt in the simulated engine, which knows its `stay`."""

    key: str
    phase: Phase
    prompt: list[int]
    resume_tokens: int  # tokens generated elsewhere before, part of the context here
    max_tokens: int  # tokens to generate here
    min_tokens: int
    eos_token_id: int | None
    stop_token_ids: frozenset[int]
    stream: TokenStream
    kv_source: KVSource | None = None  # None again once its KV has come, or will not
    prefix: list[int] = field(default_factory=list)  # keys of the prompt's blocks; none if it shares nothing
    queued_at: float = 0.0
    order: float = 0.0  # in the waiting queue: the smallest is next
    adapter: int = 0  # the number of its LoRA adapter; 0: none
    scheduled_at: float = 0.0  # 0 until first scheduled
    sampled: int = 0  # tokens so far
    pushed: tuple[int, int] = (0, 0)  # blocks of the prompt given to `transfers`, and preemptions before that
    left: bool = False  # aborted or failed: blocks are kept while a transfer could touch them
    last: tuple[int, FinishReason, int | None] = field(init=False)  # its last token, why, and the stop token
    stay: Stay = field(init=False)

    def enter(self, most: int) -> Stay:
        """Its stay in an engine that generates so many tokens at most."""
        phase: StayPhase = "local" if self.kv_source is None else "remote"
        if self.phase is Phase.PREFILL:
            phase, most = "prefill", 1
        tokens, context = self._ends(min(self.max_tokens, most)), len(self.prompt) + self.resume_tokens
        tail = max(1, self.resume_tokens)
        self.stay = Stay(self, phase, context, tokens, self.prefix, self.order, 0, self.adapter, tail)
        return self.stay

    def _ends(self, most: int) -> int:
        """How many of `most` tokens it generates. Sets `last`."""
        stream, begins = self.stream, self.resume_tokens
        end, token, why = begins + most - 1, None, FinishReason.LENGTH
        if self.eos_token_id is not None and (eos_at := max(stream.eos_at, self.min_tokens, begins)) <= end:
            end, token, why = eos_at, self.eos_token_id, FinishReason.STOP
        self.last = (stream.token(end) if token is None else token, why, None)
        if self.stop_token_ids:
            for position in range(max(begins, self.min_tokens), end + (why is FinishReason.LENGTH)):
                if (token := stream.token(position)) in self.stop_token_ids:
                    self.last = (token, FinishReason.STOP, token)
                    return position + 1 - begins
        return end + 1 - begins
