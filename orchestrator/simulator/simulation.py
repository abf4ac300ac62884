"""The event loop: one `Simulation` runs one load once, on one fleet.

`router` decides, `worker` computes, `ratio_control` changes roles, `faults` kills workers, `report` makes the figures.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from orchestrator.config.settings import ConfigError
from orchestrator.policy.policies import RECALL_S
from orchestrator.simulator.engine.stay import Stay
from orchestrator.simulator.fetches import Fetches
from orchestrator.simulator.job import Job
from orchestrator.simulator.racks import Racks
from orchestrator.simulator.ratio_control import RatioControl
from orchestrator.simulator.router import Router
from orchestrator.simulator.settings import Settings
from orchestrator.simulator.trace import Load
from orchestrator.simulator.view import PoolView
from orchestrator.simulator.worker import Worker

PLACE_AGAIN_S = 0.1  # between attempts to place a request that lost its worker, as in the router
REPORT_AGE_S = 0.1  # the greatest age of load reports; the mean is half of it
DRAIN_S = 120.0  # simulated after the last arrival; requests unfinished then count as missed


class Simulation:
    """One run of a load on a fleet. Raises ConfigError for a fleet or load that cannot be simulated."""

    def __init__(self, settings: Settings, load: Load) -> None:
        profile = settings.profile
        fleet = f"fleet {settings.prefill}P{settings.decode}D"
        if settings.decode < 1 or settings.prefill < 0:
            raise ConfigError(f"{fleet}: expected at least one decode worker")
        if settings.stack.dispatch == "push" and settings.prefill == 0:
            raise ConfigError(f"{fleet}: policy {settings.stack.name} pushes prompts to prefill workers, and has none")
        if load.unit_tokens % profile.block_size:
            raise ConfigError(
                f"profile {profile.name}: block_size {profile.block_size} does not divide the load's prefix unit "
                f"of {load.unit_tokens} tokens"
            )
        if not load.arrivals:
            raise ConfigError(f"load {load.name}: no requests in it")
        self.settings, self.load = settings, load
        self.now = 0.0
        self.link_bytes_per_s = settings.profile.link_bytes_per_s
        self.racks = Racks(settings)
        self.fetches = Fetches(self, load.unit_tokens)
        self.router = Router(settings, load.unit_tokens, self, self.racks, self._end, self.fetches.begin)
        self.jobs = [Job(n, arrival, load.unit_tokens) for n, arrival in enumerate(load.arrivals)]
        self.left = len(self.jobs)
        self.usage: list[tuple[float, float, float]] = []  # (time, max, mean) block usage over decode workers
        self._events: list[tuple[float, int, Callable[..., None], Any, Any]] = []
        self._order = count()
        self.workers: dict[str, Worker] = {}
        for n in range(settings.prefill):
            self.add_worker(f"p{n}", self.router.prefill)
        for n in range(settings.decode):
            self.add_worker(f"d{n}", self.router.decode)
        self._recall_at = 0.0
        self.ratio: RatioControl | None = None
        config = settings.stack.config
        self._early_token = config.routing.first_token == "prefill"
        self._by_chunk = config.kv.transfer != "whole"
        if config.ratio.mode == "auto" and settings.prefill + settings.decode > 1:
            self.ratio = RatioControl(settings, self.router)

    def add_worker(self, name: str, view: PoolView) -> Worker:
        profile, tier_bytes = self.settings.profile, self.settings.stack.config.kv.host_tier_bytes
        host_blocks = tier_bytes // (profile.block_size * profile.kv_bytes_per_token)
        slo = self.router.slo
        tpot_s = slo.tpot_s if self.settings.stack.dispatch == "queue" else 0.0  # others' engines do not
        worker = Worker(name, profile, self.load.unit_tokens, self, self._wake_at, slo, host_blocks, tpot_s)
        self.workers[name] = worker
        view.add(worker, self.now)
        return worker

    # ---- the loop --------------------------------------------------------------------------------------------

    def at(self, time: float, action: Callable[..., None], a: Any = None, b: Any = None) -> None:
        heapq.heappush(self._events, (time, next(self._order), action, a, b))

    def run(self, progress: Callable[[int], None] | None = None) -> Simulation:
        """Run until every request has ended, or until `DRAIN_S` after the last arrival. Returns itself.

        Calls `progress` with the number of ended requests.
        """
        events, jobs = self._events, self.jobs
        upcoming, total = 0, len(jobs)
        end = jobs[-1].arrival.at + DRAIN_S
        next_tick = 0.0
        never = float("inf")
        while self.left:
            arrives = jobs[upcoming].arrival.at if upcoming < total else never
            due = events[0][0] if events else never
            if next_tick <= arrives and next_tick <= due:
                if next_tick > end:
                    break
                self.now = next_tick
                self._tick(next_tick)
                next_tick += REPORT_AGE_S
                if progress is not None:
                    progress(total - self.left)
            elif arrives <= due:
                self.now = arrives
                self._arrive(jobs[upcoming])
                upcoming += 1
            else:
                self.now, _, action, a, b = heapq.heappop(events)
                action(a, b)
        return self

    def finish_events(self) -> None:
        """Run the events that remain after all requests have ended: restarts, releases."""
        while self._events:
            self.now, _, action, a, b = heapq.heappop(self._events)
            action(a, b)

    def _wake_at(self, time: float, worker: Worker, version: int) -> None:
        heapq.heappush(self._events, (time, next(self._order), self._wake, worker, version))

    def _wake(self, worker: Worker, version: int) -> None:
        if version == worker.version:
            worker.wake(self.now)

    def _tick(self, now: float) -> None:
        """Bring load reports and cache events to the router, and let it recall jobs and change roles."""
        router = self.router
        for worker in router.prefill.workers():
            router.report(router.prefill, worker, now)
        top = total = 0.0
        decode = router.decode.workers()
        for worker in decode:
            router.report(router.decode, worker, now)
            used = worker.used_blocks(now) / worker.kv.total
            total += used
            if used > top:
                top = used
        self.usage.append((now, top, total / max(1, len(decode))))
        if router.queue:
            if now >= self._recall_at:
                self._recall_at = now + RECALL_S
                router.recall()
            router.claim_again()
        if self.ratio is not None:
            self.ratio.tick(now)

    def _arrive(self, job: Job) -> None:
        profile = self.settings.profile
        tokens = job.arrival.prompt_tokens + job.arrival.output_tokens
        if tokens > min(profile.max_model_len, profile.blocks * profile.block_size):
            self._end(job, "too_long")
        else:
            self.router.place(job)

    def _end(self, job: Job, outcome: str) -> None:
        job.outcome = outcome
        job.done_at = self.now
        self.left -= 1

    # ---- called by workers -----------------------------------------------------------------------------------

    def on_start(self, worker: Worker, stay: Stay, now: float) -> None:
        """The blocks of a stay are allocated: a prefill is bound to a decode worker, or a decode worker can receive."""
        if stay.phase == "prefill":
            job = stay.job
            if job.enqueued_at >= 0:
                self.router.predictor.observe_wait(job.uncached, job.backlog_s, now - job.enqueued_at)
                job.enqueued_at = -1.0
            self.router.bind(job, stay)
        elif stay.phase == "remote" and stay.peer is not None and stay.peer.computed_at is not None:
            self._transfer(stay.peer, stay)

    def on_prefilled(self, worker: Worker, stay: Stay, now: float) -> None:
        """A prompt is computed. Its KV is sent as soon as the decode worker has blocks for it."""
        self.router.claimed -= 1
        stay.computed_at = now
        if self._early_token and stay.job.output_tokens > 1:
            self._first(stay.job, now)
        receiver = stay.peer
        if receiver is None:
            # No decode worker took it when it started, or that worker has died.
            self.at(now, self.release, stay)
            self.at(now, self.place_again, stay.job)
        elif receiver.started:
            self._transfer(stay, receiver)

    def _transfer(self, stay: Stay, receiver: Stay) -> None:
        """Send the KV that the receiver has not cached.

        In chunks the transfer has begun when both workers had blocks, and the last chunk is sent after the prefill.
        """
        profile, now = self.settings.profile, self.now
        tokens = receiver.context - receiver.hit_tokens
        could_begin = min(now, max(stay.started_at, receiver.started_at)) if self._by_chunk else now
        begins, seconds = self.carry(self.workers[stay.worker], self.workers[receiver.worker], tokens, could_begin)
        last_s = seconds * min(1.0, profile.max_num_batched_tokens / tokens) if self._by_chunk and tokens else 0.0
        self.at(max(begins + seconds, now + last_s) + profile.link_latency_s, self._transferred, stay, receiver)

    def carry(self, source: Worker, target: Worker, tokens: int, at: float) -> tuple[float, float]:
        """KV of so many tokens passes over both workers' links, from this time on or once they are free. Returns when
        it begins, and for how long it is on its way."""
        begins = max(at, source.link_free_at, target.link_free_at)
        occupied_s = tokens * self.settings.profile.kv_bytes_per_token / self.link_bytes_per_s
        source.link_free_at = target.link_free_at = begins + occupied_s
        self.router.link_bytes_per_s.observe(self.link_bytes_per_s, self.now)
        # Between racks it is the network that is slow: a worker's own link carries other KV at the same time.
        return begins, occupied_s * self.racks.slowness(source.name, target.name)

    def _transferred(self, stay: Stay, receiver: Stay) -> None:
        if stay.peer is not receiver or receiver.peer is not stay:
            return  # one of the two has died
        source, target = self.workers[stay.worker], self.workers[receiver.worker]
        if not (source.alive and target.alive):
            return  # one of the two has died, and the router has not noticed yet
        stay.peer = receiver.peer = None
        job = receiver.job
        job.exposed_s = self.now - (stay.computed_at or self.now)
        self.router.predictor.observe_transfer(job.prompt_tokens, job.exposed_s)
        link = self.racks.link(stay.worker, receiver.worker)
        self.router.predictor.links.observe(link, receiver.context - receiver.hit_tokens, job.exposed_s)
        target.kv_arrived(receiver, self.now)
        source.release(stay, self.now)

    def release(self, stay: Stay, _: Any) -> None:
        worker = self.workers[stay.worker]
        if worker.alive:
            worker.release(stay, self.now)

    def place_again(self, job: Job, _: Any) -> None:
        if not job.outcome and not self.router.place(job, again=True):
            self.at(self.now + PLACE_AGAIN_S, self.place_again, job)

    def on_first(self, worker: Worker, stay: Stay, at: float) -> None:
        job = stay.job
        self.router.settled(job)
        if job.decoding_at is None:
            job.decoding_at = at
        if self._first(job, at) and stay.phase == "local":
            self.router.predictor.observe_local(worker.name, job.local_tokens, at - job.placed_at)

    def _first(self, job: Job, at: float) -> bool:
        """Record the first token. Returns False if the client has one already."""
        if job.first_at is not None:
            return False
        job.first_at = at + self.settings.profile.router_s
        return True

    def on_done(self, worker: Worker, stay: Stay, now: float) -> None:
        job = stay.job
        job.outcome = "ok"
        job.done_at = now + self.settings.profile.router_s
        self.left -= 1
        self.router.ended(job, worker)

    def computing_beside(self, worker: Worker) -> int:
        rack = self.racks.labels(worker.name)  # without racks all are on one host
        others = (other for other in self.workers.values() if other is not worker)
        return sum(other.busy and self.racks.labels(other.name) == rack for other in others)

    def on_load(self, worker: Worker, stay: Stay, tokens: int, now: float) -> None:
        self.fetches.load(stay, worker, tokens)

    def on_boundary(self, worker: Worker, tokens: int, seconds: float, now: float) -> None:
        """A step that computed prompt tokens has ended."""
        if worker.name in self.router.prefill:
            self.router.predictor.observe_prefill(worker.name, tokens, seconds)
            self.router.claim(worker)
