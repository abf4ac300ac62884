"""A frontend's request as the engine gets it, without an engine."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support_vllm import frames
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from orchestrator.types import KVEndpoint, KVSource
from orchestrator.wire.adapters import unique_name
from workers.engine import EngineRequest, Phase

pytestmark = pytest.mark.vllm


def given(*resumed: int, **sampling: Any) -> Any:
    from workers.vllm_engine.codec.messages import RequestCodec

    request = EngineRequest("r#1", Phase.DECODE, frames([1, 2, 3], **sampling), resume_tokens=list(resumed))
    return RequestCodec(max_model_len=100, vocabulary=500).decode(request).sampling_params


def test_requests_keep_their_order_where_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own comparison, between requests as they wait in the engine."""
    from workers.vllm_engine.codec import messages

    codec = messages.RequestCodec(max_model_len=100, vocabulary=500)

    def waiting(key: str, behind_s: float) -> Request:
        request = EngineRequest(key, Phase.DECODE, frames([1, 2, 3]), behind_s=behind_s)
        return Request.from_engine_core_request(codec.decode(request), None)

    first = waiting("first", 0.0)
    before = time.time()
    monkeypatch.setattr(time, "time", lambda: before - 3600.0)
    assert waiting("earlier", -60.0) < first < waiting("second", 0.0) < waiting("later", 60.0)


def test_an_answer_that_goes_on_is_asked_for_as_before_but_for_what_went_out_with_its_first_token() -> None:
    asked = {"max_tokens": 8, "min_tokens": 3, "trace_decode_token_ids": [5, 6, 7, 8], "prompt_logprobs": 2}
    whole, left = given(**asked), given(5, 6, **asked)
    assert (whole.prompt_logprobs, left.prompt_logprobs) == (2, None)
    assert (left.max_tokens, left.min_tokens, left.trace_decode_token_ids) == (8, 3, [5, 6, 7, 8])


def test_a_client_does_not_say_what_earlier_attempts_have_sent() -> None:
    from workers.vllm_engine.codec.continued import SENT

    assert given(extra_args={SENT: [10**12], "own": 1}).extra_args == {"own": 1}
    assert given(5, 6, extra_args={SENT: "x"}).extra_args == {SENT: [5, 6]}


def test_tokens_sent_are_within_the_engines_limits() -> None:
    from workers.engine import InvalidEngineRequest

    with pytest.raises(InvalidEngineRequest, match="r#1: expected a prompt of 1 to 2 tokens, got 3"):
        given(*[5] * 97, max_tokens=99)
    with pytest.raises(InvalidEngineRequest, match="r#1: expected token ids of 0 to 499, got 5 to 500"):
        given(5, 500)
    with pytest.raises(InvalidEngineRequest, match="r#1: 8 tokens are out already, of at most 8"):
        given(*[5] * 8)


@pytest.mark.parametrize(
    ("what", "most", "sampling"),
    [
        ("allowed_token_ids", 1024, lambda count: {"allowed_token_ids": list(range(count))}),
        ("logit_bias", 1024, lambda count: {"logit_bias": dict.fromkeys(range(count), 1.0)}),
        ("stop_token_ids", 128, lambda count: {"stop_token_ids": list(range(count)), "min_tokens": 1}),
        ("bad_words", 128, lambda count: {"words": [[3]] * count}),
        ("tokens of bad_words", 1024, lambda count: {"words": [[3] * (count - 20), [4] * 20]}),
    ],
)
def test_what_the_second_model_runner_would_die_of_is_refused(
    what: str, most: int, sampling: Callable[[int], dict[str, Any]]
) -> None:
    """That it dies of one more is vLLM's own check, in the step that begins the request."""
    from workers.engine import InvalidEngineRequest
    from workers.vllm_engine.codec.messages import RequestCodec, most_of_sampling

    def decode(count: int, second: bool) -> None:
        asked = sampling(count)
        words = asked.pop("words", None)
        core = MsgpackDecoder(EngineCoreRequest).decode(frames([1, 2, 3], **asked))
        core.sampling_params._bad_words_token_ids = words
        body = [bytes(frame) for frame in MsgpackEncoder().encode(core)]
        codec = RequestCodec(100, 5000, most_of_sampling(SimpleNamespace(use_v2_model_runner=second)))
        codec.decode(EngineRequest("r#1", Phase.DECODE, body))

    decode(most, second=True)
    decode(most + 1, second=False)
    with pytest.raises(InvalidEngineRequest, match=f"r#1: expected at most {most} {what}, got {most + 1}"):
        decode(most + 1, second=True)


