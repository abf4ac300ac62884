"""Turns a frontend's engine request into the one that this worker's engine runs: phase, KV parameters, continuation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder

from orchestrator.types import KVSource
from orchestrator.wire.adapters import unique_name
from workers.engine import EngineRequest, InvalidEngineRequest, Phase


def block_hashes(frames: list[bytes], hasher: Callable[[Request], list[BlockHash]] | None) -> list[BlockHash]:
    """Of the prompt's whole blocks, as an engine that computes the request has them in its prefix cache."""
    core: EngineCoreRequest = MsgpackDecoder(EngineCoreRequest).decode(frames)
    if (adapter := core.lora_request) is not None:
        adapter.lora_name = unique_name(adapter.lora_name, adapter.lora_int_id)  # as `Adapters.prepare` names it
    return list(Request.from_engine_core_request(core, hasher).block_hashes)


class RequestCodec:
    """Decodes and adapts requests. Raises InvalidEngineRequest with the request's key and what is wrong."""

    def __init__(self, max_model_len: int, vocabulary: int) -> None:
        """The engine's limits: tokens of a sequence, and token ids. A request beyond them would end the engine."""
        self._max_model_len, self._vocabulary = max_model_len, vocabulary
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    def decode(self, request: EngineRequest) -> EngineCoreRequest:
        try:
            core: EngineCoreRequest = self._decoder.decode(request.frames)
        except Exception as error:  # msgspec, numpy and torch each raise their own
            raise InvalidEngineRequest(f"{request.key}: undecodable engine request: {error}") from error
        core.request_id = request.key
        core.external_req_id = None
        # vLLM orders waiting requests by these two. The frontend has combined them into `behind_s`, which is added to
        # this host's clock, since the frontend's may differ.
        core.priority = 0
        core.arrival_time = time.time() + request.behind_s
        if request.resume_tokens:
            _continue(core, request.resume_tokens)
        self._check_prompt(core)
        if request.prefix_tokens:
            _prefix_only(core, request.prefix_tokens)
        if request.phase is Phase.PREFILL:
            _prefill_only(core)
        elif request.kv_source is not None:
            _set_kv(core, _receive(request.kv_source))
        return core

    def _check_prompt(self, core: EngineCoreRequest) -> None:
        tokens = core.prompt_token_ids
        prompt = core.prompt_embeds if tokens is None else tokens
        length = 0 if prompt is None else len(prompt)
        longest = self._max_model_len - (1 if core.sampling_params is not None else 0)  # room for one new token
        if not 0 < length <= longest:
            raise InvalidEngineRequest(f"{core.request_id}: expected a prompt of 1 to {longest} tokens, got {length}")
        if (
            tokens is not None
            and core.prompt_is_token_ids is None
            and not 0 <= min(tokens) <= max(tokens) < self._vocabulary
        ):
            raise InvalidEngineRequest(
                f"{core.request_id}: expected token ids of 0 to {self._vocabulary - 1}, "
                f"got {min(tokens)} to {max(tokens)}"
            )


def _sampling(core: EngineCoreRequest, what: str) -> SamplingParams:
    if core.sampling_params is None:
        raise InvalidEngineRequest(f"{core.request_id}: a pooling request cannot be {what}")
    return core.sampling_params


def _set_kv(core: EngineCoreRequest, params: dict[str, Any]) -> None:
    sampling = _sampling(core, "prefilled elsewhere")
    sampling.extra_args = {**(sampling.extra_args or {}), "kv_transfer_params": params}


def _receive(source: KVSource) -> dict[str, Any]:
    """Parameters for connectors.push: the KV source, unchanged."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "kv_source": msgspec.to_builtins(source)}


def _prefill_only(core: EngineCoreRequest) -> None:
    """Sample one token with every parameter that determines it, so that the decode engine samples the same one.

    Parameters that carry state from token to token (a grammar, a thinking budget) are left out. The client then gets
    the decode engine's token only.
    """
    _one_token(core, "prefilled only")
    _set_kv(core, {"do_remote_decode": True, "do_remote_prefill": False})


def _prefix_only(core: EngineCoreRequest, tokens: int) -> None:
    """Keep the first `tokens` of the prompt, and sample one token, which nobody reads."""
    _one_token(core, "cached only")
    assert core.prompt_token_ids is not None  # `_one_token` has looked
    if core.mm_features:
        raise InvalidEngineRequest(f"{core.request_id}: a prefix with images cannot be fetched")
    core.prompt_token_ids = core.prompt_token_ids[:tokens]
    if core.prompt_is_token_ids is not None:
        core.prompt_is_token_ids = core.prompt_is_token_ids[:tokens]


def _one_token(core: EngineCoreRequest, what: str) -> None:
    sampling = _sampling(core, what)
    if core.prompt_token_ids is None:
        raise InvalidEngineRequest(f"{core.request_id}: a prompt of embeddings cannot be {what}")
    sampling.n = 1
    sampling.max_tokens = 1
    sampling.min_tokens = min(1, sampling.min_tokens)
    sampling.prompt_logprobs = None
    sampling.structured_outputs = None
    sampling.thinking_token_budget = None
    sampling.repetition_detection = None
    sampling.output_kind = RequestOutputKind.FINAL_ONLY


def _continue(core: EngineCoreRequest, tokens: list[int]) -> None:
    """Continue after `tokens`: they join the prompt, and the limits shrink by them.

    Exact for greedy sampling. A seeded request continues with a new generator, and penalties see `tokens` as prompt.
    """
    sampling = _sampling(core, "continued")
    if core.prompt_token_ids is None:
        raise InvalidEngineRequest(f"{core.request_id}: a prompt of embeddings cannot be continued")
    if sampling.structured_outputs is not None:
        raise InvalidEngineRequest(f"{core.request_id}: structured output cannot be continued mid-way")
    core.prompt_token_ids = [*core.prompt_token_ids, *tokens]
    if core.prompt_is_token_ids is not None:
        core.prompt_is_token_ids = [*core.prompt_is_token_ids, *([True] * len(tokens))]
    if sampling.max_tokens is not None:
        if sampling.max_tokens <= len(tokens):
            raise InvalidEngineRequest(
                f"{core.request_id}: {len(tokens)} tokens are out already, of at most {sampling.max_tokens}"
            )
        sampling.max_tokens -= len(tokens)
    sampling.min_tokens = max(0, sampling.min_tokens - len(tokens))
    if sampling.trace_decode_token_ids is not None:  # which tokens are to be generated, by their number
        sampling.trace_decode_token_ids = sampling.trace_decode_token_ids[len(tokens) :] or None
    sampling.prompt_logprobs = None
