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

    def ended(self, executed: bool, elapsed_ms: float, details: Any) -> None:
        """A turn, with vLLM's details of the step that ended in it, or None. Of steps that are begun ahead the last one
        ends in a turn that begins none."""
        if details is not None:
            # The first token after KV has come counts as one of a prompt there.
            prompt_tokens = details.num_ctx_tokens - details.num_ctx_requests
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


def _goes_elsewhere(request: Any) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


def schedule_at_most(scheduler: Any, chunk: int | None, beside: int, schedule: Callable[[], Any]) -> Any:
    """What `schedule` returns while a step computes so many prompt tokens at most, and `beside` others; None: as many
    as fit. Requests whose KV comes from elsewhere then start beside long prompts, which share the chunk: what the first
    one leaves, the next would take from all behind it. Where the model or the user wants prompts or images to be
    computed whole, they are."""
    config, most = scheduler.scheduler_config, scheduler.max_num_scheduled_tokens
    long = config.long_prefill_token_threshold
    if chunk is not None and config.enable_chunked_prefill and not config.disable_chunked_mm_input:
        # vLLM ends where a request that decodes first after its KV has come is cut, its drafts included. And a prompt
        # does not go on with less than the tokens of it that drafts look ahead.
        least = max(1 + scheduler.num_spec_tokens, scheduler.num_prefill_lookahead)
        prompts = sum(request.num_tokens - request.num_computed_tokens > 1 for request in scheduler.running)
        config.long_prefill_token_threshold = max(least, min(chunk // max(1, prompts), long or chunk))
        scheduler.max_num_scheduled_tokens = min(most, max(least, chunk) + beside)
    try:
        return schedule()
    finally:
        scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold = most, long
