"""Between vLLM's words and this project's. A frontend's engine request becomes the one that this engine runs: its
phase, KV parameters, continuation. vLLM's outputs, statistics and, in the engine's process, the events of its KV cache
become what a worker and its clients are told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from vllm import envs
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, EventBatch, EventPublisher
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder

from orchestrator.policy.prefix_keys import EventTranslator, salt_of
from orchestrator.types import KVCounters, KVSource
from orchestrator.wire.adapters import unique_name
from workers.engine import EngineRequest, EngineStep, InvalidEngineRequest, Phase, PrefixChanges, PrefixDelta
from workers.vllm_engine.codec.continued import SENT

# Keys for further fields of `EngineStep` in the connector's statistics, the only dictionary in an engine's statistics.
PREFIX_STATS = "pd_prefix"
TOKENS_LEFT_STATS = "pd_tokens_left"


class RequestCodec:
    """Decodes and adapts requests. Raises InvalidEngineRequest with the request's key and what is wrong."""

    def __init__(self, max_model_len: int, vocabulary: int, most: Mapping[str, int] | None = None) -> None:
        """The engine's limits: tokens of a sequence, token ids, and `most_of_sampling`. A request beyond them would end
        the engine."""
        self._max_model_len, self._vocabulary, self._most = max_model_len, vocabulary, most or {}
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    def decode(self, request: EngineRequest) -> EngineCoreRequest:
        try:
            core: EngineCoreRequest = self._decoder.decode(request.frames)
        except Exception as error:  # msgspec, numpy and torch each raise their own
            raise InvalidEngineRequest(f"{request.key}: undecodable engine request: {error}") from error
        core.request_id = request.key
        core.external_req_id = None
        # vLLM orders waiting requests by these two. The frontend has combined them into `behind_s`, which is added to a
        # clock of this host, since the frontend's may differ, that nobody sets: where one is set back, what comes later
        # goes before all that waits.
        core.priority = 0
        core.arrival_time = time.monotonic() + request.behind_s
        if core.sampling_params is not None and core.sampling_params.extra_args:
            core.sampling_params.extra_args.pop(SENT, None)  # ours to say
        if request.resume_tokens:
            _continue(core, request.resume_tokens)
        self._check_tokens(core, request.resume_tokens)
        if core.sampling_params is not None:
            self._check_sampling(core.request_id, core.sampling_params)
        if request.prefix_tokens:
            _prefix_only(core, request.prefix_tokens)
        if request.phase is Phase.PREFILL:
            _prefill_only(core)
        elif request.kv_source is not None:
            _set_kv(core, _receive(request.kv_source))
        return core

    def _check_tokens(self, core: EngineCoreRequest, sent: list[int]) -> None:
        tokens = core.prompt_token_ids
        prompt = core.prompt_embeds if tokens is None else tokens
        length = 0 if prompt is None else len(prompt)
        longest = self._max_model_len - len(sent) - (1 if core.sampling_params is not None else 0)  # one new token
        if not 0 < length <= longest:
            raise InvalidEngineRequest(f"{core.request_id}: expected a prompt of 1 to {longest} tokens, got {length}")
        embedded = tokens is None or core.prompt_is_token_ids is not None
        for ids in ([] if embedded else tokens, sent):
            if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary:
                expected = f"expected token ids of 0 to {self._vocabulary - 1}"
                raise InvalidEngineRequest(f"{core.request_id}: {expected}, got {min(ids)} to {max(ids)}")

    def _check_sampling(self, key: str, sampling: SamplingParams) -> None:
        words = sampling.bad_words_token_ids or []
        given = {
            "allowed_token_ids": len(sampling.allowed_token_ids or ()),
            "logit_bias": len(sampling.logit_bias or ()),
            "stop_token_ids": len(sampling.all_stop_token_ids) if sampling.min_tokens else 0,
            "bad_words": len(words),
            "tokens of bad_words": sum(len(word) for word in words),
        }
        for what, most in self._most.items():
            if given[what] > most:
                raise InvalidEngineRequest(f"{key}: expected at most {most} {what}, got {given[what]}")


