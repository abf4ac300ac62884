"""The router's `Codec` for vLLM: reads what routing needs from a request, and encodes vLLM's engine-core types.

Fields of vLLM's two structs of a request for which the worker that decodes must prefill too are named here; the tests
name all others. See vllm/v1/engine/__init__.py and vllm/sampling_params.py, 0.32.0.

The worker that prefills encodes images, videos and sounds. One that decodes gets the KV and, of each medium, its place
in the prompt and what its positions follow from. Where it needs pixels after all, it gives the request back
(workers.vllm_engine.codec.continued), and the next attempt has everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from operator import attrgetter, is_
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.utils import strip_covered_mm_data
from vllm.sampling_params import RequestOutputKind, SamplingParams, SamplingType
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from orchestrator.config.settings import SLOClass
from orchestrator.frontend import edge
from orchestrator.policy.decode_choice import RequestInfo
from orchestrator.policy.prefix_keys import Medium, key_of_beginning, reusable_keys, salt_of
from orchestrator.router.request import Batch, Failure, ParsedRequest
from orchestrator.wire.adapters import unique_name
from orchestrator.wire.messages import MessageError
from orchestrator.wire.sockets import MAX_REQUEST_BYTES

_COMPLETED = (None, FinishReason.STOP, FinishReason.LENGTH)
_TOKENS = {"request_id", "new_token_ids", "finish_reason", "stop_reason", "trace_headers", "num_nans_in_logits"}
_MORE_THAN_TOKENS = [name for name in EngineCoreOutput.__struct_fields__ if name not in _TOKENS]
_more_than_tokens, _NOTHING = attrgetter(*_MORE_THAN_TOKENS), [None] * len(_MORE_THAN_TOKENS)


POOLING = "pooling"  # why a request that asks for no tokens is not prefilled remotely
Test = Callable[[Any], bool]


def _is_set(value: Any) -> bool:
    return value is not None


def _is_missing(value: Any) -> bool:
    return value is None


class Limit(msgspec.Struct, frozen=True):
    """`local`: for which values the prompt is computed where it decodes. `why`: the reason; the field's name unless
    given."""

    local: Test
    why: str = ""


REQUEST_LIMITS: dict[str, Limit] = {
    "pooling_params": Limit(_is_set, POOLING),
    "prompt_embeds": Limit(_is_set),
    "prompt_token_ids": Limit(_is_missing, "prompt_embeds"),
}
SAMPLING_LIMITS: dict[str, Limit] = {
    "n": Limit(lambda n: n > 1),
    # vLLM computes the whole prompt for these, whatever KV has come or is cached.
    "prompt_logprobs": Limit(_is_set),
    "prompt_logprob_token_ids": Limit(_is_set),
    "skip_reading_prefix_cache": Limit(bool),
}


def local_only_reason(request: EngineCoreRequest) -> str | None:
    """Why the worker that decodes the request must prefill it too; None if another one may."""
    for limits, fields in ((REQUEST_LIMITS, request), (SAMPLING_LIMITS, request.sampling_params)):
        for name, limit in limits.items() if fields is not None else ():
            if limit.local(getattr(fields, name)):
                return limit.why or name
    if not request.request_id.startswith(request.external_req_id or ""):
        return "n"  # vLLM names the children of a request with n > 1 "0_<id>", "1_<id>", ...
    return None


def own_processors(config: VllmConfig) -> bool:
    """Whether engines run logits processors of the operator, by `engine_args.logits_processors` or installed."""
    return bool(config.model_config.logits_processors or entry_points(group=LOGITSPROCS_GROUP))


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


class VllmCodec:
    def __init__(
        self,
        classes: Mapping[str, SLOClass] | None = None,
        media: MediaRules = MediaRules(),
        own_processors: bool = False,
        drafts: bool = False,
    ) -> None:
        """`classes`: of objectives, by name. `own_processors`: whether engines run logits processors of the operator,
        which may sample another first token where a prompt is prefilled for another engine. `drafts`: whether engines
        that decode speculate."""
        self._classes, self._media, self._own_processors = classes or {}, media, own_processors
        self._drafts = drafts
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)

    @classmethod
    def of(cls, config: VllmConfig, classes: Mapping[str, SLOClass] | None = None) -> VllmCodec:
        return cls(classes, MediaRules.of(config), own_processors(config), config.speculative_config is not None)

    def read(self, request: EngineCoreRequest, block_size: int) -> ParsedRequest:
        """Raises VLLMValidationError for a request that a fleet cannot serve."""
        if request.resumable:
            raise VLLMValidationError("streaming input is not supported over a fleet of engines")
        context = edge.current.get()
        try:
            own = (context.objectives if context is not None else edge.Objectives()).resolved(self._classes)
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None
        sampling = request.sampling_params
        keys = _prefix_keys(request, block_size)
        local_only = local_only_reason(request)
        if request.mm_features and not self._media.remote:
            local_only = local_only or "multimodal"
        info = RequestInfo(
            id=request.request_id,
            prompt_tokens=len(request.prompt_token_ids or ()),
            max_new_tokens=(sampling.max_tokens or 0) if sampling else 0,
            arrived_at=request.arrival_time,
            priority=request.priority,
            local_only=local_only,
            prefix_key=key_of_beginning(keys, block_size),
            ttft_slo_s=own.ttft_s,
            tpot_slo_s=own.tpot_s,
            slo_class=own.name,
            tenant=own.tenant,
            adapter=request.lora_request.lora_int_id if request.lora_request is not None else 0,
        )
        return ParsedRequest(
            info,
            frames=self._encode(request),
            has_media=bool(request.mm_features),
            frames_with_kv=(
                self._encode(without_pixels(request, self._media))
                if request.mm_features and local_only is None
                else None
            ),
            label=context.request_id if context else request.external_req_id or request.request_id,
            early_token=sampling is not None and not self._own_processors and _same_first_token(sampling, self._drafts),
            prefix_keys=keys,
            received_at=context.received_at if context else request.arrival_time,
            on_request_ended=context.on_request_ended if context else None,
        )

    def _encode(self, request: EngineCoreRequest) -> list[bytes]:
        if (sampling := request.sampling_params) is not None and sampling.extra_args:
            # The router decides where KV comes from, not the client; and engines report a cached block only once.
            sampling.extra_args.pop("kv_transfer_params", None)
            sampling.extra_args.pop("kv_cache_report_mode", None)
        try:
            frames = [bytes(frame) for frame in self._encoder.encode(request)]
        except OverflowError as error:  # vLLM's own engine core client raises it too, as a server error
            raise VLLMValidationError(f"a number in the request is out of range: {error}") from error
        except UnicodeEncodeError as error:
            raise VLLMValidationError(
                f"text in the request is not Unicode, but has a lone surrogate: {error}"
            ) from error
        if (size := sum(map(len, frames))) > MAX_REQUEST_BYTES:
            raise VLLMValidationError(
                f"the request has {size} bytes once its media are decoded, and a worker can be sent "
                f"{MAX_REQUEST_BYTES}: send fewer or smaller images"
            )
        return frames

    def decode_outputs(self, frames: list[bytes], sent_at: float, now: float) -> Batch:
        try:
            decoded: EngineCoreOutputs = self._decoder.decode(frames)
        except Exception as error:  # of msgspec, or of numpy or torch, which rebuild arrays
            raise MessageError(f"undecodable engine outputs: {error}") from error
        # Monotonic clocks of different hosts differ: only the time from an event to its sending is used.
        shift = now - sent_at
        for output in decoded.outputs:
            for event in output.events or ():
                event.timestamp += shift
        return Batch(decoded.outputs, decoded.timestamp + shift)

    def as_first(self, output: EngineCoreOutput) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=output.request_id,
            new_token_ids=output.new_token_ids,
            new_logprobs=output.new_logprobs,
            events=output.events,
            trace_headers=output.trace_headers,
            prefill_stats=output.prefill_stats,
            num_nans_in_logits=output.num_nans_in_logits,
            new_sampling_mask=output.new_sampling_mask,
        )

    def drop_told(self, output: EngineCoreOutput, tokens: int) -> None:
        # vLLM takes the begin of the wait in the engine from the last event that says it, and its end from the first.
        output.events = output.prefill_stats = None
        if not tokens:
            return
        left = len(output.new_token_ids) - tokens
        output.new_token_ids = output.new_token_ids[tokens:]
        if output.new_logprobs is not None:
            output.new_logprobs = output.new_logprobs.slice_request(tokens, left) if left else None
        if output.new_sampling_mask is not None:
            output.new_sampling_mask = output.new_sampling_mask.slice_request(tokens, left) if left else None

    def computed_alone(self, output: EngineCoreOutput) -> int | None:
        stats = output.prefill_stats
        return stats.num_computed_tokens if stats is not None and not stats.num_external_cached_tokens else None

    def count_prompt(self, output: EngineCoreOutput, cached_tokens: int, created_cache_tokens: int) -> None:
        if (stats := output.prefill_stats) is not None:
            stats.num_cached_tokens, stats.num_cache_creation_tokens = cached_tokens, created_cache_tokens

    def failure(self, parsed: ParsedRequest, failure: Failure) -> EngineCoreOutput:
        return failed(parsed, failure)


def failed(parsed: ParsedRequest, failure: Failure) -> EngineCoreOutput:
    """The end of a request, of which FleetLLM makes an exception: vLLM passes on a stop reason, or what pooling gave,
    as it is. An output without the latter, of a pooling request, would end vLLM's handling of all outputs."""
    given: Any = failure if parsed.info.local_only == POOLING else None
    name, why = parsed.info.id, FinishReason.ERROR
    return EngineCoreOutput(name, [], pooling_output=given, finish_reason=why, stop_reason=failure)


