"""Choices of a worker for a request: the one that decodes it, and the one from whose cache its beginning is fetched.

A decode choice sees the request and the candidates; ours goes by free KV blocks. It does not decide whether the decode
worker prefills the request (`placement`), and does not keep the candidates up to date (`fleet.view`). Other projects'
choices are in `choices/named`, which has the names of all.

A fetch takes two engine steps and the time that its bytes take over the link. What only the host tier of the holder has
is loaded into its device first, which takes a step more and its bytes' time. It must be worth more than the errors of
these predictions: a fetch that fails has cost its time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from orchestrator.policy.choices.ranks import assign_longest_first

EXPECTED_OUTPUT_TOKENS = 256  # of a request, until the first ones have ended
# Of a fetch.
FIXED_S = 0.01  # messages, and a step of either engine beyond those that it takes anyhow
MIN_GAIN_S = 0.01
MAX_SHARE = 0.5  # of the time of computing the same tokens
NEAR_SHARE = 0.8  # of the largest gain: among holders that give so much, the least busy one is asked
MAX_HOLDERS = 8  # that are compared
# Of a link before its first large WRITE, and of host memory before the first load. They are high, so that the first try
# is made, which tells the rate: where no prompt is pushed, nothing else would.
PRIOR_BYTES_PER_S = PRIOR_LOAD_BYTES_PER_S = 1e10
# A fetch is given up after the time in which its tokens are computed twice, within these bounds.
MIN_WAIT_S, MAX_WAIT_S = 0.25, 2.0


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


class Candidate(msgspec.Struct, frozen=True, gc=False):
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


class KVBlocks(DecodeChoice):
    """Chooses the worker with the largest share of its KV pool left after its requests and this one have grown.

    From the free blocks it subtracts this prompt and its expected output, the prompts still waiting there, and half of
    `expected_output_tokens` for every other sequence there (a running one is half done on average). A worker with
    fewer than 0 blocks left would have to preempt; it is chosen only if all others would too. Ties rotate, so that an
    idle fleet fills evenly.

    `overlap_weight` is the credit for each block of the prompt that is cached there: 0 ignores the cache (`kv_blocks`),
    1 counts the block that need not be allocated, 2 also the transfer or computation that it saves (`kv_prefix`). Time
    for which a LoRA adapter holds requests up counts as the blocks that could be computed meanwhile.
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
            if candidate.adapter_blocks:
                rank -= candidate.adapter_blocks
            rank /= candidate.blocks_total or 1
            if rank > best_rank or fits > best_fits:
                best, best_fits, best_rank = candidate, fits, rank
        return best

    @property
    def static_score(self) -> Callable[[Candidate], float]:
        return self._static_score

    def expect_output(self, tokens: float) -> None:
        self.expected_output_tokens = int(tokens)

    def _static_score(self, candidate: Candidate) -> float:
        growth_tokens = (candidate.running + candidate.waiting) * self.expected_output_tokens / 2
        demand_blocks = (candidate.waiting_tokens + growth_tokens) / candidate.block_size
        return (candidate.blocks_free - demand_blocks) / (candidate.blocks_total or 1)


