"""The sequences that decode together on an engine, and runs of steps in closed form.

Every sequence gets one token per step, so a step changes only the step count. The tokens of a single sequence are
computed when it leaves the batch or ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import sqrt

from orchestrator.simulator.engine.profile import Profile
from orchestrator.simulator.engine.stay import Stay


class StepRun:
    """Steps without a change in the batch. The first takes `first_s`, each next one `growth_s` more than the last."""

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
        """Steps that have ended by `now`, without the last step, which ends with the run."""
        elapsed, first, growth = now - self.started_at, self.first_s, self.growth_s
        if growth <= 0:
            steps = int(elapsed / first) if first > 0 else self.steps - 1
        else:
            half = first - growth / 2
            steps = int((sqrt(half * half + 2 * growth * elapsed) - half) / growth)
        return max(0, min(steps, self.steps - 1))


class DecodeBatch:
    """The decoding sequences of one worker. `max_run_steps` bounds `run_length`; at 1 each step is a run of its own."""

    __slots__ = ("_block_size", "_finish", "_joined", "_phase", "context_tokens", "max_run_steps", "sequences", "steps")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.max_run_steps = 1 << 60
        self.steps = 0  # since the worker started; failures do not reset it
        self.clear()

    def clear(self) -> None:
        self.sequences = 0
        self.context_tokens = 0  # of all sequences
        # How many sequences need a new block before step s, at index -s modulo the block size.
        self._phase = [0] * self._block_size
        self._finish: list[tuple[int, int, int, Stay]] = []  # a heap of (last step, order of joining, epoch, stay)
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
        """Advance all sequences by this many steps. Returns those that have ended, already removed from the batch."""
        self.steps += steps
        self.context_tokens += self.sequences * steps
        finish, ended = self._finish, []
        while finish and finish[0][0] <= self.steps:
            _, _, epoch, stay = heapq.heappop(finish)
            if epoch == stay.epoch:  # else the sequence has been preempted since
                self.leave(stay)
                ended.append(stay)
        return ended

    def next_blocks(self) -> int:
        """New blocks that the next step needs."""
        return self._phase[-self.steps % self._block_size]

    def blocks_in(self, steps: int) -> int:
        """New blocks that the next `steps` steps need."""
        size, phase, at = self._block_size, self._phase, self.steps
        return steps // size * self.sequences + sum(phase[-(at + i) % size] for i in range(steps % size))

    def run_length(self, free_blocks: int) -> int:
        """Steps until the first sequence ends or `free_blocks` are used up, at least one."""
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


def chunks(prefilling: Iterable[Stay], budget: int, profile: Profile) -> tuple[list[tuple[Stay, int]], float]:
    """The prompt tokens of each stay, the first before the others, that a step of `budget` tokens computes, and by how
    many seconds they make it longer."""
    found, seconds = [], 0.0
    for stay in prefilling:
        tokens = stay.compute if stay.compute < budget else budget
        if tokens <= 0:
            break
        found.append((stay, tokens))
        budget -= tokens
        seconds += tokens * (profile.prefill_s_per_token + profile.attention_s * (stay.computed + tokens / 2))
    return found, seconds + (profile.prompt_s if found else 0.0)