def aborted(parsed: ParsedRequest, refused: Failure) -> EngineCoreOutput:
    """The end of a request that keeps the part of an answer that it has; `refused`: of a pooling request, which has
    none."""
    if parsed.info.local_only == POOLING:
        return failed(parsed, refused)
    return EngineCoreOutput(parsed.info.id, [], finish_reason=FinishReason.ABORT)


def join(batches: list[Batch]) -> Batch:
    """One batch of several, oldest first, in which tokens that follow each other in an answer are one output.

    So a frontend that has fallen behind has less to do for each token. vLLM takes several tokens in one output, as from
    speculative decoding."""
    outputs: list[EngineCoreOutput] = []
    open_at: dict[str, int] = {}  # the place of each request's last output, if tokens may be added to it
    for batch in batches:
        for output in batch.outputs:
            name, ended = output.request_id, output.finish_reason
            is_plain = all(map(is_, _more_than_tokens(output), _NOTHING)) and not output.num_nans_in_logits
            place = open_at.pop(name, None)
            if place is not None and is_plain and ended in _COMPLETED:
                output.new_token_ids = outputs[place].new_token_ids + output.new_token_ids
                outputs[place] = output
            else:
                place = len(outputs)
                outputs.append(output)
            if is_plain and ended is None:
                open_at[name] = place
    return Batch(outputs, batches[-1].timestamp)