def most_of_sampling(config: Any) -> dict[str, int]:
    """How much of each sampling parameter the engine's model runner has room for; empty for the first one, which takes
    any number. The second one would end the engine, and of these vLLM checks `bad_words` alone before."""
    if not config.use_v2_model_runner:
        return {}
    from vllm.v1.worker.gpu.sample import logit_bias

    return {
        "allowed_token_ids": logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        "logit_bias": logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
        "stop_token_ids": logit_bias.MAX_NUM_STOP_TOKEN_IDS,
        "bad_words": envs.VLLM_MAX_NUM_BAD_WORDS,
        "tokens of bad_words": envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
    }


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
    """Go on after `tokens`, as `workers.vllm_engine.codec.continued` has it. Exact for greedy and seeded sampling,
    without drafts that are accepted by chance."""
    sampling = _sampling(core, "continued")
    if sampling.max_tokens is not None and sampling.max_tokens <= len(tokens):
        raise InvalidEngineRequest(
            f"{core.request_id}: {len(tokens)} tokens are out already, of at most {sampling.max_tokens}"
        )
    sampling.extra_args = {**(sampling.extra_args or {}), SENT: tokens}
    sampling.prompt_logprobs = sampling.prompt_logprob_token_ids = None  # they went out with the first token


def take_plugin_stats(step: EngineStep, connector_stats: dict[str, Any]) -> None:
    if (delta := connector_stats.pop(PREFIX_STATS, None)) is not None:
        step.prefix = msgspec.convert(delta, PrefixDelta)
    step.tokens_left = connector_stats.pop(TOKENS_LEFT_STATS, {})


def kv_counters(totals: Mapping[str, Any], link_bytes_per_s: float) -> KVCounters:
    """`totals`: sums and counts of what the connector has reported, by its names."""
    return KVCounters(
        bytes_sent=int(totals["bytes_transferred"]),
        descriptors=int(totals["num_descriptors"]),
        transfers=totals["pd_stream_seconds_count"],
        transfer_s=totals["pd_stream_seconds"],
        failures=totals["pd_streams_failed_count"] + totals["pd_receives_failed_count"],
        bad_messages=totals["pd_bad_messages_count"],
        withdrawing_blocks=int(totals["pd_withdrawing_blocks"]),
        host_hit_tokens=int(totals["pd_host_hit_tokens"]),
        host_blocks=int(totals["pd_host_blocks"]),
        host_loaded_bytes=int(totals["pd_host_loaded_bytes"]),
        host_load_s=totals["pd_host_load_seconds"],
        link_bytes_per_s=link_bytes_per_s,
    )


def correct(output: EngineCoreOutput, block_tokens: int) -> None:
    """Change what vLLM says of a request with remote prefill. `block_tokens`: of a cached block; 0 without a cache.

    vLLM counts KV that came from the prefill worker as cached. To clients it is computed, and cached here; the router,
    which also gets the prefill worker's counts, corrects this by the prefix hits there. The token that was sampled
    after a prompt that was truncated for its prefill stands for one of the prompt's.
    """
    stats = output.prefill_stats
    if stats is not None and stats.num_external_cached_tokens:
        stats.num_cached_tokens = stats.num_local_cached_tokens
        if block_tokens:
            whole_blocks = stats.num_prompt_tokens // block_tokens * block_tokens
            stats.num_cache_creation_tokens = max(0, whole_blocks - stats.num_local_cached_tokens)
    if (output.kv_transfer_params or {}).get("prompt_truncated"):
        output.new_token_ids = []


def why_refused(output: EngineCoreOutput) -> str:
    """Why no engine can run this request; empty for other errors, and for every error of vLLM 0.32."""
    error = getattr(output, "error", None)
    return str(error.message) if error is not None and error.code == "validation_error" else ""


