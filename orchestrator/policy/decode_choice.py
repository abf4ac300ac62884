"""Which decode worker takes a request: named policies over the candidates' live state.

Not responsible for whether the request is prefilled there (`placement`), nor for keeping the state live
(`fleet`). A policy is a callable; what little it remembers (a rotation, a random generator) is its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from orchestrator.types import RequestInfo

EXPECTED_OUTPUT_TOKENS = 256


class Candidate(msgspec.Struct, frozen=True):
    """A decode worker as a request sees it now.

    `blocks_free` is the last report less the blocks of what this router has placed there since; `running`
    and `waiting` include those requests. `waiting_tokens` is as reported (prompt tokens not yet computed, so
    without blocks yet), and `placed_tokens` what was placed since the report, to be computed there.
    """

    worker_id: str
    blocks_total: int
    blocks_free: int
    block_size: int  # tokens
    running: int
    waiting: int
    waiting_tokens: int
    max_num_seqs: int
    cached_tokens: int = 0  # this request's prefix-cache hit there
    placed_tokens: int = 0


DecodeChoice = Callable[[RequestInfo, Sequence[Candidate]], "Candidate | None"]


def blocks_for(tokens: int, block_size: int) -> int:
    """KV blocks that hold this many tokens."""
    return -(-tokens // block_size)


class KVBlocks:
    """Most KV blocks free, relative to the pool, once this request and those before it have what they need.

    Counted against the free blocks: this prompt, the prompts still waiting there, and the growth of every
    sequence there by half of `expected_output_tokens` (a running one is on average half done) plus all of
    this request's own. A worker where that leaves less than nothing would have to preempt, and is taken
    only when every other would too. Ties rotate, so that an idle fleet fills evenly.

    `overlap_weight` credits blocks of the prompt that are cached there: 0 ignores them (`kv_blocks`), 1 counts
    a block that need not be allocated, more than 1 also counts the transfer or computation saved (`kv_prefix`).
    """

    def __init__(self, overlap_weight: float = 0.0, expected_output_tokens: int = EXPECTED_OUTPUT_TOKENS) -> None:
        self.overlap_weight = overlap_weight
        self.expected_output_tokens = expected_output_tokens
        self._turn = 0

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        count = len(candidates)
        if not count:
            return None
        own_tokens = request.prompt_tokens + min(request.max_new_tokens, self.expected_output_tokens)
        half = self.expected_output_tokens / 2
        overlap = self.overlap_weight
        start = self._turn % count
        self._turn += 1
        best: Candidate | None = None
        best_fits, best_rank = False, float("-inf")
        # A plain loop over locals: this runs for every request, and over every worker of a small fleet.
        for index in range(start, start + count):
            candidate = candidates[index - count if index >= count else index]
            block_size = candidate.block_size
            demand_tokens = own_tokens + candidate.waiting_tokens + (candidate.running + candidate.waiting) * half
            left = candidate.blocks_free - demand_tokens / block_size
            fits = left >= 0
            if fits < best_fits:
                continue
            rank = left
            if overlap and candidate.cached_tokens:
                rank += overlap * candidate.cached_tokens / block_size
            rank /= candidate.blocks_total or 1
            if rank > best_rank or fits > best_fits:
                best, best_fits, best_rank = candidate, fits, rank
        return best

    def standing(self, candidate: Candidate) -> float:
        """The part of a worker's rank that no request changes, for indexes over many workers (`shortlist`)."""
        growth_tokens = (candidate.running + candidate.waiting) * self.expected_output_tokens / 2
        demand_blocks = (candidate.waiting_tokens + growth_tokens) / candidate.block_size
        return (candidate.blocks_free - demand_blocks) / (candidate.blocks_total or 1)


class RoundRobin:
    """Each in turn from a random start, whatever their load (vllm-router, nginx)."""

    def __init__(self, rng: random.Random) -> None:
        self._turn = rng.randrange(1 << 16)

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        if not candidates:
            return None
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class _Least:
    """The candidate with the least of something, ties at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def load(self, request: RequestInfo, candidate: Candidate) -> float:
        raise TypeError(f"{type(self).__name__} does not say what it minimises")

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        if not candidates:
            return None
        loads = [self.load(request, candidate) for candidate in candidates]
        least = min(loads)
        ties = [candidate for candidate, load in zip(candidates, loads, strict=True) if load == least]
        return ties[0] if len(ties) == 1 else self._rng.choice(ties)


class LeastRequests(_Least):
    """Fewest requests there (least outstanding requests: Envoy's LEAST_REQUEST over all hosts, AIBrix)."""

    def load(self, request: RequestInfo, candidate: Candidate) -> float:
        return candidate.running + candidate.waiting


class LeastTokens(_Least):
    """Fewest tokens there: in KV blocks, and still to compute (least tokens queued, as LLM gateways count)."""

    def load(self, request: RequestInfo, candidate: Candidate) -> float:
        used_blocks = candidate.blocks_total - candidate.blocks_free
        return used_blocks * candidate.block_size + candidate.waiting_tokens


class PowerOfTwo(LeastRequests):
    """The one with fewer requests of two drawn at random (Mitzenmacher 2001; smg and vllm-router)."""

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        if len(candidates) > 2:
            candidates = self._rng.sample(candidates, 2)
        return super().__call__(request, candidates)


class DynamoCost(_Least):
    """Dynamo's KV router at temperature 0: `overlap_weight * prefill blocks + decode blocks`, the least wins.

    Prefill blocks are the uncached prompt tokens there, this request's included; decode blocks those in use.
    Source: docs.nvidia.com/dynamo, components/router, "Cost calculation".
    """

    overlap_weight = 1.0

    def load(self, request: RequestInfo, candidate: Candidate) -> float:
        uncached = request.prompt_tokens - candidate.cached_tokens
        prefill_tokens = uncached + candidate.waiting_tokens + candidate.placed_tokens
        decode_blocks = candidate.blocks_total - candidate.blocks_free
        return self.overlap_weight * prefill_tokens / candidate.block_size + decode_blocks


OVERLAP_WEIGHT = 2.0  # of kv_prefix: a cached block is one not allocated, and one not sent or computed

_POLICIES: dict[str, Callable[[random.Random], DecodeChoice]] = {
    "kv_blocks": lambda rng: KVBlocks(),
    "kv_prefix": lambda rng: KVBlocks(overlap_weight=OVERLAP_WEIGHT),
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "power_of_two": PowerOfTwo,
    "least_tokens": LeastTokens,
    "dynamo_cost": DynamoCost,
}
POLICY_NAMES = tuple(_POLICIES)


def decode_choice(name: str, seed: int = 0) -> DecodeChoice:
    """A new instance of the named policy; `seed` makes its random draws repeatable. Raises ValueError."""
    try:
        make = _POLICIES[name]
    except KeyError:
        raise ValueError(f"decode choice: expected one of {', '.join(POLICY_NAMES)}, got {name!r}") from None
    return make(random.Random(seed))