def _prefix_keys(request: EngineCoreRequest, block_size: int) -> list[int]:
    """`policy.prefix_keys` of the prompt's blocks that it can take from a cache; none for a request that takes none."""
    if not block_size or request.prompt_embeds is not None or request.pooling_params:
        return []
    if request.sampling_params is not None and request.sampling_params.skip_reading_prefix_cache:
        return []
    adapter = request.lora_request
    lora = unique_name(adapter.lora_name, adapter.lora_int_id) if adapter is not None else None
    salt = salt_of(lora, request.cache_salt)
    return reusable_keys(request.prompt_token_ids or (), block_size, salt, media_of(request))


def _same_first_token(sampling: SamplingParams, drafts: bool) -> bool:
    """Whether prefill and decode sample the same first token, except for rounding, and the client gets it at once.

    With drafts a seed does not say so: vLLM fills the step after KV has come with drafts that are rejected, and draws
    the token otherwise than without them.
    """
    kind = sampling.sampling_type
    return (
        sampling.output_kind is not RequestOutputKind.FINAL_ONLY
        and (kind is SamplingType.GREEDY or (kind is SamplingType.RANDOM_SEED and not drafts))
        # These carry state from token to token. Prefill samples without them (workers.vllm_engine.codec.messages).
        and sampling.structured_outputs is None
        and sampling.thinking_token_budget is None
    )
