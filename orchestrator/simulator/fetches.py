"""Prefixes that workers fetch from other workers' caches before they compute a prompt, of either role, and what their
host tiers load.

`policy/decode_choice.py` decides, when a job is claimed or placed locally. A fetch takes its time of both workers'
links, after what these carry already, and is given up after a bound, as in a real worker. What only the host tier of
the holder has is loaded first. An engine loads from its own when it admits a prompt, as vLLM does, so that a prompt
that waits does not lose what was loaded for it. One worker's loads follow one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from orchestrator.policy.decode_choice import (
    FIXED_S,
    PRIOR_BYTES_PER_S,
    Holder,
    choose_holder,
    load_s_per_token,
    wait_limit_s,
)
from orchestrator.simulator.engine.stay import Stay
from orchestrator.simulator.job import Job
from orchestrator.simulator.racks import Racks
from orchestrator.simulator.router import Router
from orchestrator.simulator.settings import Settings
from orchestrator.simulator.worker import Worker


class Simulated(Protocol):
    """What a fetch needs of the simulation."""

    now: float
    settings: Settings
    racks: Racks
    workers: dict[str, Worker]
    router: Router

    def at(self, time: float, action: Callable[..., None], a: Any = None, b: Any = None) -> None: ...

    def place_again(self, job: Job, _: Any) -> None: ...

    def carry(self, source: Worker, target: Worker, tokens: int, at: float) -> tuple[float, float]: ...


class Fetches:
    def __init__(self, sim: Simulated, unit_tokens: int) -> None:
        """`unit_tokens`: of the load's prefix keys."""
        self._sim, self._unit_tokens = sim, unit_tokens
        self.fetched_tokens = self.loaded_tokens = 0  # from other workers; from the own host tier
        self._fetches = sim.settings.stack.config.kv.fetch == "auto"
        self.outcomes = Counter[str]()

    def begin(self, stay: Stay, worker: Worker) -> bool:
        """Fetch what `worker` lacks of this prompt, and submit the stay then. False: it is to be submitted now."""
        sim, router, profile = self._sim, self._sim.router, self._sim.settings.profile
        here = stay.job.hits.get(worker.name, 0)
        rate = router.link_bytes_per_s.at(sim.now) or PRIOR_BYTES_PER_S
        s_per_token = router.predictor.s_per_token
        holders = self._holders(stay, worker, here) if self._fetches else []
        holder = choose_holder(holders, here, s_per_token, profile.kv_bytes_per_token / rate)
        if holder is None:
            return False
        source, units = sim.workers[holder.worker_id], holder.tokens // self._unit_tokens
        lacking = holder.tokens - min(holder.tokens, worker.kv.hit_units(stay.keys) * self._unit_tokens)
        came, ends = 0, sim.now + FIXED_S + source.profile.step_s
        if source.kv.held_units(stay.keys[:units]) == units:
            on_device = source.kv.hit_units(stay.keys[:units])
            loaded_at = (
                self._loaded_at(source, (units - on_device) * self._unit_tokens) if on_device < units else sim.now
            )
            begins, seconds = sim.carry(source, worker, lacking, loaded_at)
            came, ends = units, ends + begins + seconds - sim.now + profile.link_latency_s
        given_up = sim.now + wait_limit_s(holder.tokens, s_per_token)
        outcome = "fetched" if came and ends <= given_up else "late" if came else "missed"
        self.outcomes[outcome] += 1
        if outcome == "fetched":
            self.fetched_tokens += lacking
            stay.expected_hit_tokens = holder.tokens
        self._wait(stay, worker, here, stay.keys[:units] if outcome == "fetched" else (), min(ends, given_up))
        return True

    def _wait(self, stay: Stay, worker: Worker, here: int, keys: Sequence[int], until: float) -> None:
        worker.fetching[stay] = None
        worker.pending_tokens += (tokens := stay.context - here)
        self._sim.at(until, self._end, stay, (worker, keys, tokens))

    def load(self, stay: Stay, worker: Worker, tokens: int) -> None:
        """Of the host tier of `worker`, which has given the stay its blocks."""
        self.loaded_tokens += tokens
        self._sim.at(self._loaded_at(worker, tokens), self._loaded, stay, worker)

    def _loaded(self, stay: Stay, worker: Worker) -> None:
        if stay in worker.receiving:  # else it has died
            worker.kv_arrived(stay, self._sim.now)

    def _loaded_at(self, worker: Worker, tokens: int) -> float:
        """When so many tokens will have been loaded from the worker's host tier, in an engine's step of their own."""
        profile = self._sim.settings.profile
        load_s = tokens * profile.kv_bytes_per_token / profile.host_bytes_per_s
        worker.loads_end_at = max(self._sim.now + profile.step_s, worker.loads_end_at) + load_s
        return worker.loads_end_at

    def _holders(self, stay: Stay, asker: Worker, here: int) -> list[Holder]:
        workers = ((self._sim.workers[name], tokens) for name, tokens in stay.job.hits.items())
        return [
            Holder(
                it.name,
                min(tokens, (stay.context - 1) // self._unit_tokens * self._unit_tokens),
                len(it.running) + len(it.waiting),
                it.profile.step_s,
                self._sim.router.predictor.links.extra_s(self._sim.racks.link(it.name, asker.name), tokens - here),
                self._host_tokens(it, stay, tokens),
                load_s_per_token(it.profile.kv_bytes_per_token, round(it.profile.host_bytes_per_s), 1.0),
            )
            for it, tokens in workers
            if it.alive and it is not asker and self._sim.racks.permits(it.name, asker.name)
        ]

    def _host_tokens(self, worker: Worker, stay: Stay, tokens: int) -> int:
        """Of the prompt's first `tokens` there, those that only its host tier has, as the router believes."""
        if (index := self._sim.router.index) is None:
            return 0
        units = min(tokens, stay.context - 1) // self._unit_tokens
        return (units - index.blocks_on_device(worker.name, stay.keys, units)) * self._unit_tokens

    def _end(self, stay: Stay, begun: tuple[Worker, Sequence[int], int]) -> None:
        worker, keys, tokens = begun
        if stay not in worker.fetching:  # it has died
            self._sim.router.claimed -= stay.phase == "prefill"
            self._sim.at(self._sim.now, self._sim.place_again, stay.job)
            return
        del worker.fetching[stay]
        worker.pending_tokens -= tokens
        worker.kv.store(keys)
        worker.submit(stay, self._sim.now)
