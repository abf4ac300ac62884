"""Requests whose pixels stayed with the worker that prefilled them: where this engine needs them, it gives them back.

An engine that gets the KV of a prompt computes no image. It does so after all where it has lost that KV to a
preemption, where a transfer failed and it computes the prompt by itself, or where an image reaches the last token. vLLM
would encode nothing in place of missing pixels, and end for want of its output.
"""

from __future__ import annotations

from typing import Any

from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.core.sched.scheduler import Scheduler


def is_withheld(item: MultiModalKwargsItem | None) -> bool:
    """Whether nothing is left of a medium but what positions follow from."""
    return item is None or all(element.field.keep_on_cpu for element in item.values())


def give_back_withheld() -> None:
    """End with an error a request of which an image without pixels would be encoded: the router retries such ones, with
    everything. An image whose encoding is cached here needs none."""
    plan = Scheduler._try_schedule_encoder_inputs

    def plan_or_give_back(
        scheduler: Any, request: Any, computed_tokens: int, new_tokens: int, budget: int, **more: Any
    ) -> Any:
        planned = plan(scheduler, request, computed_tokens, new_tokens, budget, **more)
        if not any(is_withheld(request.mm_features[number].data) for number in planned[0]):
            return planned
        scheduler.encoder_cache_mismatch_reqs.add(request.request_id)  # vLLM ends these when the step has ended
        return [], 0, budget, [], []

    Scheduler._try_schedule_encoder_inputs = plan_or_give_back
