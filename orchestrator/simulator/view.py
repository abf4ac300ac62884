"""The simulated router's view of a pool of workers: load reports of a given age, and the requests placed since.

The counterpart of `orchestrator.fleet.view`, over simulated workers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.claims import claim_budget, claim_limits, most_claimed
from orchestrator.policy.decode_choice import Candidate, DecodeChoice, blocks_for
from orchestrator.policy.predict.adapters import AdapterPlaces, with_placed
from orchestrator.policy.shortlist import SHORTLIST_FROM, Shortlist
from orchestrator.simulator.racks import Racks
from orchestrator.simulator.worker import Worker


@dataclass(slots=True)
class _Entry:
    worker: Worker
    report: tuple[int, int, int, int, dict[int, int]]  # free, running, waiting, waiting tokens, requests by adapter
    placed: int = 0
    placed_blocks: int = 0
    placed_tokens: int = 0
    promised: int = 0
    promised_blocks: int = 0
    candidate: Candidate | None = None
    adapters: list[int] = field(default_factory=list)  # of the requests placed since


class PoolView:
    """For each worker, its load at the last call of `reported`, and the requests placed there since."""

    def __init__(self, choose: DecodeChoice, racks: Racks) -> None:
        self._racks = racks
        self._entries: dict[str, _Entry] = {}
        self.adapters = AdapterPlaces()
        self._shortlist = Shortlist(choose.static_score) if choose.static_score is not None else None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def worker(self, name: str) -> Worker:
        return self._entries[name].worker

    def workers(self) -> list[Worker]:
        return [entry.worker for entry in self._entries.values()]

    def add(self, worker: Worker, now: float) -> None:
        self._entries[worker.name] = _Entry(worker, (worker.profile.blocks, 0, 0, 0, {}))
        self.reported(worker, now)

    def remove(self, name: str) -> None:
        self.adapters.remove(name)
        if self._entries.pop(name, None) is not None and self._shortlist is not None:
            self._shortlist.remove(name)

    def reported(self, worker: Worker, now: float) -> None:
        entry = self._entries[worker.name]
        free = worker.kv.total - worker.used_blocks(now) + worker.uncomputed_blocks()
        waiting = len(worker.waiting) + len(worker.receiving) + len(worker.arrived) + len(worker.fetching)
        there = worker.running.requests(chain(worker.waiting, worker.receiving, worker.arrived, worker.fetching))
        report = (free, len(worker.running), waiting, worker.pending_tokens, there)
        if report == entry.report and not (entry.placed or entry.adapters) and entry.candidate is not None:
            return
        entry.report = report
        entry.placed = entry.placed_blocks = entry.placed_tokens = 0
        entry.adapters = []
        self._changed(entry)

    def placed(self, name: str, prompt_tokens: int, compute_tokens: int, adapter: int = 0) -> None:
        entry = self._entries.get(name)
        if entry is None:
            return
        entry.placed += 1
        entry.placed_blocks += blocks_for(prompt_tokens, entry.worker.profile.block_size)
        entry.placed_tokens += compute_tokens
        if adapter:
            entry.adapters.append(adapter)
        self._changed(entry)

    def expect(self, name: str, adapter: int) -> None:
        """This worker is about to load an adapter, unless it has it."""
        if adapter and name in self._entries:
            self._entries[name].adapters.append(adapter)
            self._changed(self._entries[name])

    def promised(self, name: str, prompt_tokens: int, sign: int = 1) -> None:
        """Count a request that is bound to this worker and has not been sent to it yet; with sign -1, uncount it."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.promised += sign
            entry.promised_blocks += sign * blocks_for(prompt_tokens, entry.worker.profile.block_size)
            self._changed(entry)

    def candidates(self, cached_tokens: Mapping[str, int], adapter: int = 0, near: str = "") -> list[Candidate]:
        """Of many also the best of the rack in which the worker `near` is, and some for this adapter. Only those that
        KV may pass to from `near`, which is one of them itself only where there is no other."""
        if self._shortlist is not None and len(self._entries) >= SHORTLIST_FROM:
            known = dict.fromkeys(self.adapters.some(adapter), 0) if adapter else {}
            known |= {name: n for name, n in cached_tokens.items() if name in self._entries}
            found = self._shortlist.pick(known, self._racks.names(near) if near else ())
        else:
            found = []
            for name, entry in self._entries.items():
                candidate = entry.candidate or self._changed(entry)
                if name in cached_tokens:
                    candidate = msgspec.structs.replace(candidate, cached_tokens=cached_tokens[name])
                found.append(candidate)
        if not near:
            return found
        others = [candidate for candidate in found if candidate.worker_id != near]
        return self._racks.permitted(near, others or found)

    def _changed(self, entry: _Entry) -> Candidate:
        free, running, waiting, waiting_tokens, there = entry.report
        profile = entry.worker.profile
        there = with_placed(there, entry.adapters)
        self.adapters.update(entry.worker.name, profile.adapter_slots, there, waiting_tokens)
        entry.candidate = candidate = Candidate(
            entry.worker.name,
            profile.blocks,
            max(0, free - entry.placed_blocks - entry.promised_blocks),
            profile.block_size,
            running,
            waiting + entry.placed + entry.promised,
            waiting_tokens,
            placed_tokens=entry.placed_tokens,
            max_num_seqs=profile.max_num_seqs,
        )
        if self._shortlist is not None:
            self._shortlist.update(candidate, self._racks.names(candidate.worker_id))
        return candidate


def limits_of_claims(worker: Worker, slo: SLOConfig, s_per_token: float) -> tuple[int, int, bool]:
    """Prompt tokens, and jobs, that a prefill worker may claim now, and whether it does as an idle one."""
    free_tokens = (worker.kv.free + worker.uncomputed_blocks()) * worker.profile.block_size
    held, others = prefills(worker), decodes(worker)
    idle = not (held or others)
    most = most_claimed(worker.profile.max_num_batched_tokens, slo, worker.claimed.seconds, s_per_token, others > 0)
    budget = claim_budget(most, worker.pending_tokens, idle, free_tokens)
    return *claim_limits(held, budget, idle, free_tokens, sys.maxsize), idle


def prefills(worker: Worker) -> int:
    """How many prompts it computes, or will."""
    return len(worker.waiting) + len(worker.prefilling) + len(worker.fetching)


def decodes(worker: Worker) -> int:
    """How many requests decode there, or will once their KV has come."""
    return len(worker.running) - len(worker.prefilling) + len(worker.receiving) + len(worker.arrived)
