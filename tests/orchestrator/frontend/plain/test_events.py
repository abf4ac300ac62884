"""Events that are made like one of vLLM's, and events that are not to be imitated."""

import json

import msgspec
import pytest

pytest.importorskip("vllm")

from orchestrator.frontend.plain.streaming import EventTemplate

pytestmark = pytest.mark.vllm

COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": 'a "text": model',
    "choices": [
        {
            "index": 0,
            "text": "x",
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
    ],
}
CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None, "token_ids": None},
    ],
}
USAGE = {"prompt_tokens": 5, "total_tokens": 8, "completion_tokens": 3}
TEXTS = [
    "",
    "y",
    '"}]',
    "\\",
    "\n\t\r\b\f\x00\x1f\x7f",
    "é",
    "\u2028",
    "漢",
    "👍",
    '"text":"x"',
    '"delta":{"content":"',
]


def sent(event: dict) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def changed(event: dict, /, **choice: object) -> dict:
    return {**event, "choices": [{**event["choices"][0], **choice}]}


@pytest.mark.parametrize("first", TEXTS)
@pytest.mark.parametrize("next_text", TEXTS)
def test_the_next_event_has_the_next_text(first: str, next_text: str) -> None:
    for make in (lambda text: changed(COMPLETION, text=text), lambda text: changed(CHAT, delta={"content": text})):
        event = b"data: " + msgspec.json.encode(make(first)) + b"\n\n"
        template = EventTemplate.of(event)
        assert template is not None
        assert template.event(next_text, 7) == b"data: " + msgspec.json.encode(make(next_text)) + b"\n\n"


@pytest.mark.parametrize("details", [{}, {"completion_tokens_details": None}])
def test_usage_counts_on(details: dict) -> None:
    template = EventTemplate.of(sent({**COMPLETION, "usage": USAGE | details}))
    assert template is not None
    usage = {"prompt_tokens": 5, "total_tokens": 12, "completion_tokens": 7} | details
    assert template.event("y", 4) == sent({**changed(COMPLETION, text="y"), "usage": usage})


@pytest.mark.parametrize(
    "event",
    [
        b"",
        b"data: [DONE]\n\n",
        b"\x1f\x8b\x08 compressed",
        b"data: \xff\n\n",
        b": keep-alive\n\n",
        sent(COMPLETION) * 2,
        sent(COMPLETION)[:-1],
        sent({**COMPLETION, "choices": []}),
        sent({**COMPLETION, "choices": COMPLETION["choices"] * 2}),
        sent({**COMPLETION, "added": 1}),
        sent({**COMPLETION, "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 1}}}),
        sent({**COMPLETION, "usage": USAGE | {"total_tokens": 9}}),
        sent(changed(COMPLETION, finish_reason="stop")),
        sent(changed(COMPLETION, logprobs={})),
        sent(changed(COMPLETION, token_ids=[1])),
        sent(changed(COMPLETION, added=None)),
        sent(changed(COMPLETION, delta={"content": "x"})),
        sent(changed(CHAT, delta={"role": "assistant", "content": ""})),
        sent(changed(CHAT, delta={"reasoning": "x"})),
        sent(changed(CHAT, delta={})),
        sent({"error": {"message": "m", "type": "t", "param": None, "code": 500}}),
    ],
)
def test_event_with_more_than_text_makes_no_template(event: bytes) -> None:
    assert EventTemplate.of(event) is None


def test_unusual_text_encoding_makes_no_template() -> None:
    assert EventTemplate.of(sent(changed(COMPLETION, text="é"))) is None  # escaped by json, not by vLLM