class RankChoice(DecodeChoice):
    """Chooses as another decode choice does, with `adp` among the groups whose steps get no longer by that, and then
    among the ranks of that worker's group, which step together."""

    def __init__(self, choose: DecodeChoice, ranks: Literal["adp", "least_tokens", "round_robin"]) -> None:
        self._choose, self._ranks, self._turn = choose, ranks, 0

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        chosen = self._choose(request, self._beside_others(request, candidates))
        if chosen is None or not chosen.group:
            return chosen
        group = [candidate for candidate in candidates if candidate.group == chosen.group]
        blocks = blocks_for(request.prompt_tokens, chosen.block_size)
        ranks = [rank for rank in group if blocks <= rank.blocks_free] or group
        if self._ranks == "round_robin":
            self._turn += 1
            return ranks[self._turn % len(ranks)]
        ranks.sort(key=lambda rank: rank is not chosen)  # the first of equal ones is taken
        active = [_active(rank) for rank in ranks]
        if self._ranks == "least_tokens":
            active = [0] * len(ranks)
        # Of what a rank has cached, it computes and stores nothing.
        tokens = [_tokens(rank) - rank.cached_tokens for rank in ranks]
        return ranks[assign_longest_first([request.prompt_tokens], tokens, active)[0]]

    def _beside_others(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those of groups in which the request makes no step longer, since a rank with room for it has fewer sequences
        than another, and those that have a part of it cached. All where no group is so, where another group has shorter
        steps even with the request, or where a worker steps alone."""
        groups: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            groups.setdefault(candidate.group, []).append(candidate)
        if self._ranks != "adp" or len(groups) < 2 or "" in groups:
            return candidates
        tokens = request.prompt_tokens + min(request.max_new_tokens, EXPECTED_OUTPUT_TOKENS)
        with_it: list[int] = []  # sequences of each group's fullest rank
        no_longer: dict[str, int] = {}
        for name, ranks in groups.items():
            most, blocks = max(map(_active, ranks)), blocks_for(tokens, ranks[0].block_size)
            if any(_active(it) < min(most, it.max_num_seqs) and blocks <= it.blocks_free for it in ranks):
                no_longer[name] = most
            with_it.append(no_longer.get(name, most + 1))
        chosen = {name for name, most in no_longer.items() if most <= min(with_it)}
        return [it for it in candidates if it.group in chosen or it.cached_tokens] if chosen else candidates

    @property
    def static_score(self) -> Callable[[Candidate], float] | None:
        return self._choose.static_score

    def expect_output(self, tokens: float) -> None:
        self._choose.expect_output(tokens)


def _active(rank: Candidate) -> int:
    return rank.running + rank.waiting


def _tokens(rank: Candidate) -> int:
    """The tokens that it holds, and those that it has yet to compute."""
    return (rank.blocks_total - rank.blocks_free) * rank.block_size + rank.waiting_tokens + rank.placed_tokens


# ---- from whose cache --------------------------------------------------------------------------------------------


class Holder(msgspec.Struct, frozen=True):
    """A worker that has the first `tokens` of a prompt cached."""

    worker_id: str
    tokens: int
    requests: int  # running and waiting there
    step_s: float = 0.0  # of its engine
    link_extra_s: float = 0.0  # by which what it sends takes longer than over the fastest link
    host_tokens: int = 0  # of `tokens`, those that only its host tier has
    load_s_per_token: float = 0.0  # from there to its device

    @property
    def delay_s(self) -> float:
        load_s = self.step_s + self.host_tokens * self.load_s_per_token if self.host_tokens else 0.0
        return self.step_s + self.link_extra_s + load_s


def load_s_per_token(token_bytes: int, loaded_bytes: int, seconds: float, ranks: int = 1) -> float:
    """Of a host tier whose ranks, which load at once, have so far loaded so much in so long."""
    bytes_per_s = loaded_bytes / seconds if loaded_bytes and seconds else PRIOR_LOAD_BYTES_PER_S
    return token_bytes / (ranks * bytes_per_s)


def could_gain(tokens: int, compute_s_per_token: float) -> bool:
    """Whether fetching so many tokens could be worth it over the fastest link."""
    return tokens * compute_s_per_token * MAX_SHARE > FIXED_S + MIN_GAIN_S


def gain_s(tokens: int, delay_s: float, compute_s_per_token: float, link_s_per_token: float) -> float:
    """Seconds that fetching so many tokens saves; 0 where it is not worth it. `delay_s`: of this holder."""
    compute_s = tokens * compute_s_per_token
    fetch_s = FIXED_S + delay_s + tokens * link_s_per_token
    gain = compute_s - fetch_s
    return gain if gain > MIN_GAIN_S and fetch_s < MAX_SHARE * compute_s else 0.0


def choose_holder(
    holders: Iterable[Holder], cached_tokens: int, compute_s_per_token: float, link_s_per_token: float
) -> Holder | None:
    """The holder to fetch from, for a worker that has `cached_tokens` of the prompt itself. None: it computes them."""
    gains = [
        (gain_s(holder.tokens - cached_tokens, holder.delay_s, compute_s_per_token, link_s_per_token), holder)
        for holder in holders
        if holder.tokens > cached_tokens
    ]
    most = max((gain for gain, _ in gains), default=0.0)
    near = [(holder.requests, -gain, holder.worker_id, holder) for gain, holder in gains if gain >= NEAR_SHARE * most]
    return min(near)[-1] if most > 0 else None


def wait_limit_s(tokens: int, compute_s_per_token: float) -> float:
    """After so long a fetch is given up, and its tokens are computed."""
    return min(MAX_WAIT_S, max(MIN_WAIT_S, 2 * tokens * compute_s_per_token))
