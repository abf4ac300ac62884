"""Reads and writes vLLM's engine-core requests and outputs without vLLM, for the simulated engine and for tests.

The positional structs mirror the leading fields of `EngineCoreRequest`, `EngineCoreOutput` and `EngineCoreOutputs`
(vllm/v1/engine/__init__.py, 0.32.0), and `WireSampling` some named fields of `SamplingParams`. msgspec ignores the
fields that follow. A real engine and its frontend use vLLM's own codec.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from orchestrator.types import FinishReason
from orchestrator.wire.messages import MessageError


class EventType(enum.IntEnum):
    """Engine-side events of one request, from which vLLM's frontend derives its queue and prefill times."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class OutputKind(enum.IntEnum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class WireSampling(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The sampling parameters that change what a simulated engine does. Encoded by name, so a subset suffices."""

    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    output_kind: OutputKind = OutputKind.CUMULATIVE
    _eos_token_id: int | None = None
    structured_outputs: Any = None
    extra_args: dict[str, Any] | None = None

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token that stops generation; vLLM leaves it out when `ignore_eos` is set."""
        return self._eos_token_id


class WireRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """`EngineCoreRequest` up to `priority`."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[Any] | None = None
    sampling_params: WireSampling | None = None
    pooling_params: Any = None
    arrival_time: float = 0.0  # unix seconds; an engine puts its own clock's in place of it
    lora_request: Any = None  # a list: name, number, path ...
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0

    @property
    def adapter(self) -> int:
        """The number of its LoRA adapter; 0: none."""
        return int(self.lora_request[1]) if self.lora_request is not None else 0


class WireEvent(msgspec.Struct):
    type: EventType
    timestamp: float  # the engine's monotonic clock, seconds


class WirePrefillStats(msgspec.Struct):
    """Where the prompt's tokens came from; sent with the first output of a request."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class WireOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """`EngineCoreOutput` up to `prefill_stats`."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[WireEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: WirePrefillStats | None = None


class WireOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """`EngineCoreOutputs` up to `timestamp`."""

    engine_index: int = 0
    outputs: list[WireOutput] = []
    scheduler_stats: Any = None
    timestamp: float = 0.0  # the engine's monotonic clock, seconds


class SimCodec:
    """Encodes and decodes frames in the format of vLLM's own codec."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._request = msgspec.msgpack.Decoder(WireRequest)
        self._outputs = msgspec.msgpack.Decoder(WireOutputs)

    def encode_request(self, request: WireRequest) -> list[bytes]:
        return [self._encoder.encode(request)]

    def decode_request(self, frames: Sequence[bytes]) -> WireRequest:
        """Raises MessageError. Frames after the first carry tensors, which the simulated engine ignores."""
        return self._decode(self._request, frames, "engine request")

    def encode_outputs(self, outputs: list[WireOutput], timestamp: float) -> list[bytes]:
        return [self._encoder.encode(WireOutputs(outputs=outputs, timestamp=timestamp))]

    def decode_outputs(self, frames: Sequence[bytes]) -> WireOutputs:
        """Raises MessageError."""
        return self._decode(self._outputs, frames, "engine output")

    @staticmethod
    def _decode(decoder: msgspec.msgpack.Decoder[Any], frames: Sequence[bytes], what: str) -> Any:
        if not frames:
            raise MessageError(f"not an {what}: no payload")
        try:
            return decoder.decode(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"not an {what} ({len(frames[0])} bytes): {error}") from error
