"""A request that another engine has begun: its answer goes on here, and of what stayed there it is given back.

To vLLM the answer is one of a request that it preempted itself and takes up again. The tokens that the client has are
output tokens, whose KV is computed once more. So limits, penalties, bad words and logits processors count them as they
did where they were sampled. vLLM's second model runner gets all tokens of a request that is new to it, and tells by the
prompt's length which of them are output. What is added here:

- The engine core and the first model runner make a request with these tokens.
- A grammar that is compiled accepts them before it is used.
- A seeded request draws what it would have drawn next. The first model runner makes a request's generator of its seed
  alone; the second one takes the place of each token too.
- A budget for thinking is counted as it was, token by token, which vLLM does not do after a preemption either: its
  first model runner takes all tokens at once, and then may think on past the budget, or end its thoughts twice.
- A request is given back where this engine needs the pixels of its images, which stayed with the worker that prefilled
  it. An engine that gets the KV of a prompt computes no image. It does so after all where it has lost that KV to a
  preemption, where a transfer failed and it computes the prompt by itself, or where an image reaches the last token.
  vLLM would encode nothing in place of missing pixels, and end for want of its output.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.utils import ConstantList

SENT = "pd_sent"  # in a request's `extra_args`: the tokens of its answer that its client has


def _sent(params: SamplingParams | None) -> list[int]:
    return (params.extra_args or {}).get(SENT, []) if params is not None else []


def continue_answers() -> None:
    """In an engine's process and in those of its ranks."""
    _give_back_withheld()
    _make_requests()
    _advance_grammars()
    _make_states()
    _draw_on()
    _count_thoughts()


def _make_requests() -> None:
    make = Request.from_engine_core_request

    def made(core: Any, block_hasher: Any) -> Request:
        request = make(core, block_hasher)
        if sent := _sent(request.sampling_params):
            request.append_output_token_ids(sent)
            request.prefill_stats = None  # as after the first token, with which the client got them
        return request

    Request.from_engine_core_request = staticmethod(made)


def _advance_grammars() -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    create = StructuredOutputManager._create_grammar

    def created(manager: Any, request: Request) -> Any:
        grammar = create(manager, request)
        if request.num_output_tokens:
            _advance(manager, request, grammar)
        return grammar

    StructuredOutputManager._create_grammar = created


def _advance(manager: Any, request: Request, grammar: Any) -> None:
    """As vLLM did with each token: where a model thinks first, its parser says at which one the grammar begins."""
    asked: Any = request.structured_output_request
    so_far: Any = copy.copy(request)
    so_far.structured_output_request = begun = dataclasses.replace(asked, _grammar=grammar)
    tokens = request._all_token_ids[: request.num_prompt_tokens]
    so_far.all_token_ids = ConstantList(tokens)
    for token in request._output_token_ids:
        tokens.append(token)
        if not manager.accept_tokens(so_far, [token]):
            raise ValueError(f"{request.request_id}: its grammar does not accept the tokens that its client has")
    asked.reasoning_ended, asked.reasoner = begun.reasoning_ended, begun.reasoner


# ---- the first model runner ----------------------------------------------------------------------------------------


def _make_states() -> None:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    make = CachedRequestState.__post_init__

    def made(state: Any) -> None:
        make(state)
        state.output_token_ids.extend(_sent(state.sampling_params))

    CachedRequestState.__post_init__ = made


def _draw_on() -> None:
    """What has been sampled by an earlier attempt is drawn again, in whichever way this platform's sampler draws."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    update = GPUModelRunner._update_states

    def update_states(runner: Any, scheduler_output: Any) -> Any:
        corrections = update(runner, scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            generator = runner.requests[request.req_id].generator
            if generator is not None and (sent := _sent(request.sampling_params)):
                _draw(runner, generator, len(sent))
        return corrections

    GPUModelRunner._update_states = update_states


def _draw(runner: Any, generator: torch.Generator, times: int) -> None:
    """All at once: many answers that go on in one step, each after thousands of tokens, would hold it up for seconds.
    Only `use_fp64_gumbel` on a CPU takes 10 ms for each token, of a large vocabulary."""
    sampler = runner.sampler.topk_topp_sampler
    if sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel:
        torch.randint(0, 1 << 31, (times,), generator=generator)  # one after the other, as one by one
        return
    dtype = torch.float64 if sampler.use_fp64_gumbel else torch.float32
    noise = torch.empty(runner.model_config.get_vocab_size(), dtype=dtype, device=runner.device)
    if runner.device.type == "cpu":
        for _ in range(times):
            noise.exponential_(generator=generator)
    else:  # each draw of one size moves a device's generator on by as much
        before = generator.get_offset()
        noise.exponential_(generator=generator)
        generator.set_offset(before + times * (generator.get_offset() - before))


def _count_thoughts() -> None:
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    update = ThinkingBudgetStateHolder._update_think_state

    def update_think_state(holder: Any, state: dict[str, Any]) -> None:
        if not state.setdefault("pd_counted", False):
            state["pd_counted"] = True
            sampled, drafts, so_far = state["output_tok_ids"], state["spec_token_ids"], list[int]()
            state.update(output_tok_ids=so_far, spec_token_ids=[])
            longest = max(len(holder.think_start_token_ids), len(holder.think_end_token_ids))
            for token in sampled:  # a mark that began earlier has been found before
                state.update(force_index=[], scan_offset=max(state["scan_offset"], len(so_far) - longest))
                update(holder, state)
                so_far.append(token)
            state.update(output_tok_ids=sampled, spec_token_ids=drafts, force_index=[])
        update(holder, state)

    ThinkingBudgetStateHolder._update_think_state = update_think_state


# ---- images whose pixels stayed elsewhere --------------------------------------------------------------------------


def is_withheld(item: MultiModalKwargsItem | None) -> bool:
    """Whether nothing is left of a medium but what positions follow from."""
    return item is None or all(element.field.keep_on_cpu for element in item.values())


def _give_back_withheld() -> None:
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
