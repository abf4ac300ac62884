"""How many prompt tokens a step computes beside what decodes: as `StepTimes` says for an engine that steps alone, and
`Board` for one in a group whose ranks step together. vLLM's own code makes the ranks meet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from vllm.v1.request import RequestStatus

from orchestrator.policy.choices.steps import StepTimes, share_of
from workers.load.board import Board

TPOT = "PD_TPOT_S"  # the objective of those that decode beside prompts for other engines; 0: none
STARTS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_LEAST = 2  # tokens of a prompt in a step: one looks like the first token after KV has come


def steps_of(engine: Any) -> Steps | PacedSteps | None:
    """None for an engine whose group has no board, or that steps alone and has no objective."""
    if not hasattr(engine, "_pd_steps"):
        if not hasattr(engine, "dp_group"):
            tpot_s = float(os.environ.get(TPOT, 0))
            engine._pd_steps = PacedSteps(engine.scheduler, tpot_s) if tpot_s else None
        else:
            board = Board.here(engine.batch_queue_size, 1 + engine.scheduler.num_spec_tokens)
            engine._pd_steps = Steps(engine, board) if board is not None else None
    steps: Steps | PacedSteps | None = engine._pd_steps
    return steps


class Steps:
    """Takes part in the steps of an engine in a group from the first one on, and tells the others of it."""

    def __init__(self, engine: Any, board: Board) -> None:
        self._engine, self._board, self._tokens, self._prompts = engine, board, 0, 0
        scheduler = engine.scheduler
        self._schedule, self._execute_dummy = scheduler.schedule, engine.execute_dummy_batch
        scheduler.schedule, engine.execute_dummy_batch = self._level_and_schedule, self._dummy
        self._waited_s = 0.0  # of the turn before this dummy batch

    def ended(self, executed: bool, elapsed_ms: float, details: Any = None) -> None:
        """A turn, in which a step was begun if `executed`. Else it has waited for one that was begun ahead, if any, and
        the group's next step begins with the dummy batch that follows, which has that time."""
        self._waited_s = 0.0 if executed else elapsed_ms / 1e3
        if executed:
            self._board.note(self._tokens, elapsed_ms / 1e3, self._engine.current_wave + 1, self._prompts)

    def _dummy(self) -> None:
        if not self._engine.scheduler.has_unfinished_requests():  # else its schedule has told of them
            self._board.plan(0, 0, False)
        self._execute_dummy()
        self._board.note(0, self._waited_s, self._engine.current_wave + 1)
        self._waited_s = 0.0

    def _work(self) -> tuple[int, int, int]:
        """Tokens that it decodes in a step, those of prompts that are to be computed, and those that it will decode
        once KV has come."""
        scheduler = self._engine.scheduler
        decodes = backlog = 0
        # Their KV has come, or is about to: a step for each, beside the drafts that go with it.
        awaiting = (1 + scheduler.num_spec_tokens) * len(scheduler.kv_holding_waiting)
        for request in scheduler.running:
            left = request.num_tokens - request.num_computed_tokens
            if left > 1:
                backlog += left
            elif left == 1 or not _goes_elsewhere(request):  # else its last chunk is in the step
                decodes += 1 + scheduler.num_spec_tokens
        for request in scheduler.waiting:
            if request.status in STARTS and not (request.kv_transfer_params or {}).get("do_remote_prefill"):
                backlog += max(0, request.num_tokens - request.num_computed_tokens)
            else:
                awaiting += 1
        return decodes, backlog, awaiting

    def _level_and_schedule(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = self._engine.scheduler
        decodes, backlog, awaiting = self._work()
        chunk = self._board.budget(decodes, backlog, scheduler.max_num_scheduled_tokens)
        output = schedule_at_most(scheduler, chunk, decodes + awaiting, lambda: self._schedule(*args, **kwargs))
        self._tokens, each = output.total_num_scheduled_tokens, 1 + scheduler.num_spec_tokens
        self._prompts = sum(tokens - each for tokens in output.num_scheduled_tokens.values() if tokens > each)
        decodes, backlog, _ = self._work()  # what is in the step counts as computed by now
        self._board.plan(decodes, backlog, len(scheduler.running) >= scheduler.max_num_active_reqs)
        return output


class PacedSteps:
    """Takes part in the steps of an engine that steps alone, from the first one on: prompts for other engines beside
    sequences that decode. `tpot_s`: the objective of these."""

    def __init__(self, scheduler: Any, tpot_s: float) -> None:
        self._scheduler, self._times, self._schedule = scheduler, StepTimes(tpot_s), scheduler.schedule
        scheduler.schedule = self._pace_and_schedule

    def ended(self, executed: bool, elapsed_ms: float, details: Any) -> None:
        """A turn, with vLLM's details of the step that ended in it, or None. Of steps that are begun ahead the last one
        ends in a turn that begins none."""
        if details is not None:
            # The first token after KV has come counts as one of a prompt there.
            prompt_tokens = computed_tokens(details, self._scheduler.num_spec_tokens) - details.num_ctx_requests
            self._times.ended(prompt_tokens, details.num_generation_requests, elapsed_ms / 1e3)

    def _pace_and_schedule(self, *args: Any, **kwargs: Any) -> Any:
        scheduler, decodes, prefills = self._scheduler, 0, False
        for request in scheduler.running:
            if _goes_elsewhere(request):  # also where its last tokens are computed now: it decodes nothing here
                prefills = True
            elif request.num_tokens - request.num_computed_tokens <= 1:
                decodes += 1
        if decodes and not prefills and scheduler.waiting:  # of these the first is the next to run
            prefills = _goes_elsewhere(scheduler.waiting.peek_request())
        chunk = self._times.prompt_tokens() if decodes and prefills else None
        # Each decodes at most so many, those whose KV has come included.
        beside = (1 + scheduler.num_spec_tokens) * (decodes + len(scheduler.kv_holding_waiting))
        return schedule_at_most(scheduler, chunk, beside, lambda: self._schedule(*args, **kwargs))


def computed_tokens(details: Any, num_spec_tokens: int) -> int:
    """Tokens of prompts in a step, and of answers that are computed again, which vLLM counts among those that decode:
    each of these has one, and its drafts."""
    again = details.num_generation_tokens - (1 + num_spec_tokens) * details.num_generation_requests
    return int(details.num_ctx_tokens + max(0, again))


def _goes_elsewhere(request: Any) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


def schedule_at_most(scheduler: Any, chunk: int | None, beside: int, schedule: Callable[[], Any]) -> Any:
    """What `schedule` returns while a step computes so many prompt tokens at most, and `beside` others; None: as many
    as fit. Requests whose KV comes from elsewhere then start beside long prompts, which share the chunk: what the first
    one leaves, the next would take from all behind it. Where the model or the user wants prompts or images to be
    computed whole, they are."""
    config, most = scheduler.scheduler_config, scheduler.max_num_scheduled_tokens
    long, raised = config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold
    if chunk is not None and config.enable_chunked_prefill and not config.disable_chunked_mm_input:
        # vLLM ends where a request that decodes first after its KV has come is cut, its drafts included. A prompt does
        # not go on with less than the tokens of it that drafts look ahead, nor with one, by which nothing is learned.
        least = max(_LEAST, 1 + scheduler.num_spec_tokens, scheduler.num_prefill_lookahead)
        lefts = [request.num_tokens - request.num_computed_tokens for request in scheduler.running]
        prompts = [left for left in lefts if left > 1]
        share = max(least, min(share_of(chunk, prompts), long or chunk))
        config.long_prefill_token_threshold = share
        scheduler.adaptive_long_prefill_threshold = False  # vLLM would raise it where few requests run
        all_of_prompts = max(least, chunk, sum(min(share, left) for left in prompts))
        scheduler.max_num_scheduled_tokens = min(most, all_of_prompts + beside)
    try:
        return schedule()
    finally:
        scheduler.max_num_scheduled_tokens, scheduler.adaptive_long_prefill_threshold = most, raised
        config.long_prefill_token_threshold = long