def test_a_prefix_is_the_beginning_of_a_prompt_with_one_token_and_where_it_comes_from() -> None:
    from workers.vllm_engine.codec.messages import RequestCodec

    source = KVSource(KVEndpoint("holder", "host", 1), "r#1~")
    body = frames([1, 2, 3, 4, 5], max_tokens=8, min_tokens=4, prompt_logprobs=2)
    request = EngineRequest("r#1~", Phase.DECODE, body, source, prefix_tokens=3)
    core = RequestCodec(max_model_len=100, vocabulary=500).decode(request)
    assert core.prompt_token_ids == [1, 2, 3]
    sampling = core.sampling_params
    assert sampling is not None and sampling.prompt_logprobs is None and sampling.extra_args is not None
    assert (sampling.max_tokens, sampling.min_tokens) == (1, 1)
    assert sampling.extra_args["kv_transfer_params"]["kv_source"]["key"] == "r#1~"


def test_a_prefix_of_an_adapter_is_found_by_the_name_that_caches_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adapters of one name are told apart by their numbers, and neither has the blocks of the other."""
    from workers.vllm_engine.codec.continued import SENT, _make_requests
    from workers.vllm_engine.codec.messages import block_hashes

    monkeypatch.setattr(Request, "from_engine_core_request", Request.__dict__["from_engine_core_request"])
    _make_requests()  # given back afterwards
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)

    def hashes(number: int) -> list[bytes]:
        asked = frames(list(range(3, 43)), 4, extra_args={SENT: list(range(100, 140))})  # which a client may write
        core = MsgpackDecoder(EngineCoreRequest).decode(asked)
        core.lora_request = LoRARequest("style", number, "/adapters/style")
        return block_hashes(MsgpackEncoder().encode(core), hasher)

    core = MsgpackDecoder(EngineCoreRequest).decode(frames(list(range(3, 43)), 4))
    core.lora_request = LoRARequest(unique_name("style", 7), 7, "/adapters/style")
    assert hashes(7) == Request.from_engine_core_request(core, hasher).block_hashes
    assert len(hashes(7)) == 2 and hashes(7) != hashes(8)


def test_a_prefix_is_found_by_whole_blocks_also_where_caches_match_parts_of_them() -> None:
    """`prefix_match_unit` of half a block: vLLM names a block by the last of its hashes."""
    from vllm.v1.core.kv_cache_utils import resolve_block_hashes

    from workers.vllm_engine.plugin import _pd_lend

    init_none_hash(sha256)
    hasher, lent = get_request_block_hasher(8, sha256), list[Any]()
    engine = SimpleNamespace(
        request_block_hasher=hasher,
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(block_size=16)),
        scheduler=SimpleNamespace(
            hash_block_size=8,
            get_kv_connector=lambda: SimpleNamespace(
                connector_scheduler=SimpleNamespace(lend=lambda *said: lent.append(said))
            ),
        ),
    )
    _pd_lend(engine, frames(list(range(3, 63)), 4), "k", 32)
    core = MsgpackDecoder(EngineCoreRequest).decode(frames(list(range(3, 63)), 4))
    whole = resolve_block_hashes(Request.from_engine_core_request(core, hasher).block_hashes, 8, 16)
    assert lent == [("k", [whole[0], whole[1]], 32)]
