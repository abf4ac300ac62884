"""Prefixes that workers fetch from other workers' caches before they compute a prompt, of either role.

`policy/predict/fetch.py` decides, when a job is claimed or placed locally. A fetch takes its time of both workers'
links, after what these carry already, and is given up after a bound, as in a real worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from orchestrator.policy.predict.fetch import FIXED_S, PRIOR_BYTES_PER_S, Holder, choose_holder, wait_limit_s
from orchestrator.simulator.job import Job, Stay
from orchestrator.simulator.racks import Racks
from orchestrator.simulator.router import Router
from orchestrator.simulator.settings import Settings
from orchestrator.simulator.worker import Worker


class Simulated(Protocol):
    """What a fetch needs of the simulation."""

    now: float
    settings: Settings
    link_bytes_per_s: float
    racks: Racks
    workers: dict[str, Worker]
    router: Router

    def at(self, time: float, action: Callable[..., None], a: Any = None, b: Any = None) -> None: ...

    def place_again(self, job: Job, _: Any) -> None: ...


class Fetches:
    def __init__(self, sim: Simulated, unit_tokens: int) -> None:
        """`unit_tokens`: of the load's prefix keys."""
        self._sim, self._unit_tokens = sim, unit_tokens
        self.fetched_tokens = 0
        self.outcomes = Counter[str]()

    def begin(self, stay: Stay, worker: Worker) -> bool:
        """Fetch what `worker` lacks of this prompt, and submit the stay then. False: it is to be submitted now."""
        sim, router, profile = self._sim, self._sim.router, self._sim.settings.profile
        here = stay.job.hits.get(worker.name, 0)
        rate = router.link_bytes_per_s.at(sim.now) or PRIOR_BYTES_PER_S
        s_per_token = router.predictor.s_per_token
        holder = choose_holder(self._holders(stay, worker, here), here, s_per_token, profile.kv_bytes_per_token / rate)
        if holder is None:
            return False
        source, units = sim.workers[holder.worker_id], holder.tokens // self._unit_tokens
        lacking = holder.tokens - min(holder.tokens, worker.kv.hit_units(stay.keys) * self._unit_tokens)
        came, ends = 0, sim.now + FIXED_S + source.profile.step_s
        if source.kv.hit_units(stay.keys[:units]) == units:
            begins = max(sim.now, source.link_free_at, worker.link_free_at)
            occupied_s = lacking * profile.kv_bytes_per_token / sim.link_bytes_per_s
            source.link_free_at = worker.link_free_at = begins + occupied_s
            sent = begins + occupied_s * sim.racks.slowness(source.name, worker.name)
            came, ends = units, ends + sent - sim.now + profile.link_latency_s
        given_up = sim.now + wait_limit_s(holder.tokens, s_per_token)
        outcome = "fetched" if came and ends <= given_up else "late" if came else "missed"
        self.outcomes[outcome] += 1
        if outcome == "fetched":
            self.fetched_tokens += lacking
            stay.expected_hit_tokens = holder.tokens
        worker.fetching[stay] = None
        worker.pending_tokens += (tokens := stay.context - here)
        keys = stay.keys[:units] if outcome == "fetched" else ()
        sim.at(min(ends, given_up), self._end, stay, (worker, keys, tokens))
        return True

    def _holders(self, stay: Stay, asker: Worker, here: int) -> list[Holder]:
        workers = ((self._sim.workers[name], tokens) for name, tokens in stay.job.hits.items())
        return [
            Holder(
                it.name,
                min(tokens, (stay.context - 1) // self._unit_tokens * self._unit_tokens),
                len(it.running) + len(it.waiting),
                it.profile.step_s,
                self._sim.router.predictor.links.extra_s(self._sim.racks.link(it.name, asker.name), tokens - here),
            )
            for it, tokens in workers
            if it.alive and it is not asker and self._sim.racks.permits(it.name, asker.name)
        ]

    def _end(self, stay: Stay, begun: tuple[Worker, tuple[int, ...], int]) -> None:
        worker, keys, tokens = begun
        if stay not in worker.fetching:  # it has died
            self._sim.router.claimed -= stay.phase == "prefill"
            self._sim.at(self._sim.now, self._sim.place_again, stay.job)
            return
        del worker.fetching[stay]
        worker.pending_tokens -= tokens
        worker.kv.store(keys)
        worker.submit(stay, self._sim.now)
