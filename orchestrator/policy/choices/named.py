"""The decode choices of other projects, as references for ours, and all that a configuration can name."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType

from orchestrator.policy.decode_choice import Candidate, DecodeChoice, KVBlocks, RequestInfo


class RoundRobin(DecodeChoice):
    """Chooses the candidates in turn from a random start, whatever their load (vllm-router, nginx)."""

    def __init__(self, rng: random.Random) -> None:
        self._turn = rng.randrange(1 << 16)

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        if not candidates:
            return None
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class _Least(DecodeChoice):
    """Chooses the candidate with the least `load`, among equal ones at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    @abstractmethod
    def load(self, request: RequestInfo, candidate: Candidate) -> float:
        """The number to minimise."""

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        if not candidates:
            return None
        loads = [self.load(request, candidate) for candidate in candidates]
        least = min(loads)
        ties = [candidate for candidate, load in zip(candidates, loads, strict=True) if load == least]
        return ties[0] if len(ties) == 1 else self._rng.choice(ties)


class LeastRequests(_Least):
    """Chooses the worker with fewest requests (Envoy's LEAST_REQUEST over all hosts, AIBrix)."""

    def load(self, request: RequestInfo, candidate: Candidate) -> float:
        return candidate.running + candidate.waiting


class LeastTokens(_Least):
    """Chooses the worker with fewest tokens in KV blocks and still to compute (LLM gateways' least tokens queued)."""

    def load(self, request: RequestInfo, candidate: Candidate) -> float:
        used_blocks = candidate.blocks_total - candidate.blocks_free
        return used_blocks * candidate.block_size + candidate.waiting_tokens


class PowerOfTwo(LeastRequests):
    """Chooses the worker with fewer requests of two drawn at random (Mitzenmacher 2001; smg and vllm-router)."""

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        if len(candidates) > 2:
            candidates = self._rng.sample(candidates, 2)
        return super().__call__(request, candidates)


class DynamoCost(_Least):
    """Dynamo's KV router at temperature 0: the worker with least `overlap_weight * prefill blocks + decode blocks`.

    Prefill blocks are the uncached prompt tokens there, this request's included, in blocks. Decode blocks are in use.
    Source: docs.nvidia.com/dynamo, components/router, "Cost calculation".
    """

    overlap_weight = 1.0

    def load(self, request: RequestInfo, candidate: Candidate) -> float:
        uncached = request.prompt_tokens - candidate.cached_tokens
        prefill_tokens = uncached + candidate.waiting_tokens + candidate.placed_tokens
        decode_blocks = candidate.blocks_total - candidate.blocks_free
        return self.overlap_weight * prefill_tokens / candidate.block_size + decode_blocks


class LlmD(_Least):
    """llm-d's scorers for separate prefill and decode workers. The worker with the highest sum is chosen.

    The sum is the cached share of the prompt, with weight 2, and the shortness of the worker's queue, with weight 1: a
    linear scale from the longest queue (0) to the shortest (1). llm-d reads the queues from metrics; here they include
    the requests placed since the last report. Source:
    github.com/llm-d/llm-d-router, deploy/config/pd-epp-config.yaml, and its prefix-cache-scorer and queue-scorer.
    """

    prefix_weight, queue_weight = 2.0, 1.0

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        waiting = [candidate.waiting for candidate in candidates]
        self._longest, self._shortest = max(waiting, default=0), min(waiting, default=0)
        return super().__call__(request, candidates)

    def load(self, request: RequestInfo, candidate: Candidate) -> float:
        spread = self._longest - self._shortest
        room = (self._longest - candidate.waiting) / spread if spread else 1.0
        return -(self.prefix_weight * candidate.cached_tokens / request.prompt_tokens + self.queue_weight * room)


class PrefixHash(LeastRequests):
    """Consistent hashing with bounded loads: the worker to which the prompt's first 256 tokens hash, or the one with
    fewest requests if that worker has more than 1.25 times the mean number of requests.

    Rendezvous hashing replaces the original's hash ring. Source: github.com/lightseekorg/smg,
    model_gateway/src/policies, prefix_hash.rs with its defaults.
    """

    load_factor = 1.25

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        key = request.prefix_key
        if not candidates or key is None:
            return super().__call__(request, candidates)
        named = max(candidates, key=lambda candidate: _weight(candidate.worker_id, key))
        requests = sum(self.load(request, candidate) for candidate in candidates) + 1
        if self.load(request, named) <= self.load_factor * requests / len(candidates):
            return named
        return super().__call__(request, candidates)


def _weight(worker_id: str, prefix_key: int) -> bytes:
    return blake2b(worker_id.encode(), key=prefix_key.to_bytes(8, "little"), digest_size=8).digest()


OVERLAP_WEIGHT = 2.0  # of kv_prefix: a cached block need not be allocated, and need not be sent or computed

_POLICIES: dict[str, Callable[[random.Random], DecodeChoice]] = {
    "kv_blocks": lambda rng: KVBlocks(),
    "kv_prefix": lambda rng: KVBlocks(overlap_weight=OVERLAP_WEIGHT),
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "power_of_two": PowerOfTwo,
    "least_tokens": LeastTokens,
    "dynamo_cost": DynamoCost,
    "llm_d": LlmD,
    "prefix_hash": PrefixHash,
}
POLICY_NAMES = tuple(_POLICIES)


def decode_choice(name: str, seed: int = 0) -> DecodeChoice:
    """A new instance of the named policy; `seed` makes its random draws repeatable. Raises ValueError."""
    try:
        make = _POLICIES[name]
    except KeyError:
        raise ValueError(f"decode choice: expected one of {', '.join(POLICY_NAMES)}, got {name!r}") from None
    return make(random.Random(seed))


CONDITIONAL_TOKENS, CONDITIONAL_SHARE = 2048, 0.7


def dynamo_bypass(prompt_tokens: int, cached_tokens: int) -> bool:
    """Dynamo's conditional disaggregation: whether a prompt is prefilled on the decode worker that was chosen for it.

    It is if fewer than 2,048 tokens and less than 70% of the prompt are not cached there. Source:
    github.com/ai-dynamo/dynamo, lib/kv-router/src/conditional_disagg.rs, `isl_bounding` with its defaults.
    """
    new_tokens = max(0, prompt_tokens - cached_tokens)
    return new_tokens < CONDITIONAL_TOKENS and new_tokens / max(1, prompt_tokens) < CONDITIONAL_SHARE


LLM_D_NON_CACHED_TOKENS = 16


def llm_d_bypass(prompt_tokens: int, cached_tokens: int) -> bool:
    """llm-d's prefix-based decider: whether a prompt is prefilled on the decode worker that was chosen for it.

    It is if fewer than 16 tokens are not cached there. Source: github.com/llm-d/llm-d-router,
    deploy/config/pd-epp-config.yaml.
    """
    return prompt_tokens - cached_tokens < LLM_D_NON_CACHED_TOKENS


# Rules by name: from prompt tokens and cached tokens, whether the chosen decode worker also prefills.
BYPASSES: Mapping[str, Callable[[int, int], bool]] = MappingProxyType({"dynamo": dynamo_bypass, "llm_d": llm_d_bypass})
