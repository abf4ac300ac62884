"""Simulates a fleet of lockstep groups: prompts are computed by groups of prefill ranks, answers by groups of decode
ranks, and every step of a group lasts as long as that of its rank with most tokens.

*Ours* is what a fleet runs: ranks claim prompts from one queue and level them, and the decode choice takes a group and
then a rank of it (`policy.claims`, `policy.choices.ranks`). The field's ways choose both ranks at arrival. The times of
a step are those that `policy_adp` fitted to NVIDIA's published figures. Not modelled: transfers, prefix hits, and which
experts tokens go to, which no router decides.

    python -m benchmarks.policy_groups TRACE... [--ways ours round_robin] [--requests 9000]

`--rates` prints the time to first token at these rates (requests/s) instead.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from bisect import insort
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count, product
from pathlib import Path
from statistics import fmean

from benchmarks.policy_adp import AdpSettings
from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.choices.ranks import level, pace
from orchestrator.policy.claims import (
    AFFINITY_WINDOW,
    CLAIM_BATCHES,
    choose_claims,
    claim_budget,
    claims_as,
    fair_share_tokens,
    takes_any_size,
)
from orchestrator.policy.decode_choice import Candidate, DecodeChoice, RankChoice, RequestInfo, blocks_for
from orchestrator.policy.policies import QUEUE_WEIGHT, delay_s
from orchestrator.simulator.trace import Arrival, Load, at_rate, first, read_trace
from orchestrator.types import Claimer, WindowJob

OURS, VLLM = "ours", "vllm"
WAYS = (OURS, VLLM, "round_robin", "least_requests", "power_of_two", "llm_d", "dynamo_cost")
PREFILL, DECODE = (4, 8), (4, 16)  # groups, and ranks of each
MAX_TOKENS, MAX_SEQS = 8_192, 512  # of a rank in a step; the first is vLLM's default on large GPUs
BLOCKS, BLOCK_SIZE = 65_536, 16  # of a rank's KV memory
TTFT_S, TPOT_S = 2.0, 0.05  # objectives
SHARES = (0.9, 0.99)
WARM_UP = 0.1  # share of the load's time that is not counted
BEGIN = 100.0  # requests per second, where the search begins
STEP = 1.03  # ratio of two rates that are distinguished
TIMES = AdpSettings()


class Job:
    __slots__ = ("arrival", "done_at", "first_at", "info", "left", "rank", "score")

    def __init__(self, number: int, arrival: Arrival) -> None:
        self.arrival, self.left = arrival, arrival.prompt_tokens
        self.info = RequestInfo(str(number), arrival.prompt_tokens, arrival.output_tokens, arrival.at)
        compute_s = arrival.prompt_tokens * TIMES.token_s
        self.score = arrival.at + delay_s(compute_s, QUEUE_WEIGHT, TTFT_S)
        self.rank: Rank | None = None  # that decodes it, where it was chosen at arrival
        self.first_at = self.done_at = math.inf

    @property
    def blocks(self) -> int:
        return blocks_for(self.arrival.prompt_tokens + self.arrival.output_tokens, BLOCK_SIZE)

    @property
    def in_time(self) -> bool:
        tpot_s = (self.done_at - self.first_at) / max(1, self.arrival.output_tokens - 1)
        return self.first_at - self.arrival.at <= TTFT_S and (self.first_at == self.done_at or tpot_s <= TPOT_S)


class Rank:
    """`prompts` are to be computed, in their order; `waiting` are to decode, `running` do, by the step of their end."""

    def __init__(self, name: str, group: str) -> None:
        self.name, self.group = name, group
        self.prompts: deque[Job] = deque()
        self.backlog = self.used = self.promised = 0  # tokens; KV blocks; requests that will come here
        self.waiting: deque[Job] = deque()
        self.running: list[tuple[int, int, Job]] = []
        self.done_at = 0.0  # when it expects to have computed its prompts

    def candidate(self) -> Candidate:
        waiting = len(self.waiting) + len(self.prompts) + self.promised
        free = max(0, BLOCKS - self.used)
        there = len(self.running), waiting, self.backlog
        return Candidate(self.name, BLOCKS, free, BLOCK_SIZE, *there, max_num_seqs=MAX_SEQS, group=self.group)


class Group:
    def __init__(self, name: str, ranks: int) -> None:
        self.role = name[0]
        self.ranks = [Rank(f"{name}.{rank}", name) for rank in range(ranks)]
        self.busy, self.steps = False, 0
        self.told = [0] * ranks  # prompt tokens that each has left after the step that begins
        self.stepped_s = self.lost_s = self.least_s = 0.0  # summed over the ranks


class VllmBalance(DecodeChoice):
    """vLLM's internal balance: the rank with the smallest sum of running and four times its waiting requests."""

    def __call__(self, request: RequestInfo, candidates: Sequence[Candidate]) -> Candidate | None:
        return min(candidates, key=lambda it: 4 * it.waiting + it.running, default=None)


