"""Fixes of defects of vLLM 0.32.0 and PyTorch, for the processes of an engine, its ranks included.

A process group of one rank has no threads: with nobody to talk to, its collectives are copies. A gloo device looks for
messages a hundred times a second, vLLM makes a dozen such groups per engine, and PyTorch a device for each.

Seeded requests do not sample before their prompt is complete. On a CPU a step with chunked prefills samples for them
too, discards the token and rewinds the request's generator. CPU generators cannot be rewound, and the engine ends ("CPU
Generator does not use offset").

Ranks that share cores sleep while they wait for a message. vLLM's ranks spin for a second after each message, which
takes cores from the ranks that compute, from the agents, and from the other engines of a CPU.

Later pipeline stages have buffers for the output of the stage before. On a CPU vLLM makes them when it warms up. It
skips that if nothing is compiled, and the first step fails.

Where nothing is to be compiled (`enforce_eager`), nothing is. vLLM compiles its sampling and log-probabilities even so,
which takes a forked engine two seconds at its start.

What a model's class can do is found out in the process that asks. vLLM starts one that imports all of vLLM, lest a
device be initialised here: at a first start each agent and frontend did, for some 10 s of CPU time. A CPU needs none.

What every engine needs is loaded before any is forked (`load_for_engines`), and what hardly one needs when it does: its
tokenizer with the first grammar, and the code of quantized weights where weights are quantized.

A token without LoRA adapter is computed without one. Beside tokens with one, vLLM's kernels for CPUs take -1, the slot
of those without, for the last: they get the weights of the adapter there, and so does what is cached of them.

Log-probabilities of a prompt (`prompt_logprobs`) are computed with the adapter of its request. Where adapters may come,
vLLM's kernel for CPUs looks for a slot per sampled token, finds too few for a prompt's tokens, and the engine ends.

With drafts, a temperature or top-p is its request's. vLLM's sampler spreads them over the tokens of drafts, and its
kernel for CPUs writes into a copy that is lost: where one request of a batch draws, the logits of all drafts, of greedy
requests too, are divided by what was in memory. A draft of -1 is none, and is rejected: with such vLLM fills up the
first step after KV has come. Its kernels for CPUs read what lies before a row for it, and may take it for a token.

An engine process ends without collecting garbage. vLLM collects three times, with all objects that were frozen before
the process was forked: it copies the memory that it shares, for a second, and then ends.

What a step would have computed is cached only if it does. vLLM names blocks in its prefix cache when it reserves them,
and where requests have priorities it may preempt one that it has just put into the same step. That one then resumes
with the blocks that nobody has computed, as do others with that prefix.

A request whose KV did not come gives its blocks back at once, and waits with those that have none. vLLM lets it give
them back when its turn comes, and goes on waiting with those that have blocks. Where it gets none, as it may need more
to compute its prompt than to receive it (of a sliding window), those behind it keep theirs, and no step runs any more.

The connector hears of preemptions before the step that gives their blocks away touches the device. vLLM's second model
runner tells it after zeroing and copying of blocks are queued, so that a WRITE which ends in between would count.
"""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

_ALONE = "alone"  # the backend of a group of one rank
_AWAKE_S = 1.0  # so long after a message, a rank checks for the next one ...
_LOOK_AGAIN_MS = 1  # ... this often, since ZMQ may drop a notice that closely follows another