# ---- the prefix cache ----------------------------------------------------------------------------------------------


class PrefixCollector(EventPublisher):
    """Replaces the scheduler's event publisher, and passes every batch on to it. Collects changes of our prefix keys
    until they are taken, once a step. Bounded by the engine's cache and its host tier: what either has is cached."""

    def __init__(self, block_size: int, inner: EventPublisher) -> None:
        super().__init__()
        self.changes = PrefixChanges()
        self._inner = inner
        self._translator = EventTranslator(block_size)
        self._group: int | None = None

    def publish(self, events: EventBatch) -> None:
        for event in events.events:
            if isinstance(event, BlockStored | BlockRemoved) and event.medium == MEDIUM_CPU:
                if event.group_idx == self._group:
                    self._in_host_memory(event)
            elif isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                if event.group_idx == self._group:
                    self._removed(*self._translator.removed(event.block_hashes))
            else:
                self._translator.clear()
                self.changes.cleared()
        self._inner.publish(events)

    def _in_host_memory(self, event: BlockStored | BlockRemoved) -> None:
        if isinstance(event, BlockStored):
            self._translator.copied(event.block_hashes)
        else:
            self._removed(*self._translator.removed(event.block_hashes, from_host=True))

    def _removed(self, keys: list[int], hosted: list[int]) -> None:
        self.changes.removed(keys)
        self.changes.hosted(hosted)

    def _stored(self, event: BlockStored) -> None:
        block_size, hashes = self._translator.block_size, event.block_hashes
        # If layers have several kinds of caches, full attention's counts: a sliding window drops its prefix.
        if not (event.kv_cache_spec_kind or "full_attention").endswith(("full_attention", "mla_attention")):
            return
        if self._group is None:
            self._group = event.group_idx
        # If the kinds differ in block size, parts of blocks are cached too.
        whole = event.block_size == block_size and len(event.token_ids) == len(hashes) * block_size
        if event.group_idx != self._group or not whole:
            return
        lora = event.lora_name
        extras = [_without(extra, lora) for extra in event.extra_keys or ()] or [()] * len(hashes)
        others = [[each for each in extra if not isinstance(each, tuple)] for extra in extras]
        cache_salt = None
        if event.parent_block_hash is None and len(others[0]) == 1 and isinstance(others[0][0], str):
            cache_salt = others[0].pop()
        # From the first embedding on, a block depends on more than its tokens and media.
        known = next((at for at, other in enumerate(others) if other), len(others))
        marks = {at: [each for each in extras[at] if isinstance(each, tuple)] for at in range(known)}
        keys = self._translator.stored(
            hashes[:known], event.parent_block_hash, event.token_ids, salt_of(lora, cache_salt), marks
        )
        self.changes.stored(keys)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def get_publisher_config(self) -> Any:
        return self._inner.get_publisher_config()


def _without(extra: tuple[Any, ...] | None, lora: str | None) -> tuple[Any, ...]:
    """A block's extra keys without its LoRA's name, which comes first."""
    extra = extra or ()
    return extra[1:] if lora is not None and extra[:1] == (lora,) else extra


def block_hashes(
    frames: list[bytes], hasher: Callable[[Request], list[BlockHash]] | None, of_block: int = 1
) -> list[BlockHash]:
    """Of the prompt's whole blocks, as an engine that computes the request has them in its prefix cache. `of_block`:
    how many hashes an engine makes for each, of which the last one names it (`prefix_match_unit`)."""
    core: EngineCoreRequest = MsgpackDecoder(EngineCoreRequest).decode(frames)
    if core.sampling_params is not None:
        core.sampling_params.extra_args = None  # which a client writes: no token there is the prompt's
    if (adapter := core.lora_request) is not None:
        adapter.lora_name = unique_name(adapter.lora_name, adapter.lora_int_id)  # as `Adapters.prepare` names it
    return list(Request.from_engine_core_request(core, hasher).block_hashes)[of_block - 1 :: of_block]
