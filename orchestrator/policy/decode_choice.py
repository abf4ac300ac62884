"""Which decode worker takes a request: named policies over the candidates' live state.

Not responsible for whether the request is prefilled there (`placement`), nor for keeping the state live
(`fleet`). A policy is a callable; what little it remembers (a rotation, a random generator) is its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from orchestrator.types import RequestInfo


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
    """

    def __init__(self, expected_output_tokens: int = 256) -> None:
        self.expected_output_tokens = expected_output_tokens
        self._turn = 0

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        count = len(candidates)
        if not count:
            return None
        output = min(request.max_new_tokens, self.expected_output_tokens)
        start = self._turn % count
        best: Candidate | None = None
        best_rank = (False, float("-inf"))
        for offset in range(count):
            candidate = candidates[(start + offset) % count]
            left = self._blocks_left(request.prompt_tokens + output, candidate)
            rank = (left >= 0, left / max(1, candidate.blocks_total))
            if best is None or rank > best_rank:
                best, best_rank = candidate, rank
        self._turn += 1
        return best

    def _blocks_left(self, own_tokens: int, candidate: Candidate) -> int:
        block_size = candidate.block_size
        sequences = candidate.running + candidate.waiting
        growth_tokens = sequences * self.expected_output_tokens // 2
        return (
            candidate.blocks_free
            - blocks_for(candidate.waiting_tokens, block_size)
            - blocks_for(own_tokens, block_size)
            - growth_tokens // block_size
        )


_POLICIES: dict[str, Callable[[random.Random], DecodeChoice]] = {
    "kv_blocks": lambda rng: KVBlocks(),
}


def decode_choice(name: str, seed: int = 0) -> DecodeChoice:
    """A new instance of the named policy; `seed` makes its random draws repeatable. Raises ValueError."""
    try:
        make = _POLICIES[name]
    except KeyError:
        known = ", ".join(sorted(_POLICIES))
        raise ValueError(f"decode choice: expected one of {known}, got {name!r}") from None
    return make(random.Random(seed))
