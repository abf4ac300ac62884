"""The sequences that decode together on a simulated worker, and runs of steps in closed form.

Each of the sequences gets one token a step, so only the step count changes with a step; what each sequence has got is
worked out when it joins, leaves or ends.
"""

from __future__ import annotations

import heapq
from math import sqrt

from orchestrator.simulator.job import Stay


class StepRun:
    """Steps without a change in the batch: the first takes `first_s`, each later one `growth_s` more than the last."""

    __slots__ = ("first_s", "growth_s", "started_at", "steps")

    def __init__(self) -> None:
        self.started_at = self.first_s = self.growth_s = 0.0
        self.steps = 0

    def start(self, now: float, first_s: float, growth_s: float, steps: int) -> None:
        self.started_at, self.first_s, self.growth_s, self.steps = now, first_s, growth_s, steps

    def ends_at(self) -> float:
        steps = self.steps
        return self.started_at + (steps * self.first_s + self.growth_s * steps * (steps - 1) / 2)

    def steps_by(self, now: float) -> int:
        """Steps that have ended by now, the last one excepted: that one ends with the run."""
        elapsed, first, growth = now - self.started_at, self.first_s, self.growth_s
        if growth <= 0:
            steps = int(elapsed / first) if first > 0 else self.steps - 1
        else:
            half = first - growth / 2
            steps = int((sqrt(half * half + 2 * growth * elapsed) - half) / growth)
        return max(0, min(steps, self.steps - 1))


class DecodeBatch:
    """`max_run_steps` bounds `run_length`; 1 makes each step a run of its own."""

    __slots__ = ("_block_size", "_finish", "_joined", "_phase", "context_tokens", "max_run_steps", "sequences", "steps")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.max_run_steps = 1 << 60
        self.steps = 0  # since the worker started; failures do not reset it
        self.clear()

    def clear(self) -> None:
        self.sequences = 0
        self.context_tokens = 0  # of all sequences
        # Sequences by the step, modulo the block size, before which they need a new block.
        self._phase = [0] * self._block_size
        self._finish: list[tuple[int, int, int, Stay]] = []  # a heap: last step, order, epoch
        self._joined = 0

    @property
    def empty(self) -> bool:
        return not (self.sequences or self.context_tokens or any(self._phase))

    def join(self, stay: Stay) -> None:
        steps = self.steps
        stay.first_step = steps
        self._phase[(stay.context - steps) % self._block_size] += 1
        self.context_tokens += stay.context
        self.sequences += 1
        self._joined += 1
        heapq.heappush(self._finish, (steps + stay.remaining, self._joined, stay.epoch, stay))

    def leave(self, stay: Stay) -> None:
        done = self.steps - stay.first_step
        self._phase[(stay.context - stay.first_step) % self._block_size] -= 1
        stay.context += done
        stay.remaining -= done
        stay.emitted += done
        self.context_tokens -= stay.context
        self.sequences -= 1

    def advance(self, steps: int) -> list[Stay]:
        """All sequences have gone this many steps further. Returns those that have ended; they have left."""
        self.steps += steps
        self.context_tokens += self.sequences * steps
        finish, ended = self._finish, []
        while finish and finish[0][0] <= self.steps:
            _, _, epoch, stay = heapq.heappop(finish)
            if epoch == stay.epoch:  # else it was preempted since
                self.leave(stay)
                ended.append(stay)
        return ended

    def next_blocks(self) -> int:
        """Blocks that the batch takes in its next step."""
        return self._phase[-self.steps % self._block_size]

    def blocks_in(self, steps: int) -> int:
        """Blocks that the batch takes in this many steps from here."""
        size, phase, at = self._block_size, self._phase, self.steps
        return steps // size * self.sequences + sum(phase[-(at + i) % size] for i in range(steps % size))

    def run_length(self, free_blocks: int) -> int:
        """Steps until the first sequence ends or blocks run out, at least one."""
        finish, sequences, size = self._finish, self.sequences, self._block_size
        while finish[0][2] != finish[0][3].epoch:
            heapq.heappop(finish)
        longest = min(self.max_run_steps, finish[0][0] - self.steps)
        if free_blocks >= sequences * (longest // size + 1):
            return longest
        cycles = free_blocks // sequences
        left = free_blocks - cycles * sequences
        fit = cycles * size
        phase, first = self._phase, self.steps + fit
        for step in range(size):
            left -= phase[-(first + step) % size]
            if left < 0:
                break
            fit += 1
        return max(1, min(longest, fit))
