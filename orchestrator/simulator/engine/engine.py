"""One engine: vLLM's scheduling of chunked prefill and decode, over block-granular KV with preemption.

It has no clock: callers say when a step begins (`next_step`), which says how long it takes, and when it ends
(`finish`). Steps that only decode are alike up to the next completion or lack of blocks: they are one run (`batch`),
which a caller may cut.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from orchestrator.simulator.engine.adapters import RunningStays
from orchestrator.simulator.engine.batch import DecodeBatch, StepRun, chunks
from orchestrator.simulator.engine.kv import KVPool
from orchestrator.simulator.engine.profile import Profile
from orchestrator.simulator.engine.stay import Events, Stay, steps_until_ready

_ORDER = attrgetter("order")


class Engine:
    """Computes the stays that are added to it."""

    def __init__(self, profile: Profile, unit_tokens: int, events: Events, host_blocks: int = 0) -> None:
        """`unit_tokens`: of the stays' prefix keys."""
        self.profile, self.unit_tokens, self.events = profile, unit_tokens, events
        self.kv = KVPool(profile.blocks, max(1, unit_tokens // profile.block_size), host_blocks)
        self.pending_tokens = 0  # prompt tokens to compute; for waiting stays, as the router expects
        self.computed_tokens = self.generated_tokens = self.preemptions = self.steps_ended = 0
        self.waiting: list[Stay] = []  # by `order`
        self.running = RunningStays(profile.adapter_slots)
        self.prefilling: dict[Stay, None] = {}
        self.arrived: list[Stay] = []  # those whose KV has arrived, not yet running
        self.receiving: dict[Stay, None] = {}  # stays that have blocks and wait for KV: "remote", or from the host tier
        self.held = 0  # stays with blocks that have left, or are computed "prefill" ones
        self.blocked = False  # a waiting stay has no room
        self.batch = DecodeBatch(profile.block_size)
        self.run = StepRun()  # the latest run of steps
        self.chunks: list[tuple[Stay, int]] = []  # prompt tokens that the current step computes

    def add(self, stay: Stay) -> None:
        stay.compute = max(1, stay.context - stay.expected_hit_tokens) if stay.phase != "remote" else 0
        self.pending_tokens += stay.compute
        insort(self.waiting, stay, key=_ORDER)

    def receive(self, stay: Stay) -> None:
        """All KV that a stay waits for has arrived: it runs from the next step that can be scheduled with it."""
        del self.receiving[stay]
        self.arrived.append(stay)

    def lose(self, stay: Stay) -> None:
        """No KV of a "remote" stay will come: compute the prompt here. As in vLLM, its blocks are free until then."""
        if stay in self.receiving:
            del self.receiving[stay]
            self._release(stay)
        else:
            self.waiting.remove(stay)
        stay.phase, stay.started = "local", False
        self.add(stay)

    def leave(self, stay: Stay) -> bool:
        """Take a stay out of scheduling, be it in the middle of a step. Returns whether it has blocks: these stay
        reserved until `free`."""
        if stay in self.waiting:
            self.waiting.remove(stay)
            self.pending_tokens -= stay.compute
            return False
        if stay in self.running:
            self._stop(stay)
        elif stay in self.receiving or stay in self.arrived:
            self.receiving.pop(stay, None)
            self.arrived = [other for other in self.arrived if other is not stay]
            self.pending_tokens -= stay.compute
        else:
            return True  # its prompt is computed
        self.held += 1
        return True

    def free(self, stay: Stay) -> None:
        """Free the blocks of a stay that has left, or whose prompt is computed and need not be sent any more."""
        self.held -= 1
        self._release(stay)

    def clear(self) -> list[Stay]:
        """Lose all memory. Returns the stays that had work left here; `emitted` counts the tokens of each."""
        lost = list(self.waiting) + list(self.running) + self.arrived + list(self.receiving)
        for stay in self.running:
            if stay not in self.prefilling:
                stay.emitted += self.batch.steps - stay.first_step
        self.kv.clear()
        self.waiting.clear()
        self.arrived.clear()
        for stays in (self.running, self.prefilling, self.receiving):
            stays.clear()
        self.batch.clear()
        self.chunks = []
        self.pending_tokens = self.held = 0
        self.blocked = False
        return lost

    def generated(self, stay: Stay) -> int:
        """Its output tokens so far, once no run of several steps is on its way."""
        decodes = stay in self.running and stay not in self.prefilling
        return stay.emitted + (self.batch.steps - stay.first_step if decodes else 0)

    def uncomputed_blocks(self) -> int:
        """Blocks that vLLM would not have allocated yet: it allocates per chunk, this model per prompt."""
        if not self.prefilling:
            return 0
        return sum(stay.compute for stay in self.prefilling) // self.profile.block_size

    # ---- steps -----------------------------------------------------------------------------------------------

    def prompt_for_another(self) -> Stay | None:
        """The first prompt that the next step could compute, if such are for other engines and others decode beside."""
        prompts = (*self.prefilling, *self.waiting[:1]) if self.batch.sequences else ()
        return prompts[0] if any(stay.phase == "prefill" for stay in prompts) else None

    def prompt_limit(self, beside_s: float) -> int | None:
        """The most prompt tokens of the next step, which takes `beside_s` without any; None: as many as fit."""
        return None

    def slowed(self) -> float:
        """By which factor the next step takes longer than its worker's alone."""
        return 1.0

    def load_prefix(self, stay: Stay, tokens: int, now: float) -> None:
        """Begin to load so many tokens of a stay from the host tier; call `receive` once they have come."""
        raise NotImplementedError

    def next_step(self, now: float) -> StepRun | None:
        """Admit the stays that have room. Returns the steps that begin now, None if there is nothing to compute."""
        profile, batch = self.profile, self.batch
        if not (batch.sequences or self.prefilling):
            for stay in (*self.waiting, *self.arrived):
                stay.from_step = 0  # no step is scheduled before it
        loads, preemptions = self.running.loads, self.preemptions
        joined = self._join_arrived() if self.arrived else []
        while (needed := batch.next_blocks()) > self.kv.free:
            self._preempt()
        if (preempted := self.preemptions > preemptions) and not self.running:
            return self.next_step(now)
        decoding = batch.sequences
        step_s = profile.step_s + decoding * profile.decode_s_per_seq + batch.context_tokens * profile.kv_s_per_token
        if self.prefilling or self.waiting:
            limit = self.prompt_limit(step_s)
            budget = profile.max_num_batched_tokens - decoding
            budget = budget if limit is None else min(budget, limit)
            if needed:
                self.kv.grow(needed)  # running stays come first
            left = budget
            for stay in self.prefilling:
                if self.kv.unwritten and left > 0:
                    self._write(stay, left)
                left -= stay.compute
            if self.waiting and not preempted:
                self._admit(now, left, limit is not None)
            self.chunks, prompts_s = chunks(self.prefilling, budget, profile)
            if not self.chunks:
                self.kv.used -= needed  # `finish` counts them
            step_s += prompts_s
        loading_s = (self.running.loads - loads) * profile.adapter_load_s
        step_s = (step_s + loading_s) * self.slowed()
        if self.chunks:
            self.run.start(now, step_s, 0.0, 1)
        elif decoding:
            # A preempted stay may fit again in the next step, if it shares a prefix with running ones.
            steps = 1 if preempted or loading_s or self.prefilling else batch.run_length(self.kv.free)
            if profile.steps_ahead:
                steps = min(steps, steps_until_ready((*self.waiting, *self.arrived), self.steps_ended))
            self.run.start(now, step_s, decoding * profile.kv_s_per_token, steps)
        else:
            return None
        for stay in joined:
            if stay in self.running:  # else it was preempted at once
                self.events.on_first(self, stay, now + step_s)
        return self.run

    def _join_arrived(self) -> list[Stay]:
        """Returns those that get a token in the next step. One whose adapter has no slot is passed by, as in vLLM."""
        joined, arrived, self.arrived = [], self.arrived, []
        for at, stay in enumerate(arrived):
            if len(self.running) >= self.profile.max_num_seqs:
                self.arrived += arrived[at:]
                break
            if stay.from_step > self.steps_ended:
                self.arrived.append(stay)
                continue
            came = len(stay.keys) if stay.phase == "remote" else (stay.context - stay.tail) // self.unit_tokens
            self.kv.write(stay.keys[:came])  # as vLLM, when a step could have the request
            if not self.running.fits(stay):
                self.arrived.append(stay)
                continue
            self.running.join(stay)
            if stay.tail > 1 or stay.phase != "remote":
                self.pending_tokens += stay.tail - stay.compute
                stay.compute, stay.computed = stay.tail, stay.context - stay.tail
                self.prefilling[stay] = None
                continue
            # As in vLLM, the last prompt token is computed again, which samples the first output token.
            joined.append(stay)
            stay.context -= 1
            if stay.context % self.profile.block_size == 0:
                self.kv.used -= 1  # the batch counts that block again when the step enters it
            self.batch.join(stay)
        return joined

    def finish(self, steps: int, now: float) -> int:
        """The latest run has ended after so many steps. Returns the prompt tokens that it computed."""
        batch = self.batch
        self.steps_ended += steps
        if batch.sequences:
            self.generated_tokens += batch.sequences * steps
            if not self.chunks and (blocks := batch.blocks_in(steps)):
                self.kv.grow(blocks)
            for stay in batch.advance(steps):
                self._done(stay, now)
        prompts, self.chunks = self.chunks, []
        computed = 0
        for stay, tokens in prompts:
            if stay not in self.prefilling:  # it has left
                continue
            computed += tokens
            self.pending_tokens -= tokens
            stay.compute -= tokens
            stay.computed += tokens
            if stay.compute == 0:
                del self.prefilling[stay]
                self._prompt_done(stay, now)
        self.computed_tokens += computed
        return computed

    def _prompt_done(self, stay: Stay, now: float) -> None:
        stay.emitted += 1
        if stay.phase == "prefill":
            del self.running[stay]
            self.held += 1
            self.events.on_prefilled(self, stay, now)
            return
        self.events.on_first(self, stay, now)
        stay.remaining -= 1
        self.generated_tokens += 1
        if stay.remaining <= 0:
            self._done(stay, now)
        else:
            self.batch.join(stay)

    def _done(self, stay: Stay, now: float) -> None:
        del self.running[stay]
        self._release(stay)
        self.events.on_done(self, stay, now)

    def _admit(self, now: float, budget: int, limited: bool) -> None:
        """As vLLM, only into a step that has token budget left; "remote" stays also into one with limited prompts."""
        profile, block_size = self.profile, self.profile.block_size
        at = unfit = 0
        while at < len(self.waiting) and (budget > 0 or (limited and self.waiting[at].phase == "remote")):
            stay = self.waiting[at]
            if stay.from_step > self.steps_ended:
                at += 1
                continue
            if not self.running.fits(stay):
                at, unfit = at + 1, unfit + 1
                continue
            if len(self.running) >= profile.max_num_seqs and stay.phase != "remote":
                break
            hits = self.kv.acquire(stay.keys, self.blocks_for(stay.context))
            if hits < 0:
                break
            del self.waiting[at]
            loads = self.kv.host_units and stay.phase != "remote"  # what comes from another engine has all of it
            held = self.kv.held_units(stay.keys) if loads else hits
            cached, loadable = (
                min(units * self.unit_tokens, (stay.context - 1) // block_size * block_size) for units in (hits, held)
            )
            stay.hit_tokens = cached
            stay.started = True
            stay.started_at = now
            if stay.phase == "remote":
                self.receiving[stay] = None
            elif loadable > cached:
                self.pending_tokens += stay.context - loadable - stay.compute
                stay.compute = stay.tail = stay.context - loadable
                self.receiving[stay] = None
                self.load_prefix(stay, loadable - cached, now)
            else:
                self.pending_tokens += stay.context - cached - stay.compute
                stay.computed = cached
                stay.compute = stay.context - cached
                if stay.keys:
                    self._write(stay, budget)
                budget -= stay.compute
                self.running.join(stay)
                self.prefilling[stay] = None
            self.events.on_start(self, stay, now)
        self.blocked = len(self.waiting) > unfit

    def _preempt(self) -> None:
        """Preempt the running stay that is last in order, to be computed again (vLLM's recompute preemption)."""
        stay = max(self.running, key=_ORDER)
        decoded = stay not in self.prefilling
        self._stop(stay)
        self._release(stay)
        stay.context += decoded  # its latest token, whose KV the step would have computed
        if stay.phase == "remote":
            stay.phase = "local"
        stay.compute = stay.context
        stay.computed = 0
        self.pending_tokens += stay.context
        insort(self.waiting, stay, key=_ORDER)
        self.blocked = True
        self.preemptions += 1

    def _stop(self, stay: Stay) -> None:
        """Run it no further."""
        del self.running[stay]
        stay.epoch += 1
        if stay in self.prefilling:
            del self.prefilling[stay]
            self.pending_tokens -= stay.compute
            return
        self.batch.leave(stay)
        if self.chunks and stay.context % self.profile.block_size == 0:
            self.kv.used -= 1  # its next block, which the step beside prompts has allocated

    def _write(self, stay: Stay, budget: int) -> None:
        """The step computes so many prompt tokens of a stay at most. Who comes next in the same step finds them."""
        unit, done = self.unit_tokens, stay.computed
        self.kv.write(stay.keys[done // unit : (done + min(stay.compute, budget)) // unit])

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.profile.block_size)

    def _release(self, stay: Stay) -> None:
        self.kv.release(stay.keys, self.blocks_for(stay.context))
