"""The simulated engine's scheduler: continuous batching over real block accounting. Pure: no clock, no I/O.

It follows vLLM's V1 scheduler where load balancing notices it: running requests first, chunked prefill within a token
budget, preemption by recomputation, blocks held while KV is awaited or still being pushed. It does not know how KV is
transferred.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter

import msgspec

from orchestrator.config.simulated import Simulated
from orchestrator.policy.choices.steps import StepTimes
from orchestrator.types import FinishReason
from workers.engine import InvalidEngineRequest, Phase
from workers.load.board import Board
from workers.sim.caches import SimAdapters, SimPrefixCache
from workers.sim.request import SimRequest, SimState


class Scheduled(msgspec.Struct, frozen=True):
    request: SimRequest
    tokens: int


class Sampled(msgspec.Struct, frozen=True):
    """A request's result of a step: its next token, and why it finished if it did."""

    request: SimRequest
    token: int
    first: bool
    finish: FinishReason | None
    stop_token: int | None = None


class SimScheduler:
    """Owns the blocks. Every block is either free or counted in exactly one request of `requests`."""

    def __init__(self, config: Simulated, board: Board | None = None, tpot_s: float = 0.0) -> None:
        """`board`: of the group whose ranks step together. `tpot_s`: the objective of those that decode beside prompts
        for other engines; 0: none."""
        self.config, self.board, self._times = config, board, StepTimes(tpot_s)
        self.blocks_free = config.blocks
        self.cache = SimPrefixCache(config.blocks)
        self.adapters = SimAdapters(config)
        self.requests: dict[str, SimRequest] = {}
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []
        self.awaiting: set[SimRequest] = set()

    @property
    def waiting_count(self) -> int:
        """Requests that wait to run, including those that wait for remote KV."""
        return len(self.waiting) + len(self.awaiting)

    def tokens_left(self) -> dict[str, int]:
        """Prompt tokens still to be computed, by key, of requests that run and have no token yet."""
        return {request.key: request.context - request.computed for request in self.running if not request.generated}

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def add(self, request: SimRequest) -> None:
        """Raises InvalidEngineRequest for a request that could never run here."""
        context, limit = request.context, self.config.max_model_len
        if request.key in self.requests:
            raise InvalidEngineRequest(f"key {request.key} is in use")
        if not request.prompt:
            raise InvalidEngineRequest("the prompt has no tokens; the simulated engine takes token prompts only")
        if context >= limit:
            raise InvalidEngineRequest(f"the prompt has {context} tokens, the longest sequence is {limit}")
        if self.blocks_for(context + 1) > self.config.blocks:
            needed = self.blocks_for(context + 1)
            raise InvalidEngineRequest(f"the prompt needs {needed} KV blocks, the engine has {self.config.blocks}")
        if request.phase is Phase.PREFILL:
            request.max_tokens = 1
        request.max_tokens = min(request.max_tokens, limit - context)
        self.requests[request.key] = request
        if request.adapter:
            self.adapters.use.began(request.key, request.adapter)
        insort(self.waiting, request, key=attrgetter("order"))

    def schedule(self, paused: bool = False) -> tuple[list[Scheduled], list[SimRequest]]:
        """The next batch, and the requests that now hold blocks to receive KV into. None if `paused`."""
        most = self.config.max_num_batched_tokens
        budget = 0 if paused else most
        chunk = self._paced() if self.board is None else self.board.budget(*self._work([]), most)
        self._prompt_budget = budget if chunk is None else chunk
        batch: list[Scheduled] = []
        receiving: list[SimRequest] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            if not (tokens := self._tokens(request, budget)):
                index += 1
                continue
            while not self._reserve(request, request.computed + tokens):
                # The only running request would preempt itself again and again while waiting ones hold its blocks.
                if len(self.running) == 1 and self._reclaim(request):
                    continue
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                batch.append(self._scheduled(request, tokens))
                budget -= tokens
                index += 1
        if not preempted:
            without_slot: list[SimRequest] = []
            self._admit(batch, budget, receiving, without_slot)
            self.waiting.extendleft(reversed(without_slot))
        if self.board is not None:
            self.board.plan(*self._work(batch), full=len(self.running) >= self.config.max_num_seqs)
        return batch, receiving

    def _admit(
        self, batch: list[Scheduled], budget: int, receiving: list[SimRequest], without_slot: list[SimRequest]
    ) -> None:
        """Takes those whose LoRA adapter has no slot out of `waiting`: others overtake them."""
        while self.waiting and budget > 0:
            request = self.waiting[0]
            if not self.adapters.fits(request.adapter, (running.adapter for running in self.running)):
                without_slot.append(self.waiting.popleft())
                continue
            if request.kv_source is not None:
                # Reserve all blocks of the prompt before asking for its KV, as a push needs a place to land.
                if not self._reserve(request, len(request.prompt)):
                    return
                self.waiting.popleft()
                request.enter(SimState.AWAITING_KV)
                self.awaiting.add(request)
                receiving.append(request)
                continue
            if len(self.running) >= self.config.max_num_seqs:
                return
            self._take_cached(request)
            if not (tokens := self._tokens(request, budget)):
                return
            if not self._reserve(request, request.computed + tokens):
                # Waiting requests that received KV hold blocks: without this, two of them could wait for each other.
                if self.running or not self._reclaim(request):
                    return
                continue
            self.waiting.popleft()
            request.enter(SimState.RUNNING)
            self.running.append(request)
            batch.append(self._scheduled(request, tokens))
            budget -= tokens

    def _paced(self) -> int | None:
        """Prompt tokens to compute in the next step beside those that decode; None: as many as fit."""
        prefills = any(request.phase is Phase.PREFILL for request in (*self.running, *self.waiting))
        decodes = any(request.context - request.computed <= 1 for request in self.running)
        return self._times.prompt_tokens() if prefills and decodes else None

    def _work(self, batch: list[Scheduled]) -> tuple[int, int]:
        """Tokens to decode in a step, and those of prompts to compute, once this batch is computed."""
        done = {item.request.key: item.tokens for item in batch}
        there = [request for request in (*self.running, *self.waiting) if request.kv_source is None]
        left = [request.context - request.computed - done.get(request.key, 0) for request in there]
        return sum(tokens <= 1 for tokens in left), sum(tokens for tokens in left if tokens > 1)

    def _tokens(self, request: SimRequest, budget: int) -> int:
        """The tokens of a request in the next batch."""
        left = request.context - request.computed
        return min(left, budget) if left == 1 else min(left, budget, self._prompt_budget)

    def _scheduled(self, request: SimRequest, tokens: int) -> Scheduled:
        self._prompt_budget -= tokens if request.context - request.computed > 1 else 0
        return Scheduled(request, tokens)

    def complete(self, batch: list[Scheduled], seconds: float = 0.0) -> list[Sampled]:
        """Account for a batch that ran for so long. Requests that left `running` meanwhile get no token."""
        sampled, prompts = [], prompt_tokens(batch)
        self._times.ended(prompts, sum(item.tokens for item in batch) - prompts, seconds)
        for item in batch:
            request = item.request
            if request.state is not SimState.RUNNING:
                continue
            request.computed += item.tokens
            self._store(request, request.computed - item.tokens)
            if request.computed == request.context:
                sampled.append(self._sample(request))
        if any(s.finish is not None for s in sampled):
            self.running = [r for r in self.running if r.state is SimState.RUNNING]
        return sampled

    def _sample(self, request: SimRequest) -> Sampled:
        position = request.resume_tokens + request.generated
        token, finish, stop_token = request.stream.token(position), None, None
        request.generated += 1
        if position >= request.min_tokens:
            if request.eos_token_id is not None and position >= request.stream.eos_at:
                token, finish = request.eos_token_id, FinishReason.STOP
            elif token in request.stop_token_ids:
                finish, stop_token = FinishReason.STOP, token
        if finish is None and request.generated >= request.max_tokens:
            finish = FinishReason.LENGTH
        first = request.generated == 1
        if finish is not None and request.phase is Phase.PREFILL:
            request.enter(SimState.PUSHING)
            self.adapters.use.ended(request.key)
        elif finish is not None:
            self.free(request)
        return Sampled(request, token, first, finish, stop_token)

    def kv_arrived(self, request: SimRequest) -> None:
        """The whole prompt's KV has arrived: only its last token is computed again, to sample the next."""
        request.computed = request.external_tokens = len(request.prompt)
        self._store(request, 0)
        if request.computed == request.context:
            request.computed -= 1
        self._requeue(request)

    def _take_cached(self, request: SimRequest) -> None:
        """Count the prompt's cached tokens, at each attempt to admit it until it holds blocks. Its last token is always
        computed, to sample the next."""
        if request.blocks == 0:
            usable = (request.context - 1) // self.config.block_size
            request.cached_tokens = self.cache.hit_blocks(request.prefix[:usable]) * self.config.block_size
            request.computed, request.external_tokens = request.cached_tokens, 0

    def _store(self, request: SimRequest, before: int) -> None:
        block_size = self.config.block_size
        if new := request.prefix[before // block_size : request.computed // block_size]:
            self.cache.store(new)

    def kv_failed(self, request: SimRequest) -> None:
        """No KV will arrive: the prompt is computed here."""
        self._release_blocks(request)
        self._requeue(request)

    def _requeue(self, request: SimRequest) -> None:
        self.awaiting.discard(request)
        request.kv_source = None
        request.enter(SimState.WAITING)
        self.waiting.appendleft(request)

    def leave(self, request: SimRequest) -> None:
        """Take a request out of scheduling. Its blocks stay reserved until `free`."""
        self._unschedule(request)
        self.adapters.use.ended(request.key)
        if request.state is not SimState.LEAVING:
            request.enter(SimState.LEAVING)

    def free(self, request: SimRequest) -> None:
        """Forget a request, and return its blocks. Idempotent."""
        if self.requests.pop(request.key, None) is not None:
            self._unschedule(request)
            self.adapters.use.ended(request.key)
            self._release_blocks(request)
            request.state = SimState.LEAVING

    def _unschedule(self, request: SimRequest) -> None:
        if request.state is SimState.WAITING and request in self.waiting:
            self.waiting.remove(request)
        elif request.state is SimState.RUNNING and request in self.running:
            self.running.remove(request)
        self.awaiting.discard(request)

    def _preempt(self, request: SimRequest) -> None:
        self._release_blocks(request)
        request.computed = request.pushed_blocks = 0
        request.preemptions += 1
        request.enter(SimState.WAITING)
        self.waiting.appendleft(request)

    def _reclaim(self, wanting: SimRequest) -> bool:
        """Drop the received KV of the last waiting request that holds any. Returns whether there was one."""
        for request in reversed(self.waiting):
            if request is not wanting and request.blocks:
                self._release_blocks(request)
                request.computed = request.external_tokens = 0
                return True
        return False

    def _reserve(self, request: SimRequest, tokens: int) -> bool:
        missing = self.blocks_for(tokens) - request.blocks
        if missing > self.blocks_free:
            return False
        if missing > 0:
            request.blocks += missing
            self.blocks_free -= missing
        return True

    def _release_blocks(self, request: SimRequest) -> None:
        self.blocks_free += request.blocks
        request.blocks = 0


def prompt_tokens(batch: list[Scheduled]) -> int:
    return sum(item.tokens for item in batch if item.tokens != 1 or not item.request.generated)
