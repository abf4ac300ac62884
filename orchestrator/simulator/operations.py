"""What happens to a simulated fleet beside its load: role changes by the ratio policy, failures and restarts."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from orchestrator.config.settings import RatioConfig
from orchestrator.policy.ratio import LoadSample, LoadSampler, Observation, desired_ratio, samples_in_window
from orchestrator.simulator.job import FleetError
from orchestrator.simulator.stay import Stay
from orchestrator.simulator.view import PoolView
from orchestrator.simulator.worker import Worker
from orchestrator.types import DesiredRatio

if TYPE_CHECKING:
    from orchestrator.simulator.simulation import Simulation


class RatioControl:
    """Samples the load, asks `policy.ratio`, and changes roles by draining, as the launcher does."""

    def __init__(self, sim: Simulation, config: RatioConfig) -> None:
        self._sim, self._config = sim, config
        self._overflow = sim.settings.stack.placement == "cost"
        self._samples = samples_in_window(self._config)
        self._window: deque[LoadSample] = deque(maxlen=self._samples)
        self._current = DesiredRatio(sim.settings.prefill, sim.settings.decode, set_at=-1e9)
        self._next_at = self._config.interval_s
        self._sampler = LoadSampler(sim.router.slo.tpot_s, sim.settings.profile.step_s)
        self._plain: dict[str, tuple[float, int]] = {}  # by worker: seconds and steps that only decoded, so far
        self._moving: list[tuple[Worker, PoolView]] = []
        self.changes: list[tuple[float, int, int]] = []
        sim.on_tick.append(self.tick)

    def tick(self, now: float) -> None:
        self._finish_moves()
        if now < self._next_at:
            return
        self._next_at = now + self._config.interval_s
        if (sample := self._sampler.sample(self._observe(now), self._sim.router.predictor)) is not None:
            self._window.append(sample)
        if self._moving or len(self._window) < self._samples:
            return
        desired = desired_ratio(list(self._window), self._current, self._config, self._overflow)
        if desired is not None:
            self._apply(desired)
            self.changes.append((now, desired.prefill, desired.decode))

    def _observe(self, now: float) -> Observation:
        router, profile = self._sim.router, self._sim.settings.profile
        workers = router.decode.workers()
        running = sum(len(worker.running) for worker in workers)
        for worker in workers:
            # Steps that also prefill are left out: that work is counted as prefill.
            seconds, steps = self._plain.get(worker.name, (0.0, 0))
            if (new := worker.plain_steps - steps) > 0:
                self._sampler.observe_step(len(worker.running), (worker.plain_s - seconds) / new)
                self._plain[worker.name] = (worker.plain_s, worker.plain_steps)
        return Observation(
            at=now,
            offered=router.offered,
            queued_prefill_tokens=router.queue_tokens,
            holding=running + sum(len(worker.receiving) + len(worker.arrived) for worker in workers),
            waiting=sum(len(worker.waiting) for worker in workers),
            held_tokens=sum(worker.used_blocks(now) for worker in workers) * profile.block_size,
            worker_tokens=profile.blocks * profile.block_size,
            worker_sequences=profile.max_num_seqs,
        )

    def _apply(self, desired: DesiredRatio) -> None:
        router = self._sim.router
        more = desired.prefill - self._current.prefill
        source, target = (router.decode, router.prefill) if more > 0 else (router.prefill, router.decode)
        # Those with the least to finish are ready soonest.
        for worker in sorted(source.workers(), key=_load)[: abs(more)]:
            source.remove(worker.name)
            self._moving.append((worker, target))
        self._current = desired

    def _finish_moves(self) -> None:
        for move in list(self._moving):
            worker, target = move
            if worker.idle and worker.alive:
                self._moving.remove(move)
                target.add(worker, self._sim.now)
                self._sim.router.claim(worker)


class Faults:
    """Kills workers at given times and brings them back. Nobody is told but by what a router would notice."""

    def __init__(self, sim: Simulation, noticed_s: float = 1.0) -> None:
        self._sim = sim
        self._noticed_s = noticed_s

    def kill(self, name: str, at: float, down_s: float) -> None:
        """Raises FleetError for a worker that is not there."""
        if name not in self._sim.workers:
            raise FleetError(f"worker {name}: not in this fleet; expected one of {', '.join(self._sim.workers)}")
        self._sim.at(at, self._kill, name, down_s)

    def _kill(self, name: str, down_s: float) -> None:
        sim, worker = self._sim, self._sim.workers[name]
        if not worker.alive:
            return
        # A worker between two roles is in no view; whoever moves it will put it into one.
        view = next((view for view in (sim.router.prefill, sim.router.decode) if name in view), None)
        if view is not None:
            view.remove(name)
        if sim.router.index is not None:
            sim.router.index.forget(name)
        lost = worker.fail()
        sim.at(sim.now + self._noticed_s, self._noticed, worker, lost)
        sim.at(sim.now + max(down_s, self._noticed_s), self._restart, worker, view)

    def _noticed(self, worker: Worker, lost: list[Stay]) -> None:
        """Whoever received from it computes for itself; whoever decoded there goes on elsewhere."""
        sim = self._sim
        for other in sim.workers.values():
            for receiver in [*other.receiving, *other.waiting]:
                source = receiver.peer
                if source is not None and source.worker is worker:
                    source.peer = receiver.peer = None
                    other.kv_lost(receiver, sim.now)
        for stay in lost:
            job, peer = stay.request, stay.peer
            if stay.phase == "prefill":
                sim.router.claimed -= 1
                if not stay.started:
                    sim.at(sim.now, sim.replace, job)
                continue
            job.generated = min(job.generated + stay.emitted, job.arrival.output_tokens - 1)
            if job.first_at is not None and job.first_at > sim.now:
                job.first_at = None
            if peer is None:
                sim.at(sim.now, sim.replace, job)
                continue
            peer.peer = stay.peer = None
            if peer.computed_at is not None:  # else the prefill worker places it again when it has computed it
                sim.at(sim.now, sim.release, peer)
                sim.at(sim.now, sim.replace, job)

    def _restart(self, worker: Worker, view: PoolView | None) -> None:
        worker.alive = True
        if view is not None:
            view.add(worker, self._sim.now)
            self._sim.router.claim(worker)


def _load(worker: Worker) -> Any:
    return (worker.pending_tokens + worker.kv.used, worker.name)
