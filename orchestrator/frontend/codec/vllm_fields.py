"""What each field of a vLLM request permits: that another worker prefills it, that another one continues its answer.

Every field of vLLM's two structs is named here, so that a test fails for one that a newer vLLM adds: somebody then
reads what it does. See vllm/v1/engine/__init__.py and vllm/sampling_params.py, 0.32.0.

The worker that prefills encodes images, videos and sounds. One that decodes gets the KV and, of each medium, its place
in the prompt and what its positions follow from. Where it needs pixels after all, it gives the request back
(workers.vllm_engine.codec.withheld), and the next attempt has everything.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.multimodal.utils import strip_covered_mm_data
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from orchestrator.policy.prefix_keys import Medium

Test = Callable[[Any], bool]


def _is_set(value: Any) -> bool:
    return value is not None


def _is_missing(value: Any) -> bool:
    return value is None


def _never(_: Any) -> bool:
    return False


class Limit(msgspec.Struct, frozen=True):
    """Tests of a field's value. `local`: the prompt is computed where it decodes, and `why` (the field's name unless
    given) is the reason. `ends`: the prompt plus the tokens sent, given as a prompt, would not continue as if
    uninterrupted."""

    local: Test = _never
    ends: Test = _never
    why: str = ""


REQUEST_LIMITS: dict[str, Limit] = {
    "pooling_params": Limit(local=_is_set, ends=_is_set, why="pooling"),
    "prompt_embeds": Limit(local=_is_set, ends=_is_set),
    "prompt_token_ids": Limit(local=_is_missing, ends=_is_missing, why="prompt_embeds"),
}
SAMPLING_LIMITS: dict[str, Limit] = {
    "n": Limit(local=lambda n: n > 1),
    # vLLM computes the whole prompt for these, whatever KV has come or is cached.
    "prompt_logprobs": Limit(local=_is_set, ends=_is_set),
    "prompt_logprob_token_ids": Limit(local=_is_set, ends=_is_set),
    "skip_reading_prefix_cache": Limit(local=bool),
    # These look at generated tokens only, or carry state from one to the next.
    "presence_penalty": Limit(ends=bool),
    "frequency_penalty": Limit(ends=bool),
    "structured_outputs": Limit(ends=_is_set),
    "_bad_words_token_ids": Limit(ends=lambda words: any(len(word) > 1 for word in words or ())),
    "repetition_detection": Limit(ends=lambda wanted: wanted is not None and wanted.max_pattern_size > 0),
}

# Fields that permit both, whatever they are. Of media it depends on the model (`MediaRules`). Of sampling parameters:
# the worker shrinks limits and cuts the trace by the tokens sent; a budget for thinking and the repetition penalty
# count the prompt too; a seed starts anew.
REQUEST_FREE = frozenset(
    """request_id sampling_params arrival_time lora_request cache_salt data_parallel_rank prompt_is_token_ids
    client_index current_wave priority trace_headers resumable external_req_id reasoning_ended reasoning_parser_kwargs
    abort_immediately session_id kv_hints mm_features""".split()
)
SAMPLING_FREE = frozenset(
    """repetition_penalty temperature watermarking top_p top_k min_p seed stop stop_token_ids ignore_eos max_tokens
    min_tokens logprobs prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone
    output_text_buffer_length _eos_token_id _all_stop_token_ids _watermarking_skipped logit_bias allowed_token_ids
    extra_args bad_words thinking_token_budget routed_experts_prompt_start trace_decode_token_ids""".split()
)


def local_only_reason(request: EngineCoreRequest) -> str | None:
    """Why the worker that decodes the request must prefill it too; None if another one may."""
    for limits, fields in _limited(request):
        for name, limit in limits.items():
            if limit.local(getattr(fields, name)):
                return limit.why or name
    if not request.request_id.startswith(request.external_req_id or ""):
        return "n"  # vLLM names the children of a request with n > 1 "0_<id>", "1_<id>", ...
    return None


def can_continue(request: EngineCoreRequest) -> bool:
    """Whether the prompt plus the tokens sent, given as a prompt, continues as if uninterrupted."""
    return not any(
        limit.ends(getattr(fields, name)) for limits, fields in _limited(request) for name, limit in limits.items()
    )


def custom_processors(config: VllmConfig) -> bool:
    """Whether engines run logits processors of the operator, by `engine_args.logits_processors` or installed."""
    return bool(config.model_config.logits_processors or entry_points(group=LOGITSPROCS_GROUP))


def _limited(request: EngineCoreRequest) -> list[tuple[dict[str, Limit], Any]]:
    sampling = request.sampling_params
    return [(REQUEST_LIMITS, request)] + ([(SAMPLING_LIMITS, sampling)] if sampling is not None else [])


class MediaRules(msgspec.Struct, frozen=True):
    """What the model permits. `remote`: another worker than the one that decodes may compute a prompt with media.
    `grid_positions`: positions follow from the sizes of images (M-RoPE), which every worker needs."""

    remote: bool = False
    grid_positions: bool = False

    @classmethod
    def of(cls, config: VllmConfig) -> MediaRules:
        model, media = config.model_config, config.model_config.multimodal_config
        # With pruning, positions follow from what the encoder finds; an encoder-decoder's media are no part of the
        # prompt; and a model without an encoder takes the media at each step.
        kept = media is not None and not media.is_multimodal_pruning_enabled()
        remote = kept and not model.is_encoder_decoder and not model.is_multimodal_raw_input_only_model
        return cls(remote=remote, grid_positions=bool(model.uses_mrope))


def media_of(request: EngineCoreRequest) -> list[Medium]:
    return [
        Medium(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features or ()
    ]


def without_pixels(request: EngineCoreRequest, rules: MediaRules) -> EngineCoreRequest:
    """The request for a worker that gets the KV of the prompt. It computes the prompt's last token by itself, so it
    gets the pixels of a medium that reaches it."""
    features, computed_tokens = request.mm_features or [], len(request.prompt_token_ids or ()) - 1
    kept = strip_covered_mm_data(features, computed_tokens, uses_mrope=rules.grid_positions)
    return msgspec.structs.replace(request, mm_features=kept)