def spare_groups_of_one() -> None:
    """Groups of one rank that are made from now on, and asked for with gloo, get a backend without threads. Does
    nothing if PyTorch has no gloo."""
    if not distributed_c10d.is_gloo_available():
        return
    new_group = distributed_c10d._new_process_group_helper
    devices = distributed_c10d.Backend.backend_capability[distributed_c10d.Backend.GLOO]
    distributed_c10d.Backend.register_backend(_ALONE, _alone, devices=list(devices))

    def new(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = _ALONE if size == 1 and str(backend) == distributed_c10d.Backend.GLOO else backend
        return new_group(size, rank, ranks, wanted, *args, **kwargs)

    distributed_c10d._new_process_group_helper = new


def _alone(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """PyTorch's stand-in for many ranks copies its own input to each output: with one rank this is what is asked."""
    return FakeProcessGroup._create_internal(rank, size)


def tell_preemptions_first() -> None:
    """The hook may be called twice in a step; it empties what it has read."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    update_requests = GPUModelRunner.update_requests

    def update(runner: Any, scheduler_output: Any) -> None:
        if has_kv_transfer_group() and scheduler_output.kv_connector_metadata is not None:
            get_kv_transfer_group().handle_preemptions(scheduler_output.kv_connector_metadata)
        update_requests(runner, scheduler_output)

    GPUModelRunner.update_requests = update


def cache_only_what_is_computed() -> None:
    """A request that is preempted leaves no block in the prefix cache beyond those that earlier steps computed."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt = Scheduler._preempt_request

    def preempt_request(scheduler: Any, request: Any, *args: Any, **options: Any) -> None:
        cache, computed = scheduler.kv_cache_manager, request.num_computed_tokens
        by_group = zip(cache.get_blocks(request.request_id).blocks, cache.coordinator.group_block_sizes, strict=True)
        begun = [block for blocks, block_size in by_group for block in blocks[computed // block_size :]]
        cache.evict_blocks({block.block_id for block in begun if block.ref_cnt == 1})
        preempt(scheduler, request, *args, **options)

    Scheduler._preempt_request = preempt_request


def free_what_did_not_come() -> None:
    """In an engine that is paused for new requests alone it stays with those that have blocks, which go on."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler._update_from_kv_xfer_finished

    def update_from_transfers(scheduler: Any, output: Any) -> None:
        update(scheduler, output)
        ended = scheduler.failed_recving_kv_req_ids & scheduler.finished_recving_kv_req_ids
        for key in ended:
            scheduler._handle_blocked_waiting_request(scheduler.requests[key])
        if scheduler._pause_state is not PauseState.PAUSED_NEW:
            holding = scheduler.kv_holding_waiting
            freed = [request for request in holding if not scheduler._holds_kv_blocks(request)]
            holding.remove_requests(freed)
            scheduler.deferred_waiting.difference_update(freed)
            scheduler._inflight_prefills.difference_update(freed)  # no room is kept for them any more
            for request in reversed(freed):
                scheduler.waiting.prepend_request(request)

    Scheduler._update_from_kv_xfer_finished = update_from_transfers


def patch_cpu_engines() -> None:
    """Apply the fixes for CPU engines in this process. Does nothing on another platform."""
    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda ask: ask()
        _load_when_needed()
        _spare_generators()
        _spread_over_drafts()
        _reject_padding()
        _make_stage_buffers()
        _sleep_between_messages()
        _end_without_collecting()


def load_for_engines() -> None:
    """Load what each engine on a CPU would load, into the process that forks them. No thread runs afterwards."""
    if current_platform.is_cpu():
        from vllm.v1.worker import cpu_worker  # noqa: F401

        # Looks through all that is loaded, half a second long. What is loaded later finds its result.
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda platform: None)


def _load_when_needed() -> None:
    from vllm.model_executor.model_loader import base_loader
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1 import structured_output

    online = base_loader._get_online_quantization_config
    structured_output.cached_tokenizer_from_config = lambda model_config: None
    structured_output.StructuredOutputManager.tokenizer = property(
        lambda manager: cached_tokenizer_from_config(manager.vllm_config.model_config), lambda manager, none: None
    )
    base_loader._get_online_quantization_config = lambda config: online(config) if config.quant_config else None


def compiles(config: Any) -> bool:
    """Whether an engine of this configuration of vLLM compiles anything. On other platforms than CPUs vLLM's choice
    holds."""
    return not (current_platform.is_cpu() and config.model_config.enforce_eager)


def patch_as_configured(config: Any) -> None:
    """The fixes that depend on an engine's configuration of vLLM.

    Where nothing is compiled batches are sampled in up to twice the time, a hundredth to a tenth of a step.
    """
    if current_platform.is_cpu() and config.use_v2_model_runner:
        tell_preemptions_first()
    if current_platform.is_cpu() and config.lora_config:
        _add_adapters_where_wanted()
        _score_prompts_with_adapters()
    if not compiles(config):
        torch.compiler.set_stance("force_eager")


def _add_adapters_where_wanted() -> None:
    """All that an adapter adds to an output goes through one of two functions."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def where_wanted(add: Any) -> Any:
        def added(inputs: Any, weights: Any, output: Any, slots: Any, *args: Any, **kwargs: Any) -> None:
            add(inputs.masked_fill((slots < 0).unsqueeze(1), 0), weights, output, slots, *args, **kwargs)

        return added

    for name in ("bgmv_expand", "bgmv_expand_slice"):
        wanted = where_wanted(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):
            setattr(module, name, wanted)


def _score_prompts_with_adapters() -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    add, first_token = PunicaWrapperCPU.add_lora_logits, list[int]()  # in the step, of the prompt that is scored

    def add_logits(wrapper: Any, logits: Any, states: Any, *args: Any, **kwargs: Any) -> None:
        was, lengths = wrapper._sampler_indices, list(wrapper.indices_len)
        if first_token:
            wrapper._sampler_indices = wrapper.token_lora_indices[first_token[0]].expand(len(states))
            wrapper.indices_len[1] = len(states)
        add(wrapper, logits, states, *args, **kwargs)
        wrapper._sampler_indices, wrapper.indices_len[:] = was, lengths

    def prompt_logprobs(runner: Any, states: Any, tokens: dict[str, int]) -> dict[str, Any]:
        asked, found = runner.num_prompt_logprobs, dict[str, Any]()
        for key in [key for key in asked if key in tokens]:  # in one order on all ranks
            runner.num_prompt_logprobs = {key: asked.pop(key)}
            first_token[:] = [runner.query_start_loc.np[runner.input_batch.req_id_to_index[key]].item()]
            found |= GPUModelRunner._get_prompt_logprobs_dict(runner, states, tokens)
            asked |= runner.num_prompt_logprobs  # unless that was its last part
        runner.num_prompt_logprobs = asked
        first_token.clear()
        return found

    PunicaWrapperCPU.add_lora_logits = add_logits
    CPUModelRunner._get_prompt_logprobs_dict = prompt_logprobs


def _end_without_collecting() -> None:
    from vllm.v1.engine.core import EngineCoreProc

    shutdown = EngineCoreProc.shutdown

    def end(engine: Any) -> None:
        gc.unfreeze, gc.collect = (lambda: None), (lambda generation=2: 0)
        shutdown(engine)

    EngineCoreProc.shutdown = end


def _sleep_between_messages() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait_for_notice = SpinCondition.wait

    def wait(condition: Any, timeout_ms: int | None = None) -> None:
        condition.busy_loop_s = 0
        awake = time.monotonic() < condition.last_read + _AWAKE_S
        wait_for_notice(condition, _LOOK_AGAIN_MS if awake else timeout_ms)

    SpinCondition.wait = wait


def _make_stage_buffers() -> None:
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load_model = CPUModelRunner.load_model

    def load(runner: Any, *args: Any, **kwargs: Any) -> None:
        load_model(runner, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    CPUModelRunner.load_model = load


def _spare_generators() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def sample(runner: Any, *args: Any) -> Any:
        batch = runner.input_batch
        unfinished = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        runner.spared = {row: batch.generators.pop(row) for row in unfinished if row in batch.generators}
        return GPUModelRunner._sample(runner, *args)

    def bookkeeping(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = GPUModelRunner._bookkeeping_sync(runner, *args, **kwargs)
        runner.input_batch.generators.update(runner.spared)  # rows move only between steps
        return result

    CPUModelRunner._sample = sample
    CPUModelRunner._bookkeeping_sync = bookkeeping


def _spread_over_drafts() -> None:
    from vllm.v1.sample import rejection_sampler

    def expand(each: Any, ends: Any, tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return each.masked_fill(each == replace_from, replace_to).repeat_interleave(counts, output_size=tokens)

    rejection_sampler.expand_batch_to_tokens = expand


def _reject_padding() -> None:
    from vllm.v1.sample import rejection_sampler

    recover, accept = rejection_sampler._sample_recovered_tokens, rejection_sampler._rejection_random_sample

    def recovered(tokens: Any, ends: Any, drafts: Any, draft_probs: Any, probs: Any, noise: Any, **kwargs: Any) -> None:
        recover(tokens, ends, drafts.clamp(min=0), draft_probs, probs, noise, **kwargs)
        if (padded := drafts < 0).any():
            requests = torch.searchsorted(ends, padded.nonzero().flatten(), right=True)
            tokens[padded] = (probs[padded] * noise[requests]).argmax(dim=-1).to(tokens.dtype)

    def accepted(tokens: Any, ends: Any, drafts: Any, *between: Any) -> None:
        *rest, drawn, is_greedy, longest, rates = between
        accept(
            tokens,
            ends,
            drafts.clamp(min=0),
            *rest,
            drawn.masked_fill(drafts < 0, float("inf")),
            is_greedy,
            longest,
            rates,
        )

    kernels: list[tuple[Any, Any]] = [(recover, recovered), (accept, accepted)]
    for kernel, ours in kernels:
        ours.register_warmup = kernel.register_warmup
    rejection_sampler._sample_recovered_tokens = recovered
    rejection_sampler._rejection_random_sample = accepted
