"""A request and a decode worker as policies see them, and the interface of a decode choice, which picks one for it.

The choices themselves are in `decode_choice` (ours) and `choices/references` (the field's).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec

EXPECTED_OUTPUT_TOKENS = 256  # of a request, until the first ones have ended


class RequestInfo(msgspec.Struct, frozen=True):
    """The properties of a request that policies use."""

    id: str
    prompt_tokens: int
    max_new_tokens: int
    arrived_at: float  # unix seconds
    priority: int = 0
    local_only: str | None = None  # why it must be prefilled where it decodes ("n", "prompt_logprobs", ...)
    prefix_key: int | None = None  # equal for all prompts with the same beginning
    ttft_slo_s: float | None = None  # its own objectives; None: the fleet's
    tpot_slo_s: float | None = None
    slo_class: str = ""  # where it gets them from; metrics count by it
    tenant: str = ""  # who has a share of the fleet under overload
    adapter: int = 0  # the number of its LoRA adapter; 0: none


class Candidate(msgspec.Struct, frozen=True):
    """The state of a decode worker, as a policy sees it for one request.

    `blocks_free` is that of the last report, less the blocks of the requests that this router has placed there since;
    `waiting` includes those requests. `waiting_tokens` is as reported: prompt tokens not yet computed, which have no
    blocks yet. `placed_tokens` are the prompt tokens to compute there that were placed since the report, and
    `adapter_tokens`.
    """

    worker_id: str
    blocks_total: int
    blocks_free: int
    block_size: int  # tokens
    running: int
    waiting: int
    waiting_tokens: int
    cached_tokens: int = 0  # this request's prefix-cache hit there
    max_num_seqs: int = 1 << 30  # sequences in one batch, at most
    placed_tokens: int = 0
    group: str = ""  # whose ranks take each step together; empty for a worker that waits for no other
    adapter_tokens: int = 0  # what this request spends on its LoRA adapter there, as prompt tokens
    adapter_blocks: float = 0.0  # the same for all requests that it holds up, in blocks


class DecodeChoice(ABC):
    """Chooses a decode worker for each request. It may keep a turn, a random generator or an expected output length."""

    @abstractmethod
    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return one of the candidates, or None if there are none."""

    @property
    def static_score(self) -> Callable[[Candidate], float] | None:
        """The part of a worker's rank that is the same for all requests; `Shortlist` sorts by it. None if there is no
        such part: then the choice needs all candidates."""
        return None

    def expect_output(self, tokens: float) -> None:  # noqa: B027 - optional, not abstract
        """Take the mean output length (tokens) of the requests that have ended. Most choices ignore it."""


def blocks_for(tokens: int, block_size: int) -> int:
    """KV blocks that hold this many tokens."""
    return -(-tokens // block_size)
