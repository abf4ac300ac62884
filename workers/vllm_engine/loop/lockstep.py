"""The steps of an engine in a group whose ranks step together: what it tells the others, and how much they let it
compute, by `workers.load.board`. vLLM's own code makes the ranks meet."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

from workers.load.board import Board

_STARTS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def steps_of(engine: Any) -> Steps | None:
    """None for an engine that steps alone, or whose group has no board."""
    if not hasattr(engine, "_pd_steps"):
        board = Board.here(engine.batch_queue_size) if hasattr(engine, "dp_group") else None
        engine._pd_steps = Steps(engine, board) if board is not None else None
    steps: Steps | None = engine._pd_steps
    return steps


class Steps:
    """Takes part in an engine's steps from the first one on."""

    def __init__(self, engine: Any, board: Board) -> None:
        self._engine, self._board, self._tokens = engine, board, 0
        scheduler = engine.scheduler
        self._limits = scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.long_prefill_token_threshold
        self._schedule, self._execute_dummy = scheduler.schedule, engine.execute_dummy_batch
        scheduler.schedule, engine.execute_dummy_batch = self._level_and_schedule, self._dummy

    def ended(self, elapsed_ms: float) -> None:
        """A step that computed something."""
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
        limit, long = self._limits
        decodes, backlog, awaiting = self._work()
        chunk = self._board.budget(decodes, backlog, limit)
        if chunk is not None:
            # Requests whose KV comes from elsewhere start beside a long prompt.
            scheduler.scheduler_config.long_prefill_token_threshold = max(1, min(chunk, long or chunk))
            scheduler.max_num_scheduled_tokens = min(limit, decodes + chunk + awaiting)
        try:
            output = self._schedule(*args, **kwargs)
        finally:
            scheduler.max_num_scheduled_tokens = limit
            scheduler.scheduler_config.long_prefill_token_threshold = long
        self._tokens = output.total_num_scheduled_tokens
        decodes, backlog, _ = self._work()  # what is in the step counts as computed by now
        self._board.plan(decodes, backlog, len(scheduler.running) >= scheduler.max_num_running_reqs)
        return output
