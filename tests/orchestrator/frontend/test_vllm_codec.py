"""What the router needs of vLLM's requests and outputs: which first tokens are certain, and cut at the first."""

from typing import Any

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def codec() -> Any:
    from orchestrator.frontend.vllm_codec import VllmCodec

    return VllmCodec()


def request(**sampling: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
    from vllm.v1.engine import EngineCoreRequest

    if grammar := sampling.pop("grammar", None):
        sampling["structured_outputs"] = StructuredOutputsParams(regex=grammar)
    kind = RequestOutputKind.DELTA if sampling.pop("streamed", True) else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(output_kind=kind, **sampling)
    return EngineCoreRequest("r", [1, 2], None, params, None, 0.0, None, None, None)


@pytest.mark.parametrize(
    ("sampling", "early"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.7, "seed": 3}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.0, "streamed": False}, False),
        ({"temperature": 0.0, "grammar": "[ab]+"}, False),
        ({"temperature": 0.0, "thinking_token_budget": 5}, False),
        ({"temperature": 0.0, "logprobs": 2, "min_tokens": 1, "logit_bias": {5: 1.0}, "stop": ["x"]}, True),
    ],
)
def test_a_first_token_is_early_when_streamed_and_certain(codec, sampling, early: bool) -> None:
    assert codec.read(request(**sampling), 0).early_token is early


def test_a_request_that_is_larger_than_a_message_is_refused(codec, monkeypatch) -> None:
    from vllm.exceptions import VLLMValidationError

    from orchestrator.frontend import vllm_codec

    size = sum(map(len, codec.read(request(), 16).frames))
    monkeypatch.setattr(vllm_codec, "MAX_REQUEST_BYTES", size)
    assert codec.read(request(), 16).frames
    monkeypatch.setattr(vllm_codec, "MAX_REQUEST_BYTES", size - 1)
    with pytest.raises(VLLMValidationError, match=f"the request has {size} bytes .* {size - 1}: send fewer"):
        codec.read(request(), 16)


def test_a_pooling_request_has_no_first_token(codec) -> None:
    from vllm.pooling_params import PoolingParams
    from vllm.v1.engine import EngineCoreRequest

    pooling = EngineCoreRequest("r", [1], None, None, PoolingParams(), 0.0, None, None, None)
    assert not codec.read(pooling, 0).early_token


def output(tokens: list[int], **more: Any) -> Any:
    """With two log-probabilities per token, recognisable by their numbers, through the wire's own encoding."""
    import numpy as np
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    ids = np.array([[token, token + 1] for token in tokens])
    made = EngineCoreOutput(
        "r",
        tokens,
        new_logprobs=LogprobsLists(ids, -ids.astype(np.float32), np.arange(len(tokens))),
        events=[EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0)],
        **more,
    )
    encoded = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[made]))
    return MsgpackDecoder(EngineCoreOutputs).decode(encoded).outputs[0]


def test_prefill_output_becomes_first_output(codec) -> None:
    from vllm.v1.engine import FinishReason

    last = output([7], finish_reason=FinishReason.LENGTH, kv_transfer_params={"remote": 1}, stop_reason=3)
    first = codec.as_first(last)
    assert (first.request_id, first.new_token_ids, first.finish_reason, first.stop_reason) == ("r", [7], None, None)
    assert first.kv_transfer_params is None  # the client would be told of it
    assert first.new_logprobs.logprob_token_ids.tolist() == [[7, 8]] and len(first.events) == 1


def test_first_token_is_dropped_from_decode_output(codec) -> None:
    import numpy as np
    from vllm.v1.outputs import SamplingMaskLists

    several = output([7, 8, 9])
    codec.drop_told(several, 1)
    assert several.new_token_ids == [8, 9] and several.events is None
    assert several.new_logprobs.logprob_token_ids.tolist() == [[8, 9], [9, 10]]
    assert several.new_logprobs.sampled_token_ranks.tolist() == [1, 2]
    alone = output([7])
    codec.drop_told(alone, 1)
    assert alone.new_token_ids == [] and alone.new_logprobs is None
    goes_on = output([7, 8], new_sampling_mask=SamplingMaskLists(np.arange(3)))  # which vLLM cannot cut
    codec.drop_told(goes_on, 0)
    assert goes_on.new_sampling_mask is not None
    assert goes_on.new_token_ids == [7, 8] and goes_on.events is None and goes_on.prefill_stats is None
    assert goes_on.new_logprobs.logprob_token_ids.tolist() == [[7, 8], [8, 9]]


