"""One simulated worker: vLLM's scheduling of chunked prefill and decode, over block-granular KV with preemption.

Steps that only decode are not simulated one by one: a whole run of them, up to the next arrival, completion or lack of
blocks, is one event (`batch`). A worker has no clock: callers pass the time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from math import floor, log2
from operator import attrgetter

from orchestrator.policy.choices.steps import prompt_tokens_beside
from orchestrator.simulator.adapters import RunningStays
from orchestrator.simulator.batch import DecodeBatch, StepRun, chunks
from orchestrator.simulator.job import Events, Stay, steps_until_ready
from orchestrator.simulator.kv import KVPool
from orchestrator.simulator.profile import Profile

ITL_BUCKETS_PER_OCTAVE = 16
_ORDER = attrgetter("order")


class Worker:
    """Computes the stays that are submitted to it. It calls `schedule(time, worker, version)` to be woken at a time,
    unless its version has changed by then."""

    def __init__(
        self,
        name: str,
        profile: Profile,
        unit_tokens: int,
        sim: Events,
        schedule: Callable[[float, Worker, int], None],
        host_blocks: int = 0,
        tpot_s: float = 0.0,
    ) -> None:
        """`tpot_s`: the objective of those that decode beside prompts of prefill stays; 0: none."""
        self.tpot_s = tpot_s
        self.name, self.profile, self.sim = name, profile, sim
        self._schedule_wake = schedule
        self.unit_tokens = unit_tokens
        self.kv = KVPool(profile.blocks, max(1, unit_tokens // profile.block_size), host_blocks)
        self.alive = True
        self.pending_tokens = 0  # prompt tokens to compute; for waiting and fetching stays, as the router expects
        self.computed_tokens = self.preemptions = 0
        self.busy_s = 0.0
        self.plain_s = 0.0  # the part of `busy_s` in steps that only decoded
        self.plain_steps = 0
        self._generated_tokens = 0  # up to the current run of steps
        self.itl_buckets: dict[int, int] = {}
        self.link_free_at = self.loads_end_at = 0.0
        self.waiting: list[Stay] = []  # by `order`
        self.running = RunningStays(profile.adapter_slots)
        self.prefilling: dict[Stay, None] = {}
        self.arrived: list[Stay] = []  # "remote" stays whose KV has arrived, not yet decoding
        self.receiving: dict[Stay, None] = {}  # "remote" stays that have blocks and wait for their KV
        self.fetching: dict[Stay, None] = {}  # submitted once their prefixes have come
        self.held = 0  # "prefill" stays that are computed, and whose KV has not been sent
        self.version = 0
        self.batch = DecodeBatch(profile.block_size)
        self._busy = self._blocked = False
        self._steps_ended = 0
        self._run = StepRun()  # the current run of steps, while busy
        self._chunks: list[tuple[Stay, int]] = []  # prompt tokens that the current step computes

    # ---- called by the simulation ----------------------------------------------------------------------------

    def submit(self, stay: Stay, now: float) -> None:
        stay.worker = self.name
        stay.compute = max(1, stay.context - stay.expected_hit_tokens) if stay.phase != "remote" else 0
        self.pending_tokens += stay.compute
        stay.from_step = self._next_step(now, self.profile.steps_ahead)
        insort(self.waiting, stay, key=_ORDER)
        if not self._blocked:
            self._kick(now)

    def kv_arrived(self, stay: Stay, now: float) -> None:
        """All KV of a "remote" stay has arrived: it decodes from the next step that can be scheduled with it."""
        del self.receiving[stay]
        # With steps ahead, the next step that is scheduled looks for KV. Its output says that it came, and as many
        # steps are scheduled by then.
        ahead = self.profile.steps_ahead
        stay.from_step = self._next_step(now, 2 * ahead + 1 if ahead else 0)
        self.arrived.append(stay)
        self._kick(now)

    def kv_lost(self, stay: Stay, now: float) -> None:
        """The source of a "remote" stay has died: compute the prompt here, in its blocks if it has them already."""
        stay.phase = "local"
        stay.compute = stay.context
        self.pending_tokens += stay.compute
        if stay not in self.receiving:
            return
        del self.receiving[stay]
        self.running.join(stay)
        self.prefilling[stay] = None
        self._kick(now)

    def release(self, stay: Stay, now: float) -> None:
        """Free the blocks of a "prefill" stay whose KV has been sent, or is no longer needed."""
        self.held -= 1
        self.kv.release(stay.keys, self._blocks(stay.context))
        if self._blocked:
            self._kick(now)

    def fail(self) -> list[Stay]:
        """Die and lose all memory. Returns the stays that had work left here; `emitted` counts the tokens of each."""
        lost = list(self.waiting) + list(self.running) + self.arrived + list(self.receiving)
        for stay in self.running:
            if stay not in self.prefilling:
                stay.emitted += self.batch.steps - stay.first_step
        self.alive = self._busy = self._blocked = False
        self.version += 1
        self.kv.clear()
        self.waiting.clear()
        self.arrived.clear()
        for stays in (self.running, self.prefilling, self.receiving, self.fetching):
            stays.clear()
        self.batch.clear()
        self._chunks = []
        self.pending_tokens = self.held = 0
        return lost

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.arrived or self.receiving or self.held or self.fetching)

    def used_blocks(self, now: float) -> int:
        """Blocks in use now, including those allocated so far in the current run of steps."""
        if self._can_be_cut():
            return self.kv.used + self.batch.blocks_in(self._run.steps_by(now))
        return self.kv.used

    def generated_tokens(self, now: float) -> int:
        """Output tokens so far, including those of the current run of steps."""
        steps = self._run.steps_by(now) if self._can_be_cut() else 0
        return self._generated_tokens + self.batch.sequences * steps

    def uncomputed_blocks(self) -> int:
        """Blocks that vLLM would not have allocated yet: it allocates per chunk, this simulator per prompt."""
        if not self.prefilling:
            return 0
        return sum(stay.compute for stay in self.prefilling) // self.profile.block_size

    # ---- steps -----------------------------------------------------------------------------------------------

    def _next_step(self, now: float, behind: int) -> int:
        """The step, counted from the worker's start, after the current one and `behind` more."""
        if not self._busy:
            return 0
        ended = self._steps_ended + (self._run.steps_by(now) if self._can_be_cut() else 0)
        return ended + 1 + behind

    def _kick(self, now: float) -> None:
        if not self._busy:
            self._begin(now)
        elif self._can_be_cut():
            # Cut the run at the end of its last scheduled step.
            steps = self._run.steps_by(now) + 1 + self.profile.steps_ahead
            if steps < self._run.steps:
                self._run.steps = steps
                self._wake_at_end()

    def _can_be_cut(self) -> bool:
        """Whether the current run has several steps, which then only decode."""
        return self._busy and self._run.steps > 1 and not self._chunks

    def _wake_at_end(self) -> None:
        self.version += 1
        self._schedule_wake(self._run.ends_at(), self, self.version)

    def wake(self, now: float) -> None:
        """End the current run of steps, and begin the next one."""
        batch, decoding = self.batch, self.batch.sequences
        steps, self._run.steps = self._run.steps, 1  # so that nothing below cuts the run
        duration = now - self._run.started_at
        self._steps_ended += steps
        self.busy_s += duration
        if decoding:
            self._generated_tokens += decoding * steps
            if not self._chunks:
                self.plain_s += duration
                self.plain_steps += steps
                if blocks := batch.blocks_in(steps):
                    self.kv.grow(blocks)
            if duration > 0:
                bucket = floor(log2(duration / steps) * ITL_BUCKETS_PER_OCTAVE)
                self.itl_buckets[bucket] = self.itl_buckets.get(bucket, 0) + decoding * steps
            for stay in batch.advance(steps):
                self._done(stay, now)
        prompts, self._chunks = self._chunks, []
        computed = 0
        for stay, tokens in prompts:
            computed += tokens
            self.pending_tokens -= tokens
            stay.compute -= tokens
            stay.computed += tokens
            if stay.compute == 0:
                del self.prefilling[stay]
                self._prompt_done(stay, now)
        self._busy = False
        self.computed_tokens += computed
        if prompts:
            self.sim.on_boundary(self, computed, duration, now)
        if not self._busy:
            self._begin(now)

    def _prompt_done(self, stay: Stay, now: float) -> None:
        if stay.phase == "prefill":
            del self.running[stay]
            self.held += 1
            self.sim.on_prefilled(self, stay, now)
            return
        self.sim.on_first(self, stay, now)
        stay.remaining -= 1
        stay.emitted += 1
        self._generated_tokens += 1
        if stay.remaining <= 0:
            self._done(stay, now)
        else:
            self.batch.join(stay)

    def _done(self, stay: Stay, now: float) -> None:
        del self.running[stay]
        self.kv.release(stay.keys, self._blocks(stay.context))
        self.sim.on_done(self, stay, now)

    def _begin(self, now: float) -> None:
        """Admit the stays that have room and start the next run of steps."""
        profile, batch = self.profile, self.batch
        if not (batch.sequences or self.prefilling):
            for stay in (*self.waiting, *self.arrived):
                stay.from_step = 0  # no step is scheduled before it
        room = max(0, profile.max_num_seqs - len(self.running))
        loads, arrived = self.running.loads, []
        for stay in self.arrived[:room]:
            if stay.from_step > self._steps_ended or not self.running.fits(stay):
                continue
            # As in vLLM, the last prompt token is computed again, which samples the first output token.
            self.running.join(stay)
            self.arrived.remove(stay)
            arrived.append(stay)
            stay.context -= 1
            if stay.context % profile.block_size == 0:
                self.kv.used -= 1  # the batch counts that block again when the step enters it
            batch.join(stay)
        if self.waiting:
            self._admit(now)
        budget = profile.max_num_batched_tokens - batch.sequences
        preempted = False
        while batch.sequences and batch.next_blocks() > self.kv.free and self._preempt():
            preempted = True
        decoding = batch.sequences
        loading_s = (self.running.loads - loads) * profile.adapter_load_s
        step_s = profile.step_s + decoding * profile.decode_s_per_seq + batch.context_tokens * profile.kv_s_per_token
        step_s += loading_s
        if self.prefilling:
            if decoding and self.tpot_s and any(stay.phase == "prefill" for stay in self.prefilling):
                s_per_token = profile.prefill_s_per_token + profile.attention_s * next(iter(self.prefilling)).computed
                budget = min(budget, prompt_tokens_beside(self.tpot_s, step_s + profile.prompt_s, s_per_token))
            self._chunks, prompts_s = chunks(self.prefilling, budget, profile)
            step_s += prompts_s
            if decoding:
                self.kv.grow(batch.next_blocks())
            self._run.start(now, step_s, 0.0, 1)
        elif decoding:
            # A preempted stay may fit again in the next step, if it shares a prefix with running ones.
            steps = 1 if preempted or loading_s else batch.run_length(self.kv.free)
            if profile.steps_ahead:
                steps = min(steps, steps_until_ready((*self.waiting, *self.arrived), self._steps_ended))
            self._run.start(now, step_s, decoding * profile.kv_s_per_token, steps)
        else:
            return
        self._busy = True
        for stay in arrived:
            self.sim.on_first(self, stay, now + step_s)
        self._wake_at_end()

    def _admit(self, now: float) -> None:
        profile = self.profile
        unit_tokens = self.unit_tokens
        # vLLM admits a prompt only into a step that has token budget left for a part of it.
        budget = profile.max_num_batched_tokens - self.batch.sequences - sum(s.compute for s in self.prefilling)
        at = unfit = 0
        while at < len(self.waiting) and budget > 0:
            stay = self.waiting[at]
            if stay.from_step > self._steps_ended:
                at += 1
                continue
            if not self.running.fits(stay):
                at, unfit = at + 1, unfit + 1
                continue
            if len(self.running) >= profile.max_num_seqs and stay.phase != "remote":
                break
            hits = self.kv.acquire(stay.keys, self._blocks(stay.context))
            if hits < 0:
                break
            del self.waiting[at]
            cached = min(hits * unit_tokens, stay.context - 1)
            stay.hit_tokens = cached
            stay.started = True
            stay.started_at = now
            if stay.phase == "remote":
                self.receiving[stay] = None
            else:
                self.pending_tokens += stay.context - cached - stay.compute
                stay.computed = cached
                stay.compute = stay.context - cached
                budget -= stay.compute
                self.running.join(stay)
                self.prefilling[stay] = None
            self.sim.on_start(self, stay, now)
        self._blocked = len(self.waiting) > unfit

    def _preempt(self) -> bool:
        """Preempt the running stay that is last in order, to be computed again (vLLM's recompute preemption).

        Returns False if no other stay is running.
        """
        if len(self.running) <= 1:
            return False
        stay = max(self.running, key=_ORDER)
        del self.running[stay]
        if stay in self.prefilling:
            del self.prefilling[stay]
            self.pending_tokens -= stay.compute
        else:
            self.batch.leave(stay)
        self.kv.release(stay.keys, self._blocks(stay.context))
        stay.epoch += 1
        if stay.phase == "remote":
            stay.phase = "local"
        stay.compute = stay.context
        stay.computed = 0
        self.pending_tokens += stay.context
        insort(self.waiting, stay, key=_ORDER)
        self._blocked = True
        self.preemptions += 1
        return True

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.profile.block_size)
