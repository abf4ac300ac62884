"""One simulated worker: vLLM's scheduling of chunked prefill and decode, over block-granular KV with preemption.

Steps that only decode are not simulated one by one: their times form a closed series, so that a whole run of them,
up to the next arrival, completion or lack of blocks, is one event. Who talks to a worker hands it the time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from math import floor, log2, sqrt
from typing import Any

from orchestrator.simulator.kv import KVPool
from orchestrator.simulator.profile import Profile
from orchestrator.simulator.stay import Stay

ITL_BUCKETS_PER_OCTAVE = 16


class Worker:
    """Callbacks: `on_start(worker, sequence, now)` when its blocks are allocated, `on_prefilled` when a "prefill"
    sequence is computed, `on_first` at a first token (its time may lie ahead), `on_done`, and `on_boundary` after steps
    that computed prompt tokens. `schedule(time, worker, version)` asks for `wake` at a time.
    """

    def __init__(self, name: str, profile: Profile, unit_tokens: int, sim: Any, schedule: Callable[..., None]) -> None:
        self.name = name
        self.profile = profile
        self.sim = sim
        self._schedule_wake = schedule
        self.unit_tokens = unit_tokens
        self.kv = KVPool(profile.blocks, max(1, unit_tokens // profile.block_size))
        self.alive = True
        self.pending_tokens = 0  # prompt tokens here not yet computed, or not yet given blocks
        self.computed_tokens = 0
        self.preemptions = 0
        self.steps = 0
        self.busy_s = 0.0
        self.decode_s = 0.0  # time in steps in which something decoded
        self.decode_steps = 0
        self.plain_s = 0.0  # of that, in steps without prompts
        self.plain_steps = 0
        self.itl_buckets: dict[int, int] = {}
        self.link_free_at = 0.0
        self.waiting: deque[Stay] = deque()
        self.running: dict[Stay, None] = {}  # in order of admission: the last is preempted first
        self.prefilling: dict[Stay, None] = {}
        self.arrived: list[Stay] = []  # remote ones whose KV is here, not yet decoding
        self.receiving: dict[Stay, None] = {}  # remote ones with blocks, whose KV is on its way
        self.held = 0  # prefilled here, KV not yet sent
        self.version = 0
        self._finish: list[tuple[int, int, int, Stay]] = []
        self._ids = 0
        self._decoding = 0
        self._context_sum = 0
        self._phase = [0] * profile.block_size
        self._busy = False
        self._blocked = False
        # The run of steps under way: started, first step's time, its growth per step, number of steps.
        self._t0 = self._a = self._b = 0.0
        self._k = 0
        self._chunks: list[tuple[Stay, int]] = []

    # ---- from outside ----------------------------------------------------------------------------------------

    def submit(self, sequence: Stay, now: float) -> None:
        sequence.submitted_at = now
        sequence.worker = self
        if sequence.phase != "remote":
            sequence.compute = sequence.context
        self.pending_tokens += sequence.context
        self.waiting.append(sequence)
        if not self._blocked:
            self._kick(now)

    def kv_arrived(self, sequence: Stay, now: float) -> None:
        """All KV of a "remote" sequence is here: it decodes from the next step on."""
        del self.receiving[sequence]
        self.arrived.append(sequence)
        self._kick(now)

    def kv_lost(self, sequence: Stay, now: float) -> None:
        """The source of a "remote" sequence died: the prompt is computed here, in the blocks it may have already."""
        sequence.phase = "local"
        sequence.compute = sequence.context
        if sequence not in self.receiving:
            return
        del self.receiving[sequence]
        self.pending_tokens += sequence.compute
        self.running[sequence] = None
        self.prefilling[sequence] = None
        self._kick(now)

    def release(self, sequence: Stay, now: float) -> None:
        """A "prefill" sequence's KV has been sent (or is not wanted any more)."""
        self.held -= 1
        self.kv.release(sequence.keys, self._blocks(sequence.context))
        if self._blocked:
            self._kick(now)

    def fail(self) -> list[Stay]:
        """Die: memory is gone, all sequences are returned with what they have generated in `emitted`."""
        lost = list(self.waiting) + list(self.running) + self.arrived + list(self.receiving)
        for sequence in self.running:
            if sequence not in self.prefilling:
                sequence.emitted += self.steps - sequence.first_step
        self.alive = self._busy = self._blocked = False
        self.version += 1
        self.kv.clear()
        self.waiting.clear()
        self.running.clear()
        self.prefilling.clear()
        self.arrived.clear()
        self.receiving.clear()
        self._finish.clear()
        self._chunks = []
        self.pending_tokens = self.held = self._decoding = self._context_sum = 0
        self._phase = [0] * self.profile.block_size
        return lost

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.arrived or self.receiving or self.held)

    def used_blocks(self, now: float) -> int:
        """Blocks in use now, those taken in the middle of a run of steps included."""
        if self._k > 1 and not self._chunks and self._busy:
            return self.kv.used + self._crossings(self._steps_by(now))
        return self.kv.used

    def uncomputed_blocks(self) -> int:
        """Blocks that vLLM would not have given out yet: it allocates with each chunk, this model with the prompt."""
        if not self.prefilling:
            return 0
        return sum(sequence.compute for sequence in self.prefilling) // self.profile.block_size

    # ---- steps -----------------------------------------------------------------------------------------------

    def _kick(self, now: float) -> None:
        if not self._busy:
            self._begin(now)
        elif self._k > 1 and not self._chunks:
            # Cut the run of decode steps at the end of the step under way.
            k = self._steps_by(now) + 1
            if k < self._k:
                self._k = k
                self.version += 1
                self._schedule_wake(self._t0 + self._duration(k), self, self.version)

    def wake(self, now: float) -> None:
        """The run of steps ends now."""
        k, decoding = self._k, self._decoding
        self._k = 1  # from here on there is no run to cut
        duration = now - self._t0
        self.busy_s += duration
        if decoding:
            if not self._chunks:
                self.plain_s += duration
                self.plain_steps += k
                crossed = self._crossings(k)
                if crossed:
                    self.kv.grow(crossed)
            self.steps += k
            self._context_sum += decoding * k
            self.decode_s += duration
            self.decode_steps += k
            if duration > 0:
                bucket = floor(log2(duration / k) * ITL_BUCKETS_PER_OCTAVE)
                self.itl_buckets[bucket] = self.itl_buckets.get(bucket, 0) + decoding * k
            finish, steps = self._finish, self.steps
            while finish and finish[0][0] <= steps:
                _, _, epoch, sequence = heapq.heappop(finish)
                if epoch == sequence.epoch:
                    self._leave(sequence)
                    del self.running[sequence]
                    self.kv.release(sequence.keys, self._blocks(sequence.context))
                    self.sim.on_done(self, sequence, now)
        chunks, self._chunks = self._chunks, []
        computed = 0
        for sequence, tokens in chunks:
            computed += tokens
            self.pending_tokens -= tokens
            sequence.compute -= tokens
            sequence.computed += tokens
            if sequence.compute == 0:
                del self.prefilling[sequence]
                self._prompt_done(sequence, now)
        self._busy = False
        self.computed_tokens += computed
        if chunks:
            self.sim.on_boundary(self, computed, duration, now)
        if not self._busy:
            self._begin(now)

    def _prompt_done(self, sequence: Stay, now: float) -> None:
        if sequence.phase == "prefill":
            del self.running[sequence]
            self.held += 1
            self.sim.on_prefilled(self, sequence, now)
            return
        self.sim.on_first(self, sequence, now)
        sequence.remaining -= 1
        sequence.emitted += 1
        if sequence.remaining <= 0:
            del self.running[sequence]
            self.kv.release(sequence.keys, self._blocks(sequence.context))
            self.sim.on_done(self, sequence, now)
        else:
            self._join(sequence)

    def _begin(self, now: float) -> None:
        """Admit what there is room for and start the next run of steps."""
        profile = self.profile
        arrived: list[Stay] = []
        if self.arrived:
            room = max(0, profile.max_num_seqs - len(self.running))
            arrived, self.arrived = self.arrived[:room], self.arrived[room:]
        for sequence in arrived:
            # As vLLM does, the last prompt token is computed again, which samples the first output token.
            self.running[sequence] = None
            sequence.context -= 1
            if sequence.context % profile.block_size == 0:
                self.kv.used -= 1  # `_join` counts a block again when the step crosses into it
            self._join(sequence)
        if self.waiting:
            self._admit(now)
        budget = profile.max_num_batched_tokens - self._decoding
        preempted = False
        if self._decoding:
            need = self._phase[-self.steps % profile.block_size]
            while need > self.kv.free and self._preempt():
                preempted = True
                need = self._phase[-self.steps % profile.block_size]
        n, context_sum = self._decoding, self._context_sum
        base = profile.step_s + n * profile.decode_s_per_seq + context_sum * profile.kv_s_per_token
        if self.prefilling:
            chunks = []
            for sequence in self.prefilling:
                tokens = sequence.compute if sequence.compute < budget else budget
                if tokens <= 0:
                    break
                chunks.append((sequence, tokens))
                budget -= tokens
                past = sequence.computed + tokens / 2
                base += tokens * (profile.prefill_s_per_token + profile.attention_s * past)
            self._chunks = chunks
            if n:
                self.kv.grow(self._phase[-self.steps % profile.block_size])
            self._k, self._a, self._b = 1, base, 0.0
        elif n:
            # What was preempted may fit again in the next step, beside those it shares a prefix with.
            self._k = 1 if preempted else self._run_length()
            self._a, self._b = base, n * profile.kv_s_per_token
        else:
            return
        self._busy = True
        self._t0 = now
        self.version += 1
        for sequence in arrived:
            self.sim.on_first(self, sequence, now + self._a)
        self._schedule_wake(now + self._duration(self._k), self, self.version)

    def _admit(self, now: float) -> None:
        profile = self.profile
        unit_tokens = self.unit_tokens
        # vLLM admits a prompt only into a step that has budget left for some of it.
        budget = profile.max_num_batched_tokens - self._decoding - sum(s.compute for s in self.prefilling)
        while self.waiting and budget > 0:
            sequence = self.waiting[0]
            if len(self.running) >= profile.max_num_seqs and sequence.phase != "remote":
                break
            hits = self.kv.acquire(sequence.keys, self._blocks(sequence.context))
            if hits < 0:
                break
            self.waiting.popleft()
            cached = min(hits * unit_tokens, sequence.context - 1)
            sequence.hit_tokens = cached
            sequence.started = True
            sequence.started_at = now
            if sequence.phase == "remote":
                self.pending_tokens -= sequence.context
                self.receiving[sequence] = None
            else:
                self.pending_tokens -= cached
                sequence.computed = cached
                sequence.compute = sequence.context - cached
                budget -= sequence.compute
                self.running[sequence] = None
                self.prefilling[sequence] = None
            self.sim.on_start(self, sequence, now)
        self._blocked = bool(self.waiting)

    def _preempt(self) -> bool:
        """Give up the newest sequence, to be computed again: vLLM's recompute preemption. False if it is alone."""
        if len(self.running) <= 1:
            return False
        sequence, _ = self.running.popitem()
        if sequence in self.prefilling:
            del self.prefilling[sequence]
            self.pending_tokens -= sequence.compute
        else:
            self._leave(sequence)
        self.kv.release(sequence.keys, self._blocks(sequence.context))
        sequence.epoch += 1
        if sequence.phase == "remote":
            sequence.phase = "local"
        sequence.compute = sequence.context
        sequence.computed = 0
        self.pending_tokens += sequence.context
        self.waiting.appendleft(sequence)
        self._blocked = True
        self.preemptions += 1
        return True

    # ---- the batch that decodes ------------------------------------------------------------------------------

    def _join(self, sequence: Stay) -> None:
        steps = self.steps
        sequence.first_step = steps
        self._phase[(sequence.context - steps) % self.profile.block_size] += 1
        self._context_sum += sequence.context
        self._decoding += 1
        self._ids += 1
        heapq.heappush(self._finish, (steps + sequence.remaining, self._ids, sequence.epoch, sequence))

    def _leave(self, sequence: Stay) -> None:
        done = self.steps - sequence.first_step
        self._phase[(sequence.context - sequence.first_step) % self.profile.block_size] -= 1
        sequence.context += done
        sequence.remaining -= done
        sequence.emitted += done
        self._context_sum -= sequence.context
        self._decoding -= 1

    def _run_length(self) -> int:
        """Steps until the first sequence ends or blocks run out, at least one."""
        finish = self._finish
        while finish[0][2] != finish[0][3].epoch:
            heapq.heappop(finish)
        k = finish[0][0] - self.steps
        free, n, size = self.kv.free, self._decoding, self.profile.block_size
        if free >= n * (k // size + 1):
            return k
        cycles = free // n
        left = free - cycles * n
        fit = cycles * size
        phase, first = self._phase, self.steps + fit
        for step in range(size):
            left -= phase[-(first + step) % size]
            if left < 0:
                break
            fit += 1
        return max(1, min(k, fit))

    def _crossings(self, k: int) -> int:
        """Blocks that the batch takes in its next k steps."""
        size = self.profile.block_size
        phase, steps = self._phase, self.steps
        return k // size * self._decoding + sum(phase[-(steps + i) % size] for i in range(k % size))

    def _duration(self, k: int) -> float:
        return k * self._a + self._b * k * (k - 1) / 2

    def _steps_by(self, now: float) -> int:
        """Steps of the run that have ended by now."""
        elapsed, a, b = now - self._t0, self._a, self._b
        if b <= 0:
            k = int(elapsed / a) if a > 0 else self._k - 1
        else:
            half = a - b / 2
            k = int((sqrt(half * half + 2 * b * elapsed) - half) / b)
        return max(0, min(k, self._k - 1))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.profile.block_size)