@pytest.mark.parametrize(
    ("cached", "came", "computed"), [(0, 100, None), (96, 4, None), (99, 0, 1), (0, 0, 100), (48, 0, 52)]
)
def test_what_was_computed_where_no_kv_came_is_told_by_an_engines_first_output(codec, cached, came, computed) -> None:
    from vllm.v1.metrics.stats import PrefillStats

    said = output([7])
    said.prefill_stats = PrefillStats()
    said.prefill_stats.set(100, cached, came)
    assert codec.computed_alone(said) == computed
    codec.drop_told(said, 0)
    assert codec.computed_alone(said) is None, "an answer that goes on"


def test_processors_of_the_operator_keep_the_first_token_until_decode_has_sampled_it(codec) -> None:
    """Where another engine decodes they see other limits: the prompt is prefilled for one token."""
    from orchestrator.frontend.vllm_codec import VllmCodec

    assert codec.read(request(temperature=0.0), 16).early_token
    assert not VllmCodec(own_processors=True).read(request(temperature=0.0), 16).early_token


def test_a_seed_does_not_say_the_first_token_where_decode_speculates() -> None:
    """vLLM draws it otherwise in a step that has drafts."""
    from orchestrator.frontend.vllm_codec import VllmCodec

    codec = VllmCodec(drafts=True)
    assert not codec.read(request(temperature=0.7, seed=3), 0).early_token
    assert codec.read(request(temperature=0.0), 0).early_token


def test_prefix_keys_separate_lora_and_salt(codec) -> None:
    from vllm.lora.request import LoRARequest

    from orchestrator.policy.prefix_keys import Medium, prefix_keys, salt_of

    def asked(tokens=64, **more: Any) -> Any:
        made = request()
        made.prompt_token_ids = list(range(tokens))
        for name, value in more.items():
            setattr(made, name, value)
        return codec.read(made, 16).prefix_keys

    keys = prefix_keys(list(range(64)), 16)
    assert asked() == keys[:3] and asked(65) == keys  # the last token is always computed
    assert asked(cache_salt="s") == prefix_keys(list(range(64)), 16, salt_of(None, "s"))[:3]
    lora = LoRARequest("l", 1, "/nowhere")
    assert asked(lora_request=lora) == prefix_keys(list(range(64)), 16, salt_of("l@1", None))[:3]
    assert asked(mm_features=[image()]) == prefix_keys(list(range(64)), 16, 0, [Medium("red", 20, 30)])[:3] != keys[:3]
    assert asked(prompt_token_ids=None) == []
    assert codec.read(request(), 0).prefix_keys == []  # no worker is known yet


def image(identifier: str = "red", start: int = 20, tokens: int = 30) -> Any:
    """With 4,000 bytes of pixels."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    pixels = MultiModalFieldElem(torch.zeros(1000), MultiModalBatchedField())
    grid = MultiModalFieldElem(torch.tensor([1, 4, 6]), MultiModalBatchedField(keep_on_cpu=True))
    item = MultiModalKwargsItem({"pixel_values": pixels, "image_grid_thw": grid})
    return MultiModalFeatureSpec(item, "image", identifier, PlaceholderRange(start, tokens))


def with_image(tokens: int = 64, **sampling: Any) -> Any:
    made = request(**sampling)
    made.prompt_token_ids, made.mm_features = list(range(tokens)), [image()]
    return made


@pytest.mark.parametrize("grid_positions", [True, False])
def test_who_decodes_an_image_gets_no_pixels(grid_positions: bool) -> None:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder

    from orchestrator.frontend.vllm_codec import MediaRules, VllmCodec
    from workers.vllm_engine.codec.continued import is_withheld

    codec, decoder = VllmCodec(media=MediaRules(True, grid_positions)), MsgpackDecoder(EngineCoreRequest)
    parsed = codec.read(with_image(), 16)
    assert parsed.info.local_only is None
    (whole,), (left,) = (decoder.decode(it).mm_features for it in (parsed.frames, parsed.frames_with_kv))
    assert list(whole.data) == ["pixel_values", "image_grid_thw"] and not is_withheld(whole.data)
    assert list(left.data or ()) == (["image_grid_thw"] if grid_positions else []) and is_withheld(left.data)
    assert (left.identifier, left.mm_position) == (whole.identifier, whole.mm_position)
    assert codec.read(with_image(tokens=51), 16).frames_with_kv != parsed.frames_with_kv
    (kept,) = decoder.decode(codec.read(with_image(tokens=50), 16).frames_with_kv).mm_features
    assert not is_withheld(kept.data), "decode computes the last token of a prompt, here one of the image"


def test_what_a_model_permits() -> None:
    """`codec` has no model: there images are prefilled where they decode."""
    from types import SimpleNamespace

    from orchestrator.frontend.vllm_codec import MediaRules

    def rules(**differing: Any) -> Any:
        pruned = differing.pop("pruned", False)
        media = SimpleNamespace(is_multimodal_pruning_enabled=lambda: pruned)
        names = ("is_encoder_decoder", "is_multimodal_raw_input_only_model", "uses_mrope")
        model = SimpleNamespace(**{"multimodal_config": media} | dict.fromkeys(names, False) | differing)
        return MediaRules.of(SimpleNamespace(model_config=model))

    assert rules() == MediaRules(remote=True) and rules(uses_mrope=True) == MediaRules(True, True)
    for differing in ("is_encoder_decoder", "is_multimodal_raw_input_only_model", "pruned"):
        assert not rules(**{differing: True}).remote
    assert not rules(multimodal_config=None).remote


def test_prompts_are_prefilled_locally_where_another_worker_cannot(codec) -> None:
    local = codec.read(with_image(), 0)
    assert (local.info.local_only, local.frames_with_kv) == ("multimodal", None)
    made = request()
    made.prompt_token_ids = None
    assert codec.read(made, 0).info.local_only == "prompt_embeds"
    made = request()
    made.trace_headers = {}
    assert codec.read(made, 0).info.local_only is None


@pytest.mark.parametrize(
    ("sampling", "local"),
    [
        ({}, None),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprob_token_ids": [[3]]}, "prompt_logprob_token_ids"),
        ({"skip_reading_prefix_cache": True}, "skip_reading_prefix_cache"),
        ({"presence_penalty": 0.5}, None),
        ({"grammar": "[ab]+"}, None),
    ],
)
def test_which_parameters_are_prefilled_where_they_decode(codec, sampling: dict[str, Any], local: str | None) -> None:
    assert codec.read(request(**sampling), 2).info.local_only == local


def test_a_request_that_reads_no_cache_is_not_looked_up_in_one(codec) -> None:
    made = request(skip_reading_prefix_cache=True)
    made.prompt_token_ids = list(range(64))
    assert codec.read(made, 16).prefix_keys == []


# Fields with which another worker may prefill, whatever they are; of media it depends on the model (`MediaRules`). With
# any of them another worker may continue the answer (`workers.vllm_engine.codec.continued`).
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
    extra_args bad_words thinking_token_budget routed_experts_prompt_start trace_decode_token_ids presence_penalty
    frequency_penalty structured_outputs _bad_words_token_ids repetition_detection""".split()
)