def chooser(way: str, seed: int) -> DecodeChoice:
    if way == OURS:
        return RankChoice(decode_choice("kv_prefix", seed), "adp")
    return VllmBalance() if way == VLLM else decode_choice(way, seed)


class Fleet:
    """`run` a load to its end."""

    def __init__(self, load: Load, way: str, max_tokens: int = MAX_TOKENS) -> None:
        """`max_tokens`: of prompts, that a rank computes in a step."""
        self.now, self._order, self._max_tokens = 0.0, count(), max_tokens
        self.jobs = [Job(number, arrival) for number, arrival in enumerate(load.arrivals)]
        self._counts_from = WARM_UP * self.jobs[-1].arrival.at
        self.prefill, self.decode = (
            [Group(f"{role}{n}", ranks) for n in range(groups)]
            for role, (groups, ranks) in {"p": PREFILL, "d": DECODE}.items()
        )
        self._pull = way == OURS
        self._choose_prefill, self._choose_decode = chooser(way, 1), chooser(way, 0)
        self._of = {rank.name: (rank, group) for group in self.prefill + self.decode for rank in group.ranks}
        self._queue: list[tuple[float, int, Job]] = []
        self._queued_tokens = 0
        self._ends: list[tuple[float, int, Group, list[int]]] = []
        self._random = random.Random(0)
        self._there = {"p": 0, "d": 0}  # requests that are to be computed, and that decode or wait for it

    def run(self) -> Fleet:
        for job in self.jobs:
            while self._ends and self._ends[0][0] <= job.arrival.at:
                self._end_step()
            self.now = job.arrival.at
            self._arrive(job)
        while self._ends:
            self._end_step()
        return self

    def _arrive(self, job: Job) -> None:
        self._there["p"] += 1
        if self._pull:
            insort(self._queue, (job.score, next(self._order), job))
            self._queued_tokens += job.arrival.prompt_tokens
            ranks = [rank for group in self.prefill for rank in group.ranks]
            self._random.shuffle(ranks)
            for rank in sorted(ranks, key=lambda rank: 0.0 if self._claimer(rank) == "idle" else rank.done_at):
                self._claim(rank)
                if not self._queue:
                    break
        else:
            job.rank = self._choose(self._choose_decode, job, self.decode)
            job.rank.promised += 1
            self._give(self._choose(self._choose_prefill, job, self.prefill), [job])

    def _choose(self, choice: DecodeChoice, job: Job, groups: list[Group]) -> Rank:
        chosen = choice(job.info, [rank.candidate() for group in groups for rank in group.ranks])
        assert chosen is not None
        return self._of[chosen.worker_id][0]

    def _claim(self, rank: Rank) -> None:
        while self._claims(rank) and self._claimer(rank) != "busy":
            pass

    def _claims(self, rank: Rank) -> bool:
        """Whether it got jobs."""
        claimer, memory = self._claimer(rank), BLOCKS * BLOCK_SIZE
        budget = claim_budget(CLAIM_BATCHES * self._max_tokens, rank.backlog, claimer != "busy", memory)
        if budget <= 0 or not self._queue:
            return False
        window = [job for _, _, job in self._queue[:AFFINITY_WINDOW]]
        ranks = (other for group in self.prefill for other in group.ranks if other is not rank)
        others = sum(self._claimer(other) == "idle" for other in ranks)
        idle = takes_any_size(claimer, others > 0)
        share = fair_share_tokens(self._queued_tokens, others)
        seen = [WindowJob(job.info.id, job.score, job.left, self.now - job.arrival.at) for job in window]
        claimed = set(choose_claims(seen, budget, idle, TIMES.token_s, share_tokens=share))
        jobs = [job for job in window if job.info.id in claimed]
        self._queued_tokens -= sum(job.left for job in jobs)
        left = [entry for entry in self._queue[:AFFINITY_WINDOW] if entry[2].info.id not in claimed]
        self._queue[:AFFINITY_WINDOW] = left
        if jobs:
            self._give(rank, jobs)
        return bool(jobs)

    def _claimer(self, rank: Rank) -> Claimer:
        return claims_as(len(rank.prompts), rank.backlog, self._max_tokens, BLOCKS * BLOCK_SIZE, lockstep=True)

    def _give(self, rank: Rank, jobs: list[Job]) -> None:
        rank.prompts += jobs
        rank.backlog += sum(job.left for job in jobs)
        rank.done_at = self.now + rank.backlog * TIMES.token_s
        self._begin(self._of[rank.name][1])

    def _begin(self, group: Group) -> None:
        """Start the group's next step, if it has one to take and takes none."""
        if group.busy:
            return
        for rank in group.ranks:
            while rank.waiting and len(rank.running) < MAX_SEQS:
                job = rank.waiting.popleft()
                ends = group.steps + max(1, job.arrival.output_tokens - 1)
                heapq.heappush(rank.running, (ends, next(self._order), job))
        chunks = self._chunks(group)
        tokens = [chunk + len(rank.running) for chunk, rank in zip(chunks, group.ranks, strict=True)]
        if most := max(tokens):
            step_s = TIMES.fixed_s + TIMES.token_s * most
            group.busy = True
            if self._counts_from <= self.now <= self.jobs[-1].arrival.at:
                group.stepped_s += step_s * len(tokens)
                group.lost_s += step_s * (len(tokens) - sum(tokens) / most)
                group.least_s += step_s * max(0, len(tokens) - self._there[group.role])
            heapq.heappush(self._ends, (self.now + step_s, next(self._order), group, chunks))

    def _chunks(self, group: Group) -> list[int]:
        """Prompt tokens that each rank computes in the next step: ours by what all ranks told of it a step before."""
        most, none = self._max_tokens, [0] * len(group.ranks)
        if self._pull and any(group.told):
            most = level(none, group.told, [pace(left, none, False, 0)[0] for left in group.told], most)
        chunks = [min(rank.backlog, most) for rank in group.ranks]
        group.told = [rank.backlog - chunk for rank, chunk in zip(group.ranks, chunks, strict=True)]
        return chunks

    def _end_step(self) -> None:
        self.now, _, group, chunks = heapq.heappop(self._ends)
        group.busy, group.steps = False, group.steps + 1
        for rank, chunk in zip(group.ranks, chunks, strict=True):
            while rank.running and rank.running[0][0] <= group.steps:
                job = heapq.heappop(rank.running)[2]
                job.done_at = self.now
                self._there["d"] -= 1
                rank.used -= job.blocks
            rank.backlog -= chunk
            rank.done_at = self.now + rank.backlog * TIMES.token_s
            while chunk:
                job = rank.prompts[0]
                part = min(chunk, job.left)
                job.left -= part
                chunk -= part
                if not job.left:
                    rank.prompts.popleft()
                    self._prefilled(job)
        self._begin(group)  # at once, as engines do: what is claimed now is computed in the step after it
        if self._pull and group in self.prefill:
            for rank in sorted(group.ranks, key=lambda rank: rank.backlog):
                self._claim(rank)

    def _prefilled(self, job: Job) -> None:
        job.first_at = self.now
        self._there["p"] -= 1
        if job.arrival.output_tokens <= 1:
            job.done_at = self.now
        chosen = job.rank
        if chosen is not None:
            chosen.promised -= 1
        if job.done_at < math.inf:
            return
        rank = chosen or self._choose(self._choose_decode, job, self.decode)
        self._there["d"] += 1
        rank.waiting.append(job)
        rank.used += job.blocks
        self._begin(self._of[rank.name][1])

    @property
    def counted(self) -> list[Job]:
        return [job for job in self.jobs if job.arrival.at >= self._counts_from]

    @property
    def attained(self) -> float:
        return sum(job.in_time for job in self.counted) / len(self.counted)

    def lost(self, groups: Sequence[Group]) -> float:
        """Of the time in which these groups take steps, the share that their ranks wait for the one with most tokens:
        one less the mean of their tokens divided by the most of one, weighted by the steps' times."""
        return sum(group.lost_s for group in groups) / sum(group.stepped_s for group in groups)

    def least(self, groups: Sequence[Group]) -> float:
        """The same of an oracle's steps at these times: all requests of the fleet, however few, are in the group that
        takes the step, each on a rank of its own while there are ranks, and all compute equal parts of it."""
        return sum(group.least_s for group in groups) / sum(group.stepped_s for group in groups)


