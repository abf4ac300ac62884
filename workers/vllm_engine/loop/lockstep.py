"""The steps of an engine in a group whose ranks step together: what it tells the others, and how much they let it
compute, by `workers.load.board`. vLLM's own code makes the ranks meet."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.request import RequestStatus

from workers.load.board import Board
from workers.vllm_engine.loop.paced import PacedSteps, schedule_at_most

TPOT = "PD_TPOT_S"  # the objective of those that decode beside prompts for other engines; 0: none
_STARTS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def steps_of(engine: Any) -> Steps | PacedSteps | None:
    """None for an engine whose group has no board, or that steps alone and has no objective."""
    if not hasattr(engine, "_pd_steps"):
        if not hasattr(engine, "dp_group"):
            tpot_s = float(os.environ.get(TPOT, 0))
            engine._pd_steps = PacedSteps(engine.scheduler, tpot_s) if tpot_s else None
        else:
            board = Board.here(engine.batch_queue_size)
            engine._pd_steps = Steps(engine, board) if board is not None else None
    steps: Steps | PacedSteps | None = engine._pd_steps
    return steps


class Steps:
    """Takes part in an engine's steps from the first one on."""

    def __init__(self, engine: Any, board: Board) -> None:
        self._engine, self._board, self._tokens = engine, board, 0
        scheduler = engine.scheduler
        self._schedule, self._execute_dummy = scheduler.schedule, engine.execute_dummy_batch
        scheduler.schedule, engine.execute_dummy_batch = self._level_and_schedule, self._dummy

    def ended(self, executed: bool, elapsed_ms: float, details: Any = None) -> None:
        """A turn, in which a step was begun if `executed`."""
        if not executed:
            return
        self._board.note(self._tokens, elapsed_ms / 1e3, self._engine.current_wave + 1)

    def _dummy(self) -> None:
        if not self._engine.scheduler.has_unfinished_requests():  # else its schedule has told of them
            self._board.plan(0, 0, False)
        self._execute_dummy()
        self._board.note(0, 0.0, self._engine.current_wave + 1)

    def _work(self) -> tuple[int, int, int]:
        """Tokens that it decodes in a step, those of prompts that are to be computed, and those that it will decode
        once KV has come."""
        scheduler = self._engine.scheduler
        decodes = backlog = 0
        # Their KV has come, or is about to: a step for each, beside the drafts that go with it.
        awaiting = (1 + scheduler.num_spec_tokens) * len(scheduler.kv_holding_waiting)
        for request in scheduler.running:
            left = request.num_tokens - request.num_computed_tokens
            decodes += 1 + scheduler.num_spec_tokens if left <= 1 else 0
            backlog += left if left > 1 else 0
        for request in scheduler.waiting:
            if request.status in _STARTS and not (request.kv_transfer_params or {}).get("do_remote_prefill"):
                backlog += max(0, request.num_tokens - request.num_computed_tokens)
            else:
                awaiting += 1
        return decodes, backlog, awaiting

    def _level_and_schedule(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = self._engine.scheduler
        decodes, backlog, awaiting = self._work()
        chunk = self._board.budget(decodes, backlog, scheduler.max_num_scheduled_tokens)
        output = schedule_at_most(scheduler, chunk, decodes + awaiting, lambda: self._schedule(*args, **kwargs))
        self._tokens = output.total_num_scheduled_tokens
        decodes, backlog, _ = self._work()  # what is in the step counts as computed by now
        self._board.plan(decodes, backlog, len(scheduler.running) >= scheduler.max_num_active_reqs)
        return output