def test_every_field_of_a_request_is_known() -> None:
    """A field that a newer vLLM adds: read what it does, and name it above, or give it a row in `vllm_codec.py`."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from orchestrator.frontend import vllm_codec as fields

    for struct, limits, free in (
        (EngineCoreRequest, fields.REQUEST_LIMITS, REQUEST_FREE),
        (SamplingParams, fields.SAMPLING_LIMITS, SAMPLING_FREE),
    ):
        assert limits.keys() | free == set(struct.__struct_fields__)
        assert limits.keys().isdisjoint(free)


def test_client_cannot_set_kv_transfer_params(codec) -> None:
    made = request(extra_args={"kv_transfer_params": {"a": 1}, "kv_cache_report_mode": "full", "own": 2})
    codec.read(made, 0)
    assert made.sampling_params.extra_args == {"own": 2}


@pytest.mark.parametrize(("sampling", "why"), [({"stop": ["\udfff"]}, "lone surrogate"), ({"seed": 1 << 70}, "range")])
def test_what_cannot_be_sent_is_the_clients_mistake(codec: Any, sampling: dict[str, Any], why: str) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=why):
        codec.read(request(**sampling), 16)


def test_outputs_that_wait_are_joined_by_answer() -> None:
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.metrics.stats import PrefillStats

    from orchestrator.frontend.vllm_codec import join
    from orchestrator.router.request import Batch

    def made(name: str, tokens: list[int], **more: Any) -> Any:
        return EngineCoreOutput(name, tokens, **more)

    steps = [
        [made("a", [1], prefill_stats=PrefillStats()), made("b", [11])],
        [made("a", [2]), made("b", [12])],
        [made("b", [13, 14]), made("a", [3]), output([21])],
        [made("a", [4], finish_reason=FinishReason.LENGTH), output([22])],
        [made("b", [], finish_reason=FinishReason.ERROR, stop_reason="its worker died")],
    ]
    told = join([Batch(outputs, float(number)) for number, outputs in enumerate(steps)])
    assert told.timestamp == 4.0
    found = [(o.request_id, o.new_token_ids, o.finish_reason) for o in told.outputs]
    assert found == [
        ("a", [1], None),  # the first tokens of an answer are counted by themselves
        ("b", [11, 12, 13, 14], None),
        ("a", [2, 3, 4], FinishReason.LENGTH),
        ("r", [21], None),  # log-probabilities are not joined
        ("r", [22], None),
        ("b", [], FinishReason.ERROR),  # and what failed is told after the tokens before it
    ]
    assert told.outputs[-1].stop_reason == "its worker died"
