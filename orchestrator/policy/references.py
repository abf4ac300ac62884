"""Decode choices of the field, as references to measure ours against."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence

from orchestrator.policy.candidate import Candidate, DecodeChoice
from orchestrator.types import RequestInfo


class RoundRobin(DecodeChoice):
    """Each in turn from a random start, whatever their load (vllm-router, nginx)."""

    def __init__(self, rng: random.Random) -> None:
        self._turn = rng.randrange(1 << 16)

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        if not candidates:
            return None
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class _Least(DecodeChoice):
    """The candidate with the least of something, ties at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    @abstractmethod
    def load(self, request: RequestInfo, candidate: Candidate) -> float:
        """What is minimised."""

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


CONDITIONAL_TOKENS, CONDITIONAL_SHARE = 2048, 0.7


def dynamo_bypass(prompt_tokens: int, cached_tokens: int) -> bool:
    """Dynamo's conditional disaggregation: whether a prompt is prefilled on the decode worker that was chosen for it.

    With few tokens that are not cached there, and few of the prompt's. Source: github.com/ai-dynamo/dynamo,
    lib/kv-router/src/conditional_disagg.rs, `isl_bounding` with its defaults.
    """
    new_tokens = max(0, prompt_tokens - cached_tokens)
    return new_tokens < CONDITIONAL_TOKENS and new_tokens / max(1, prompt_tokens) < CONDITIONAL_SHARE
