"""One simulated worker: an engine in simulated time, its links, and what it fetches.

A run of the engine's steps is one event, which arrivals cut. A worker has no clock: callers pass the time.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor, log2
from typing import Any, Protocol

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.choices.steps import prompt_tokens_beside
from orchestrator.policy.claims import BROUGHT_BY
from orchestrator.policy.predict.estimates import LatestObjective
from orchestrator.simulator.engine.engine import Engine
from orchestrator.simulator.engine.profile import Profile
from orchestrator.simulator.engine.stay import Events, Stay

ITL_BUCKETS_PER_OCTAVE = 16


class WorkerEvents(Events, Protocol):
    def on_boundary(self, worker: Any, tokens: int, seconds: float, now: float) -> None:
        """A step of `seconds` that computed this many prompt tokens has ended."""

    def computing_beside(self, worker: Any) -> int:
        """Other workers that compute a step now."""

    def on_load(self, worker: Any, stay: Stay, tokens: int, now: float) -> None:
        """A stay that has its blocks waits for so many tokens of the worker's host tier."""


class Worker(Engine):
    """Computes the stays that are submitted to it. It calls `schedule(time, worker, version)` to be woken at a time,
    unless its version has changed by then."""

    def __init__(
        self,
        name: str,
        profile: Profile,
        unit_tokens: int,
        sim: WorkerEvents,
        schedule: Callable[[float, Worker, int], None],
        slo: SLOConfig,
        host_blocks: int = 0,
        tpot_s: float = 0.0,
    ) -> None:
        """`tpot_s`: the objective of those that decode beside prompts of prefill stays; 0: none."""
        super().__init__(profile, unit_tokens, sim, host_blocks)
        self.name, self.tpot_s = name, tpot_s
        self.claimed = LatestObjective(slo.ttft_s, BROUGHT_BY)  # of the jobs that it claimed
        self._sim, self._schedule_wake = sim, schedule
        self.alive = True
        self.plain_s, self.plain_steps = 0.0, 0  # of steps that only decoded
        self.itl_buckets: dict[int, int] = {}
        self.link_free_at = self.loads_end_at = 0.0
        self.fetching: dict[Stay, None] = {}  # submitted once their prefixes have come; in `pending_tokens`, too
        self.version = 0
        self.busy = False
        if profile.slowed_beside:
            self.batch.max_run_steps = 1  # the neighbours of each step are its own

    # ---- called by the simulation ----------------------------------------------------------------------------

    def submit(self, stay: Stay, now: float) -> None:
        stay.worker = self.name
        stay.from_step = self._next_step(now, self.profile.steps_ahead)
        self.add(stay)
        if not self.blocked:
            self._kick(now)

    def kv_arrived(self, stay: Stay, now: float) -> None:
        # With steps ahead, the next step that is scheduled looks for KV. Its output says that it came, and as many
        # steps are scheduled by then.
        ahead = self.profile.steps_ahead
        stay.from_step = self._next_step(now, 2 * ahead + 1 if ahead else 0)
        self.receive(stay)
        self._kick(now)

    def kv_lost(self, stay: Stay, now: float) -> None:
        """The source of a "remote" stay has died."""
        self.lose(stay)
        self._kick(now)

    def release(self, stay: Stay, now: float) -> None:
        self.free(stay)
        if self.blocked:
            self._kick(now)

    def fail(self) -> list[Stay]:
        """Die. Returns the stays that had work left here."""
        self.alive = self.busy = False
        self.version += 1
        self.fetching.clear()
        return self.clear()

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.arrived or self.receiving or self.held or self.fetching)

    def used_blocks(self, now: float) -> int:
        """Blocks in use now, including those allocated so far in the current run of steps."""
        if self._can_be_cut():
            return self.kv.used + self.batch.blocks_in(self.run.steps_by(now))
        return self.kv.used

    def generated_by(self, now: float) -> int:
        """Output tokens so far, including those of the current run of steps."""
        steps = self.run.steps_by(now) if self._can_be_cut() else 0
        return self.generated_tokens + self.batch.sequences * steps

    # ---- steps -----------------------------------------------------------------------------------------------

    def load_prefix(self, stay: Stay, tokens: int, now: float) -> None:
        self._sim.on_load(self, stay, tokens, now)

    def prompt_limit(self, beside_s: float) -> int | None:
        if not self.tpot_s or (prompt := self.prompt_for_another()) is None:
            return None
        profile = self.profile
        s_per_token = profile.prefill_s_per_token + profile.attention_s * prompt.computed
        return prompt_tokens_beside(self.tpot_s, beside_s + profile.prompt_s, s_per_token)

    def slowed(self) -> float:
        factors = self.profile.slowed_beside
        others = self._sim.computing_beside(self) if factors else 0
        return factors[min(others, len(factors)) - 1] if others else 1.0

    def _next_step(self, now: float, behind: int) -> int:
        """The step, counted from the worker's start, after the current one and `behind` more."""
        if not self.busy:
            return 0
        ended = self.steps_ended + (self.run.steps_by(now) if self._can_be_cut() else 0)
        return ended + 1 + behind

    def _kick(self, now: float) -> None:
        if not self.busy:
            self._begin(now)
        elif self._can_be_cut():
            # Cut the run at the end of its last scheduled step.
            steps = self.run.steps_by(now) + 1 + self.profile.steps_ahead
            if steps < self.run.steps:
                self.run.steps = steps
                self._wake_at_end()

    def _can_be_cut(self) -> bool:
        """Whether the current run has several steps, which then only decode."""
        return self.busy and self.run.steps > 1 and not self.chunks

    def _begin(self, now: float) -> None:
        if self.next_step(now) is not None:
            self.busy = True
            self._wake_at_end()

    def _wake_at_end(self) -> None:
        self.version += 1
        self._schedule_wake(self.run.ends_at(), self, self.version)

    def wake(self, now: float) -> None:
        """End the current run of steps, and begin the next one."""
        decoding, plain = self.batch.sequences, not self.chunks
        steps, self.run.steps = self.run.steps, 1  # so that nothing below cuts the run
        duration = now - self.run.started_at
        if decoding:
            if plain:
                self.plain_s += duration
                self.plain_steps += steps
            if duration > 0:
                bucket = floor(log2(duration / steps) * ITL_BUCKETS_PER_OCTAVE)
                self.itl_buckets[bucket] = self.itl_buckets.get(bucket, 0) + decoding * steps
        computed = self.finish(steps, now)
        self.busy = False
        if not plain:
            self._sim.on_boundary(self, computed, duration, now)
        if not self.busy:
            self._begin(now)
