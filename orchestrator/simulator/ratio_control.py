"""Role changes in a simulated fleet: observes the load, asks `policy.ratio`, and gives workers the other role.

The counterpart of `orchestrator.fleet.ratio_controller`, and of the launcher, which carries out its decisions.
"""

from __future__ import annotations

from collections import deque

import msgspec

from orchestrator.policy.ratio.decision import RatioDecision, desired_ratio
from orchestrator.policy.ratio.load import INTERVAL_S, WINDOW_SAMPLES, LoadSample, LoadSampler, Observation
from orchestrator.simulator.router import Router
from orchestrator.simulator.settings import Settings
from orchestrator.simulator.view import decodes
from orchestrator.simulator.worker import Worker
from orchestrator.types import DesiredRatio


class RatioControl:
    """Samples the load, asks `policy.ratio`, and changes roles: a role says which new work a worker takes."""

    def __init__(self, settings: Settings, router: Router) -> None:
        config = settings.stack.config
        self._router, self._profile, self._config = router, settings.profile, config.ratio
        self._host_tokens = config.kv.host_tier_bytes // settings.profile.kv_bytes_per_token
        self._window: deque[LoadSample] = deque(maxlen=WINDOW_SAMPLES)
        self._current = DesiredRatio(settings.prefill, settings.decode, set_at=-1e9)
        self._next_at = 0.0  # a frontend observes its fleet before the load begins
        self._sampler = LoadSampler()
        self._plain: dict[str, tuple[float, int]] = {}  # by worker, so far: seconds of decode-only steps, their number
        self.decisions: list[RatioDecision] = []

    def tick(self, now: float) -> None:
        if now < self._next_at:
            return
        self._next_at, router = now + INTERVAL_S, self._router
        sample = self._sampler.sample(self._observe(now), router.predictor, router.reuse.take())
        if sample is None:
            return
        self._window.append(sample)
        went = self.decisions[-1].more if self.decisions else 0
        slo = msgspec.structs.replace(router.slo, tpot_s=router.tpot.seconds)
        decision = desired_ratio(list(self._window), self._current, self._config, slo, went=went)
        if decision is not None:
            self._apply(decision.after, now)
            self.decisions.append(decision)

    def _observe(self, now: float) -> Observation:
        router, profile = self._router, self._profile
        workers = router.decode.workers()
        running = sum(len(worker.running) for worker in workers)
        for worker in workers:
            # Steps that also compute prompts are left out, because their work counts as prefill.
            seconds, steps = self._plain.get(worker.name, (0.0, 0))
            if (new := worker.plain_steps - steps) > 0:
                self._sampler.observe_step(len(worker.running), (worker.plain_s - seconds) / new)
                self._plain[worker.name] = (worker.plain_s, worker.plain_steps)
        everyone = (*workers, *router.prefill.workers())
        link_bytes_per_s = router.link_bytes_per_s.at(now)
        generated_tokens = sum(worker.generated_by(now) for worker in everyone)
        return Observation(
            at=now,
            offered=msgspec.structs.replace(router.offered, generated_tokens=generated_tokens),
            holding=running + sum(len(worker.receiving) + len(worker.arrived) for worker in workers),
            waiting=sum(len(worker.waiting) for worker in workers),
            held_tokens=sum(worker.used_blocks(now) for worker in workers) * profile.block_size,
            worker_tokens=profile.blocks * profile.block_size,
            host_tokens=self._host_tokens,
            worker_sequences=profile.max_num_seqs,
            decode_workers=tuple(worker.name for worker in workers),
            link_s_per_token=profile.kv_bytes_per_token / link_bytes_per_s if link_bytes_per_s else 0.0,
            former=sum(decodes(worker) for worker in router.prefill.workers()),
        )

    def _apply(self, desired: DesiredRatio, now: float) -> None:
        router = self._router
        more = desired.prefill - self._current.prefill
        source, target = (router.decode, router.prefill) if more > 0 else (router.prefill, router.decode)
        for worker in sorted(source.workers(), key=_load)[: abs(more)]:  # those with the least work left
            source.remove(worker.name)
            target.add(worker, now)
            if more > 0:
                router.claim(worker)
        self._current = desired


def _load(worker: Worker) -> tuple[int, str]:
    return (worker.pending_tokens + worker.kv.used, worker.name)
