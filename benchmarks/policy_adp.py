"""Simulates attention data parallelism (ADP): ranks in lockstep, which all wait for the slowest in each iteration, so
that a prompt on one rank delays the ranks that only decode.

`gate` and `assign_longest_first` follow NVIDIA's ADP balance strategy (TensorRT-LLM tech blog 10). `level_chunks` is
our own: it does not hold prompts until all ranks have one, but cuts them so that every rank computes as many tokens.
Fleets run the last two, from `orchestrator.policy.choices.ranks`, and `ChunkWorth`, by which no chunk is shorter than
is worth a step; only this simulation runs the gate.

The setting is NVIDIA's: 8 ranks, and 16,000 requests with means of 803 tokens in and 3,653 out, 5,120 at once, at most
512 on a rank. An iteration takes `fixed_s + token_s * tokens` of the busiest rank, and `prompt_s` more, here 0, if any
rank computes prompts in it. NVIDIA publishes only the means of the lengths. Their spread and the two times are fitted
to the published throughput of the baseline, its share of the speed of light (64.9%) and the speed-up of 1.31 by waiting
for context. All other results are the model's own.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from orchestrator.policy.choices.ranks import ChunkWorth, assign_longest_first, level_chunks, pace
from orchestrator.policy.policies import ENGINE_WEIGHT


class RankView(msgspec.Struct, frozen=True):
    """One rank before an iteration."""

    generating: int  # sequences that decode one token each
    waiting_prompts: int  # assigned to this rank, not started
    has_room: bool  # for one more sequence in its batch


class GateState(msgspec.Struct, frozen=True):
    """Iterations for which prompts have been held."""

    held: int = 0  # until every rank has a prompt
    batched: int = 0  # until more prompts have arrived


def gate(
    ranks: Sequence[RankView], state: GateState, timeout_iters: int = 50, batching_wait_iters: int = 10
) -> tuple[bool, GateState]:
    """Whether prompts start in this iteration, and the next state. A `timeout_iters` of 0 never holds.

    When all ranks have room and a prompt, they start together; if all of them generate meanwhile, they wait for more
    prompts for up to `batching_wait_iters` first. Otherwise prompts are held, for up to `timeout_iters`, unless some
    rank generates nothing.
    """
    if timeout_iters <= 0 or not any(rank.waiting_prompts for rank in ranks):
        return True, GateState()
    all_generate = all(rank.generating for rank in ranks)
    if all(rank.has_room and rank.waiting_prompts for rank in ranks):
        if all_generate and state.batched < batching_wait_iters:
            return False, GateState(state.held, state.batched + 1)
        return True, GateState()
    if not all_generate or state.held >= timeout_iters:
        return True, GateState()
    return False, GateState(state.held + 1, state.batched)


class AdpSettings(msgspec.Struct, frozen=True, kw_only=True):
    strategy: Literal["round_robin", "least_tokens", "gate", "level"] = "round_robin"
    late: bool = False  # with `level`, a rank knows of the others what they had a step before
    in_turns: bool = False  # a short prompt and a long one follow each other, 0.2 and 1.8 times the mean
    in_order: bool = False  # a rank begins its prompts in the order of our engines, and not as they come
    timeout_iters: int = 50
    batching_wait_iters: int = 0
    ranks: int = 8
    requests: int = 16_000
    concurrency: int = 5_120
    max_batch: int = 512
    max_tokens: int = 8_192  # per rank and iteration
    mean_in: int = 803
    mean_out: int = 3_653
    sigma_in: float = 0.9
    sigma_out: float = 0.2
    fixed_s: float = 0.0328
    token_s: float = 1.0928e-4
    prompt_s: float = 0.0
    seed: int = 0


class AdpResult(msgspec.Struct, frozen=True):
    """`balance` is the mean, over iterations, of the ranks' mean tokens divided by their maximum. `sol_tokens_per_s`,
    the speed of light, is the throughput if every iteration's time shrank by its balance. Both are NVIDIA's
    definitions. `prompt_balance` is the same mean over the iterations in which at least one rank computes prompts.
    """

    tokens_per_s: float
    balance: float
    prompt_balance: float
    sol_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    iterations: int


class _Rank:
    __slots__ = ("backlog", "before", "finish", "generating", "steps_left", "waiting")

    def __init__(self) -> None:
        self.generating = 0
        self.finish: list[int] = []  # a heap of the iterations in which sequences end
        self.waiting: deque[list[float]] = deque()  # [prompt tokens left, output tokens, arrived at, place]
        self.backlog = 0  # prompt tokens left of all that wait
        self.steps_left = 0  # as in `pace`
        self.before = (0, 0, 0)  # what it had a step before, as `level_chunks` takes it

    @property
    def active(self) -> int:
        return self.generating + len(self.waiting)

    def end_iteration(self, iteration: int, chunk: int) -> tuple[int, list[float]]:
        """`chunk` prompt tokens were computed. Returns how many requests have ended, and when those arrived that have
        their first token."""
        ended, first = 0, []
        while self.finish and self.finish[0] <= iteration:
            heapq.heappop(self.finish)
            self.generating -= 1
            ended += 1
        self.backlog -= chunk
        while self.waiting and chunk > 0:
            prompt = self.waiting[0]
            part = min(chunk, prompt[0])
            prompt[0] -= part
            prompt[3] = -math.inf  # it has begun
            chunk -= int(part)
            if prompt[0] <= 0:
                self.waiting.popleft()
                first.append(prompt[2])
                if prompt[1] <= 1:
                    ended += 1
                    continue
                self.generating += 1
                heapq.heappush(self.finish, iteration + int(prompt[1]) - 1)
        return ended, first


def simulate_adp(settings: AdpSettings) -> AdpResult:
    """Run a closed loop: when a request ends the next one is sent, until all have ended."""
    rng = random.Random(settings.seed)
    lengths = [
        (_draw(rng, settings.mean_in, settings.sigma_in), _draw(rng, settings.mean_out, settings.sigma_out))
        for _ in range(settings.requests)
    ]
    if settings.in_turns:
        lengths = [(int(settings.mean_in * (0.2, 1.8)[at % 2]), out) for at, (_, out) in enumerate(lengths)]
    ranks = [_Rank() for _ in range(settings.ranks)]
    queue: deque[tuple[int, int, float]] = deque()
    sent, now, iteration, done = 0, 0.0, 0, 0
    held, worth = GateState(), ChunkWorth(settings.ranks)
    turn = 0
    balanced_s = balances = prompt_balances = 0.0
    prompt_iterations = 0
    ttft: list[float] = []
    while done < settings.requests:
        while sent < settings.requests and sent - done < settings.concurrency:
            queue.append((*lengths[sent], now))
            sent += 1
        turn = _fetch(settings, ranks, queue, turn)
        chunks, held = _decide(settings, ranks, held, worth.tokens(sum(rank.generating for rank in ranks)))
        tokens = [rank.generating + chunk for rank, chunk in zip(ranks, chunks, strict=True)]
        top = max(tokens)
        seconds = settings.fixed_s + settings.token_s * top + settings.prompt_s * any(chunks)
        worth.ended([rank.generating for rank in ranks], chunks, seconds)
        now += seconds
        iteration += 1
        balance = sum(tokens) / (len(tokens) * top) if top else 1.0
        balances += balance
        if any(chunks):
            prompt_balances += balance
            prompt_iterations += 1
        balanced_s += seconds * balance
        for rank, chunk in zip(ranks, chunks, strict=True):
            ended, arrived = rank.end_iteration(iteration, chunk)
            done += ended
            ttft += [now - at for at in arrived]
    ttft.sort()
    output = sum(out for _, out in lengths)
    return AdpResult(
        tokens_per_s=output / now,
        balance=balances / iteration,
        prompt_balance=prompt_balances / prompt_iterations,
        sol_tokens_per_s=output / balanced_s,
        ttft_p50_s=ttft[len(ttft) // 2],
        ttft_p99_s=ttft[int(len(ttft) * 0.99)],
        iterations=iteration,
    )


def _fetch(settings: AdpSettings, ranks: list[_Rank], queue: deque[tuple[int, int, float]], turn: int) -> int:
    """Assign queued requests to free places on the ranks: in turn, or the longest first to the rank with fewest tokens.

    Returns the next turn.
    """
    free = sum(settings.max_batch - rank.active for rank in ranks)
    batch = [queue.popleft() for _ in range(min(free, len(queue)))]
    if not batch:
        return turn
    if settings.strategy == "round_robin":
        chosen = []
        room = [settings.max_batch - rank.active for rank in ranks]
        for _ in batch:
            while room[turn % len(ranks)] <= 0:
                turn += 1
            chosen.append(turn % len(ranks))
            room[turn % len(ranks)] -= 1
            turn += 1
    else:
        tokens = [rank.generating + rank.backlog for rank in ranks]
        active = [rank.active if settings.strategy != "least_tokens" else 0 for rank in ranks]
        chosen = assign_longest_first([prompt for prompt, _, _ in batch], tokens, active)
    for (prompt, output, arrived), where in zip(batch, chosen, strict=True):
        place = arrived + (ENGINE_WEIGHT * settings.token_s * prompt if settings.in_order else 0)
        bisect.insort(ranks[where].waiting, [prompt, output, arrived, place], key=lambda each: each[3])
        ranks[where].backlog += prompt
    return turn


def _decide(settings: AdpSettings, ranks: list[_Rank], held: GateState, worth: int) -> tuple[list[int], GateState]:
    """The prompt tokens that each rank computes in this iteration, and the gate's next state. `worth`: as in `pace`."""
    if settings.strategy == "level":
        backlog = [rank.backlog for rank in ranks]
        generating, floors = [rank.generating for rank in ranks], []
        for rank in ranks:
            full = rank.active >= settings.max_batch
            floor, rank.steps_left = pace(rank.backlog, generating, full, rank.steps_left, worth)
            floors.append(floor)
        rows = list(zip(generating, backlog, floors, strict=True))
        if not settings.late:
            return level_chunks(generating, backlog, floors, settings.max_tokens), held
        chunks = []
        for at, row in enumerate(rows):
            known = [row if at == other else rank.before for other, rank in enumerate(ranks)]
            theirs, prompts, least = zip(*known, strict=True)
            chunks.append(level_chunks(theirs, prompts, least, settings.max_tokens)[at])
        for rank, row in zip(ranks, rows, strict=True):
            rank.before = row
        return chunks, held
    if settings.strategy == "gate":
        views = [RankView(rank.generating, len(rank.waiting), rank.generating < settings.max_batch) for rank in ranks]
        go, held = gate(views, held, settings.timeout_iters, settings.batching_wait_iters)
        if not go:
            return [0] * len(ranks), held
    return [_whole_prompts(rank, settings.max_tokens) for rank in ranks], held


def _whole_prompts(rank: _Rank, max_tokens: int) -> int:
    """The tokens of the whole prompts that fit into the iteration; if none does, of a part of the first one."""
    room = max_tokens - rank.generating
    total = 0
    for prompt in rank.waiting:
        if total + prompt[0] > room:
            break
        total += int(prompt[0])
    return total or min(rank.backlog, room)


def _draw(rng: random.Random, mean: int, sigma: float) -> int:
    return max(1, int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))
