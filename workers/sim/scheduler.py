"""The simulated engine's requests in the model of an engine that the fleet simulator has, too. Pure: no clock, no I/O.

`orchestrator.simulator.engine` schedules, and owns blocks and prefix cache. It does not know how KV is transferred, nor
which tokens an answer has.
"""

from __future__ import annotations

import msgspec

from orchestrator.config.simulated import Simulated
from orchestrator.policy.choices.steps import StepTimes
from orchestrator.simulator.engine.batch import StepRun
from orchestrator.simulator.engine.engine import Engine
from orchestrator.simulator.engine.profile import Profile
from orchestrator.simulator.engine.stay import Stay
from orchestrator.types import FinishReason
from workers.engine import EngineLoad, InvalidEngineRequest, PrefixDelta
from workers.load.board import Board
from workers.sim.request import SimRequest

LOAD_S = 0.1  # to load an adapter, at `sim.speed` 1


class Sampled(msgspec.Struct, frozen=True):
    """A request's result of a step: its next token, and why it finished if it did."""

    request: SimRequest
    token: int
    first: bool
    finish: FinishReason | None
    stop_token: int | None = None


def profile_of(config: Simulated) -> Profile:
    speed = config.speed
    return Profile(
        name="sim",
        origin="the section `sim`",
        step_s=config.step_base_ms / 1e3 / speed,
        prefill_s_per_token=config.prefill_us_per_token / 1e6 / speed,
        decode_s_per_seq=config.decode_us_per_seq / 1e6 / speed,
        blocks=config.blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        adapter_slots=config.max_loras,
        adapter_load_s=LOAD_S / speed,
        kv_bytes_per_token=config.kv_bytes_per_token,
        link_bytes_per_s=config.link_gb_per_s * 1e9 * speed,
    )


class SimScheduler(Engine):
    """`submit` requests, then `schedule` and `complete` steps."""

    def __init__(self, config: Simulated, board: Board | None = None, tpot_s: float = 0.0) -> None:
        """`board`: of the group whose ranks step together. `tpot_s`: the objective of those that decode beside prompts
        for other engines; 0: none."""
        super().__init__(profile_of(config), config.block_size, self)
        self.board, self._times = board, StepTimes(tpot_s)
        self.requests: dict[str, SimRequest] = {}  # until their blocks are free
        self._started: list[SimRequest] = []
        self._cleared = False

    def submit(self, request: SimRequest) -> None:
        """Raises InvalidEngineRequest for a request that could never run here."""
        context, limit = len(request.prompt) + request.resume_tokens, self.profile.max_model_len
        needed = self.blocks_for(context + 1)
        if request.key in self.requests:
            raise InvalidEngineRequest(f"key {request.key} is in use")
        if not request.prompt:
            raise InvalidEngineRequest("the prompt has no tokens; the simulated engine takes token prompts only")
        if context >= limit:
            raise InvalidEngineRequest(f"the prompt has {context} tokens, the longest sequence is {limit}")
        if needed > self.kv.total:
            raise InvalidEngineRequest(f"the prompt needs {needed} KV blocks, the engine has {self.kv.total}")
        self.requests[request.key] = request
        self.add(request.enter(limit - context))

    # ---- steps -------------------------------------------------------------------------------------------------

    def schedule(self, now: float, paused: bool = False) -> tuple[StepRun | None, list[SimRequest]]:
        """The next step, None if there is nothing to compute, and the requests that have blocks now to receive KV into.
        None if `paused`."""
        step = None if paused else self.next_step(now)
        started, self._started = self._started, []
        if self.board is not None:
            ending = sum(stay.compute == tokens and stay.phase != "prefill" for stay, tokens in self.chunks)
            decodes, prompts = self.batch.sequences + len(self.arrived) + ending, self.pending_tokens - self.prompts
            self.board.plan(decodes, prompts, full=len(self.running) >= self.profile.max_num_seqs)
        return step, [request for request in started if request.kv_source is not None]

    def prompt_limit(self, beside_s: float) -> int | None:
        if self.board is not None:
            return self.board.budget(self.batch.sequences, self.pending_tokens, self.profile.max_num_batched_tokens)
        return self._times.prompt_tokens() if self.prompt_for_another() is not None else None

    @property
    def step_tokens(self) -> int:
        """Of the step that has begun."""
        return self.batch.sequences + self.prompts

    @property
    def prompts(self) -> int:
        """Tokens of prompts in the step that has begun."""
        return sum(tokens for _, tokens in self.chunks)

    def complete(self, seconds: float, now: float) -> list[Sampled]:
        """The step has ended, after so many seconds. Requests that left meanwhile get no token."""
        ran = list(self.running)
        self._times.ended(self.prompts, self.batch.sequences, seconds)
        self.finish(1, now)
        return [self._sample(stay) for stay in ran if self.generated(stay) > stay.job.sampled]

    def _sample(self, stay: Stay) -> Sampled:
        request: SimRequest = stay.job
        request.sampled += 1
        position = request.resume_tokens + request.sampled - 1
        ended = stay not in self.running
        token, finish, stop_token = request.last if ended else (request.stream.token(position), None, None)
        return Sampled(request, token, request.sampled == 1, finish, stop_token)

    # ---- ends --------------------------------------------------------------------------------------------------

    def kv_came(self, request: SimRequest, ok: bool) -> None:
        """The whole prompt's KV has arrived, or none will: then the prompt is computed here."""
        request.kv_source = None
        (self.receive if ok else self.lose)(request.stay)

    def withdraw(self, request: SimRequest) -> bool:
        """Take a request out of scheduling. Returns whether it has blocks: they stay reserved until `forget`."""
        request.left = True
        if not (held := self.leave(request.stay)):
            del self.requests[request.key]
        return held

    def forget(self, request: SimRequest) -> None:
        """Its blocks are free. Idempotent."""
        request.left = True
        if self.requests.pop(request.key, None) is not None and self.leave(request.stay):
            self.free(request.stay)

    # ---- what it tells -----------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """Without what the transfers know."""
        others = [*self.waiting, *self.receiving, *self.arrived]
        return EngineLoad(
            self.kv.free + self.uncomputed_blocks(),
            len(self.running),
            len(others),
            0.0,
            adapters=self.running.requests(others),
            adapter_load_s=self.profile.adapter_load_s if self.running.loads else 0.0,
        )

    def tokens_left(self) -> dict[str, int]:
        """Prompt tokens still to be computed, by key, of requests that run."""
        return {stay.job.key: stay.compute for stay in self.prefilling}

    def clear_cache(self) -> None:
        self.kv.forget()
        self.kv.dirty.clear()
        self._cleared = True

    def prefix_changes(self) -> PrefixDelta | None:
        """Since it was last called."""
        cleared, self._cleared = self._cleared, False
        stored, removed, _ = self.kv.take_changes()
        return PrefixDelta(stored, removed, cleared) if stored or removed or cleared else None

    # ---- called by the model -----------------------------------------------------------------------------------

    def on_start(self, _: Engine, stay: Stay, now: float) -> None:
        self._started.append(stay.job)

    def on_prefilled(self, _: Engine, stay: Stay, now: float) -> None:
        """Its blocks are held until the KV has been pushed."""

    def on_first(self, _: Engine, stay: Stay, at: float) -> None:
        """`complete` tells."""

    def on_done(self, _: Engine, stay: Stay, now: float) -> None:
        del self.requests[stay.job.key]
