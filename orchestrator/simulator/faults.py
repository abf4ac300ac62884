"""Failures in a simulated fleet: workers that die at given times and come back."""

from __future__ import annotations

from functools import partial

from orchestrator.config.settings import ConfigError
from orchestrator.simulator.engine.stay import Stay
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.view import PoolView
from orchestrator.simulator.worker import Worker

NOTICED_S = 1.0


def kill(sim: Simulation, name: str, at: float, down_s: float) -> None:
    """Kill a worker at `at` seconds, for `down_s` seconds; the router learns of it after `NOTICED_S`. Raises
    ConfigError if the fleet has no such worker."""
    if name not in sim.workers:
        raise ConfigError(f"worker {name}: not in this fleet; expected one of {', '.join(sim.workers)}")
    sim.at(at, partial(_kill, sim, sim.workers[name]), down_s)


def _kill(sim: Simulation, worker: Worker, down_s: float, _: None) -> None:
    if not worker.alive:
        return
    # A worker that is changing roles is in no view. The ratio control puts it into one.
    view = next((view for view in (sim.router.prefill, sim.router.decode) if worker.name in view), None)
    if view is not None:
        view.remove(worker.name)
    if sim.router.index is not None:
        sim.router.index.forget(worker.name)
    lost = worker.fail()
    sim.at(sim.now + NOTICED_S, partial(_noticed, sim), worker, lost)
    sim.at(sim.now + max(down_s, NOTICED_S), partial(_restart, sim), worker, view)


def _noticed(sim: Simulation, worker: Worker, lost: list[Stay]) -> None:
    """The receivers of its KV compute those prompts themselves; its other requests are placed again."""
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


def _restart(sim: Simulation, worker: Worker, view: PoolView | None) -> None:
    worker.alive = True
    if view is not None:
        view.add(worker, sim.now)
        sim.router.claim(worker)
