"""The steps of an engine that steps alone: prompts for other engines beside sequences that decode.

How many tokens of them a step computes is decided by `policy.choices.steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.policy.choices.steps import StepTimes


class PacedSteps:
    """Takes part in an engine's steps from the first one on. `tpot_s`: the objective of those that decode."""

    def __init__(self, scheduler: Any, tpot_s: float) -> None:
        self._scheduler, self._times, self._schedule = scheduler, StepTimes(tpot_s), scheduler.schedule
        scheduler.schedule = self._pace_and_schedule

    def ended(self, elapsed_ms: float, details: Any) -> None:
        """A step that computed something, with vLLM's details of it, or None."""
        if details is not None:
            self._times.ended(details.num_ctx_tokens, details.num_generation_requests, elapsed_ms / 1e3)

    def _pace_and_schedule(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = self._scheduler
        decodes = any(request.num_tokens - request.num_computed_tokens <= 1 for request in scheduler.running)
        chunk = self._times.prompt_tokens() if decodes and self._prefills() else None
        # Each that runs decodes at most so many, those whose KV has come included.
        beside = (1 + scheduler.num_spec_tokens) * (len(scheduler.running) + len(scheduler.kv_holding_waiting))
        return schedule_at_most(scheduler, chunk, beside, lambda: self._schedule(*args, **kwargs))

    def _prefills(self) -> bool:
        """Whether a prompt is there whose KV goes to another engine."""
        there = (*self._scheduler.running, *self._scheduler.waiting)
        return any((request.kv_transfer_params or {}).get("do_remote_decode") for request in there)


def schedule_at_most(scheduler: Any, chunk: int | None, beside: int, schedule: Callable[[], Any]) -> Any:
    """What `schedule` returns while a step computes so many prompt tokens at most, and `beside` others; None: as many
    as fit. Requests whose KV comes from elsewhere then start beside a long prompt."""
    config, most = scheduler.scheduler_config, scheduler.max_num_scheduled_tokens
    long = config.long_prefill_token_threshold
    if chunk is not None:
        config.long_prefill_token_threshold = max(1, min(chunk, long or chunk))
        scheduler.max_num_scheduled_tokens = min(most, chunk + beside)
    try:
        return schedule()
    finally:
        scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold = most, long