def goodput(load: Load, way: str, share: float, max_tokens: int) -> tuple[float, Fleet]:
    """The highest rate (requests per second) at which this share is in time, within `STEP`, and the fleet at it."""
    runs: dict[float, Fleet] = {}

    def meets(rate: float) -> bool:
        runs[rate] = Fleet(at_rate(load, rate), way, max_tokens).run()
        return runs[rate].attained >= share

    rate, factor = BEGIN, 1.5
    while not meets(rate):
        rate /= factor
    while factor**2 > STEP:
        while meets(rate * factor):
            rate *= factor
        factor = math.sqrt(factor)
    return rate, runs[rate]


def row(case: tuple[Load, str, float, int]) -> str:
    load, way, share, max_tokens = case
    rate, fleet = goodput(*case)
    both = fleet.prefill + fleet.decode
    lost = [*map(fleet.lost, (fleet.prefill, fleet.decode, both)), fleet.least(both)]
    shown = " | ".join(f"{part:.0%}" for part in lost)
    return f"| {load.name} | {max_tokens:,} | {share:.0%} | `{way}` | {rate:.0f} | {shown} |"


def at_a_rate(case: tuple[Load, str, float, int]) -> str:
    load, way, rate, max_tokens = case
    fleet = Fleet(at_rate(load, rate), way, max_tokens).run()
    ttfts = sorted(job.first_at - job.arrival.at for job in fleet.counted)
    shown = " | ".join(f"{ttft:.3f}" for ttft in (fmean(ttfts), *(ttfts[len(ttfts) * at // 100] for at in (50, 99))))
    return f"| {load.name} | {max_tokens:,} | {rate:g} | `{way}` | {fleet.attained:.1%} | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="files of Mooncake or Azure")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--max-tokens", nargs="+", type=int, default=[2_048, MAX_TOKENS])
    parser.add_argument("--requests", type=int, default=9_000)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    loads = [first(read_trace(trace), args.requests) for trace in args.traces]
    columns = "in time | way | goodput, requests/s | lost, prefill | decode | all | at least"
    if args.rates:
        columns = "requests/s | way | in time | TTFT, mean, s | P50 | P99"
    print(f"| load | tokens in a step | {columns} |\n|{'---|' * (3 + columns.count('|'))}")
    cases = product(loads, args.ways, args.rates or args.shares, args.max_tokens)
    with ProcessPoolExecutor(args.processes) as pool:
        for line in pool.map(at_a_rate if args.rates else row, cases):
            print(line, flush=True)


if __name__ == "__main__":
    main()
