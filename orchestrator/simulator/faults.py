"""Failures in a simulated fleet: workers that die at given times and come back."""

from __future__ import annotations

from orchestrator.config.settings import ConfigError
from orchestrator.simulator.job import Stay
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.view import PoolView
from orchestrator.simulator.worker import Worker

NOTICED_S = 1.0


class Faults:
    """Kills workers at given times and restarts them. The router learns of a death after `NOTICED_S`."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def kill(self, name: str, at: float, down_s: float) -> None:
        """Kill a worker at `at` seconds, for `down_s` seconds. Raises ConfigError if the fleet has no such worker."""
        if name not in self._sim.workers:
            raise ConfigError(f"worker {name}: not in this fleet; expected one of {', '.join(self._sim.workers)}")
        self._sim.at(at, self._kill, name, down_s)

    def slow_links(self, at: float, seconds: float, factor: float) -> None:
        """Let all links carry `1 / factor` of their bytes per second for so long."""
        link_bytes_per_s = self._sim.settings.profile.link_bytes_per_s
        self._sim.at(at, self._set_links, link_bytes_per_s / factor)
        self._sim.at(at + seconds, self._set_links, link_bytes_per_s)

    def _set_links(self, link_bytes_per_s: float, _: None) -> None:
        self._sim.link_bytes_per_s = link_bytes_per_s

    def _kill(self, name: str, down_s: float) -> None:
        sim, worker = self._sim, self._sim.workers[name]
        if not worker.alive:
            return
        # A worker that is changing roles is in no view. The ratio control puts it into one.
        view = next((view for view in (sim.router.prefill, sim.router.decode) if name in view), None)
        if view is not None:
            view.remove(name)
        if sim.router.index is not None:
            sim.router.index.forget(name)
        lost = worker.fail()
        sim.at(sim.now + NOTICED_S, self._noticed, worker, lost)
        sim.at(sim.now + max(down_s, NOTICED_S), self._restart, worker, view)

    def _noticed(self, worker: Worker, lost: list[Stay]) -> None:
        """The receivers of its KV compute those prompts themselves; its other requests are placed again."""
        sim = self._sim
        for other in sim.workers.values():
            for receiver in [*other.receiving, *other.waiting]:
                source = receiver.peer
                if source is not None and source.worker == worker.name:
                    source.peer = receiver.peer = None
                    other.kv_lost(receiver, sim.now)
        for stay in lost:
            job, peer = stay.job, stay.peer
            if stay.phase == "prefill":
                sim.router.claimed -= 1
                if not stay.started:
                    sim.at(sim.now, sim.place_again, job)
                continue
            job.generated = min(job.generated + stay.emitted, job.arrival.output_tokens - 1)
            if job.first_at is not None and job.first_at > sim.now:
                job.first_at = None
            if peer is None:
                sim.at(sim.now, sim.place_again, job)
                continue
            peer.peer = stay.peer = None
            if peer.computed_at is not None:  # else the request is placed again when its prefill ends
                sim.at(sim.now, sim.release, peer)
                sim.at(sim.now, sim.place_again, job)

    def _restart(self, worker: Worker, view: PoolView | None) -> None:
        worker.alive = True
        if view is not None:
            view.add(worker, self._sim.now)
            self._sim.router.claim(worker)
