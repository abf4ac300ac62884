"""The structs that need no vLLM against vLLM's own encoder and decoder, both ways, and against garbage."""

import msgspec
import pytest
from support_fuzz import nested

from orchestrator.types import FinishReason
from orchestrator.wire.messages import MessageError
from workers.sim.codec import (
    EventType,
    OutputKind,
    SimCodec,
    WireEvent,
    WireOutput,
    WirePrefillStats,
    WireRequest,
    WireSampling,
)

codec = SimCodec()


def test_round_trips() -> None:
    sampling = WireSampling(max_tokens=7, ignore_eos=True, stop_token_ids=[3], _eos_token_id=2, temperature=0.0)
    request = WireRequest("r", [1, 2, 3], sampling_params=sampling, arrival_time=1.5, priority=4)
    assert codec.decode_request(codec.encode_request(request)) == request
    output = WireOutput("r", [5], finish_reason=FinishReason.STOP, stop_reason=5)
    decoded = codec.decode_outputs(codec.encode_outputs([output], 2.5))
    assert decoded.outputs == [output] and decoded.timestamp == 2.5


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [b"\x90"], [b"\x93\xa1r\xa1x\xc0"], [b"\xd9\x02\xff\xff"]])
def test_garbage_is_a_message_error(frames: list[bytes]) -> None:
    with pytest.raises(MessageError):
        codec.decode_request(frames)
    if frames != [b"\x90"]:  # an empty list of outputs is outputs
        with pytest.raises(MessageError):
            codec.decode_outputs(frames)


def test_what_is_nested_too_deeply_is_a_message_error() -> None:
    (sound,) = codec.encode_request(WireRequest("r", [1]))
    later = msgspec.msgpack.encode([*msgspec.msgpack.decode(sound), None])[:-1]
    with pytest.raises(MessageError):
        codec.decode_request([later + nested()])


@pytest.mark.vllm
def test_reads_requests_as_vllm_writes_them() -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    params = SamplingParams(
        max_tokens=16, min_tokens=3, stop_token_ids=[9], seed=5, temperature=0.0, output_kind=RequestOutputKind.DELTA
    )
    params.update_from_generation_config({}, 7)
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=12.5,
        lora_request=None,
        cache_salt="salt",
        data_parallel_rank=None,
        priority=6,
        external_req_id="outside",
        session_id="s",
    )
    read = codec.decode_request([bytes(frame) for frame in MsgpackEncoder().encode(request)])
    assert (read.request_id, read.prompt_token_ids, read.arrival_time) == ("r", [1, 2, 3], 12.5)
    assert (read.cache_salt, read.priority, read.pooling_params) == ("salt", 6, None)
    sampling = read.sampling_params
    assert sampling is not None
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids) == (16, 3, [9])
    assert (sampling.seed, sampling.temperature, sampling.eos_token_id) == (5, 0.0, 7)
    assert sampling.output_kind is OutputKind.DELTA and sampling.logprobs is None and not sampling.ignore_eos


@pytest.mark.vllm
def test_defaults_are_vllms() -> None:
    """Encoded parameters leave defaults out, so they must mean the same here."""
    from vllm.sampling_params import SamplingParams

    theirs = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    for field in msgspec.structs.fields(WireSampling):
        other = theirs[field.name]
        assert field.default == (other.value if field.name == "output_kind" else other), field.name


@pytest.mark.vllm
def test_vllm_reads_what_is_written_here() -> None:
    from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine import FinishReason as VllmFinishReason
    from vllm.v1.serial_utils import MsgpackDecoder

    sampling = WireSampling(max_tokens=None, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
    frames = codec.encode_request(WireRequest("r", [1, 2], sampling_params=sampling, arrival_time=2.0, priority=3))
    request = MsgpackDecoder(EngineCoreRequest).decode(frames)
    assert (request.request_id, request.prompt_token_ids, request.priority) == ("r", [1, 2], 3)
    assert request.sampling_params.max_tokens is None and request.sampling_params.ignore_eos
    assert request.sampling_params.output_kind.name == "FINAL_ONLY"

    output = WireOutput(
        "r",
        [4],
        finish_reason=FinishReason.LENGTH,
        stop_reason=4,
        events=[WireEvent(EventType.QUEUED, 1.0), WireEvent(EventType.SCHEDULED, 1.5)],
        prefill_stats=WirePrefillStats(num_prompt_tokens=5, num_computed_tokens=3, num_cached_tokens=2),
    )
    outputs = MsgpackDecoder(EngineCoreOutputs).decode(codec.encode_outputs([output], 3.0))
    assert outputs.timestamp == 3.0
    (read,) = outputs.outputs
    assert (read.request_id, read.new_token_ids, read.stop_reason) == ("r", [4], 4)
    assert read.finish_reason is VllmFinishReason.LENGTH
    assert [(e.type, e.timestamp) for e in read.events] == [
        (EngineCoreEventType.QUEUED, 1.0),
        (EngineCoreEventType.SCHEDULED, 1.5),
    ]
    assert read.prefill_stats.num_cached_tokens == 2 and read.prefill_stats.num_computed_tokens == 3


@pytest.mark.vllm
def test_reads_outputs_as_vllm_writes_them() -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine import FinishReason as VllmFinishReason
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.serial_utils import MsgpackEncoder

    theirs = EngineCoreOutput(
        "r", [1, 2], finish_reason=VllmFinishReason.STOP, prefill_stats=PrefillStats(num_cached_tokens=4)
    )
    frames = [bytes(f) for f in MsgpackEncoder().encode(EngineCoreOutputs(outputs=[theirs], timestamp=8.0))]
    read = codec.decode_outputs(frames)
    assert read.timestamp == 8.0
    assert read.outputs[0].new_token_ids == [1, 2] and read.outputs[0].finish_reason is FinishReason.STOP
    assert read.outputs[0].prefill_stats is not None and read.outputs[0].prefill_stats.num_cached_tokens == 4


@pytest.mark.vllm
@pytest.mark.parametrize(("ours", "theirs"), [(FinishReason, "FinishReason"), (EventType, "EngineCoreEventType")])
def test_numbers_are_vllms(ours: type, theirs: str) -> None:
    import vllm.v1.engine as engine

    for member in ours:  # type: ignore[attr-defined]
        assert getattr(engine, theirs)[member.name].value == member.value
