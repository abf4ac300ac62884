"""What is streamed past vLLM's server is, byte for byte, what vLLM's server streams: its app over a scripted engine."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from pydantic_core import to_json
from support_served import (
    CHAT,
    COMPLETION,
    EMPTY_FIRST,
    ENDS,
    IN_THREES,
    MESSAGES,
    ONE_BY_ONE,
    PLAIN,
    PROMPTS,
    TEXT,
    TURNS,
    UNANSWERED,
    UNUSUAL,
    WITH_GAPS,
    Served,
    script,
)
from support_wait import until
from vllm.v1.engine import EngineCoreOutput, FinishReason

from orchestrator.frontend import edge
from orchestrator.frontend.plain import streaming
from orchestrator.frontend.vllm_codec import join
from orchestrator.router.request import Batch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


@pytest.fixture
def sent_straight(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The events that did not come from vLLM's server."""
    events: list[bytes] = []
    send_now = edge.Reply.send_now

    def noted(reply: edge.Reply, event: bytes) -> bool:
        sent = send_now(reply, event)
        if sent:
            events.append(event)
        return sent

    monkeypatch.setattr(edge.Reply, "send_now", noted)
    return events


async def both_ways(served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]) -> list[bytes]:
    """The response, which is the same whether it was streamed straight or by vLLM's server alone."""
    ours = await served.ask(path, body)
    with monkeypatch.context() as only_vllm:
        only_vllm.setattr(streaming, "_is_plain", lambda request: False)
        theirs = await served.ask(path, body)
    assert ours == theirs
    return ours


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("how", [ONE_BY_ONE, IN_THREES, WITH_GAPS, EMPTY_FIRST])
@pytest.mark.parametrize("end", ENDS)
async def test_outputs_of_every_shape(served, monkeypatch, sent_straight, endpoint, how, end) -> None:
    served.core.script = script(served.tokens(TEXT), how, ENDS[end])
    path, body = endpoint
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    await both_ways(served, monkeypatch, path, {**body, "max_tokens": 400, **usage})
    assert len(sent_straight) > 10


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("more", PLAIN, ids=json.dumps)
async def test_plain_requests(served, monkeypatch, sent_straight, endpoint, more) -> None:
    path, body = endpoint
    served.core.script = script(served.tokens(TEXT), ONE_BY_ONE, ENDS["length"])
    got = await both_ways(served, monkeypatch, path, {**body, "max_tokens": 400, **more})
    assert len(sent_straight) > 5
    assert b"data: [DONE]\n\n" in got


@pytest.mark.parametrize(
    ("endpoint", "more"), [*((COMPLETION, more) for more in PROMPTS), *((CHAT, more) for more in MESSAGES)], ids=repr
)
@pytest.mark.parametrize("end", ["length", "engine error"])
async def test_prompts_of_every_shape(served, monkeypatch, endpoint, more, end) -> None:
    path, body = endpoint
    served.core.script = script(served.tokens(TEXT), ONE_BY_ONE, ENDS[end])
    got = await both_ways(served, monkeypatch, path, {**body, "max_tokens": 400, **more})
    assert got[0].startswith(b"HTTP/1.1 200") or more.get("messages")


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("more", [*UNUSUAL, *UNANSWERED], ids=json.dumps)
async def test_unusual_requests_use_vllm_path(served, monkeypatch, sent_straight, endpoint, more) -> None:
    path, body = endpoint
    served.core.script = script(served.tokens(TEXT), ONE_BY_ONE, ENDS["length"])
    await both_ways(served, monkeypatch, path, {**body, "max_tokens": 400, **more})
    assert not sent_straight


async def test_several_prompts_use_vllm_path(served, monkeypatch, sent_straight) -> None:
    served.core.script = script(served.tokens("some words"), ONE_BY_ONE, ENDS["length"])
    got = await served.ask("/v1/completions", {"prompt": ["a", "b"], "stream": True})
    assert b"".join(got).count(b'"finish_reason":"length"') == 2
    assert not sent_straight


async def test_a_refused_request_is_refused(served, monkeypatch, sent_straight) -> None:
    for more in ({"max_tokens": -1}, {"temperature": 9e9}, {"model": "another"}, {"max_tokens": 10**9}):
        path, body = COMPLETION
        got = await both_ways(served, monkeypatch, path, {**body, **more})
        assert b" 40" in got[0]


async def test_deltas_that_come_together_are_one_event(served, sent_straight) -> None:
    tokens = served.tokens(TEXT)
    served.core.script, served.core.turns = script(tokens, ONE_BY_ONE, ENDS["length"]), 0
    path, body = COMPLETION
    try:
        usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        got = await served.ask(path, {**body, "max_tokens": 400, **usage})
    finally:
        served.core.turns = TURNS
    events = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in got[1:-2]]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]).startswith(TEXT)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == len(tokens) + 1
    assert len(events) < len(tokens)


async def test_slow_client_gets_everything_later(served, monkeypatch) -> None:
    refused = 0
    send_now = edge.Reply.send_now

    def noted(reply: edge.Reply, event: bytes) -> bool:
        nonlocal refused
        sent = send_now(reply, event)
        refused += not sent
        return sent

    monkeypatch.setattr(edge.Reply, "send_now", noted)
    word = served.tokens(" word")
    assert len(word) == 1
    count = 2000
    served.core.script = [*(([word[0]], None, None) for _ in range(count)), ([word[0]], FinishReason.LENGTH, None)]
    served.core.turns = 4
    try:
        path, body = COMPLETION
        usage = {"stream_options": {"include_usage": True}}
        reader, writer = await served.open(path, {**body, "max_tokens": 8000, **usage})
        await until(lambda: refused)
        await served.core.playing[-1]
        got = await reader.read()
    finally:
        served.core.turns = TURNS
    writer.close()
    assert got.count(b" word") == count + 1
    assert b'"completion_tokens":%d' % (count + 1) in got and got.rstrip().endswith(b"data: [DONE]\n\n\r\n0")


async def test_a_client_that_leaves_is_noticed(served) -> None:
    word = served.tokens(" word")
    served.core.script = [(word, None, None) for _ in range(100_000)]
    path, body = COMPLETION
    reader, writer = await served.open(path, {**body, "max_tokens": 8000})
    for _ in range(20):
        await reader.readuntil(b"data: ")
    served.core.cancelled.clear()
    writer.transport.abort()
    await until(lambda: served.core.cancelled)
    served.core.playing.pop().cancel()
    assert not served.engine.output_processor.request_states


def test_text_is_written_as_pydantic_writes_it() -> None:
    text = "".join(chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000)
    assert msgspec.json.encode(text) == to_json(text)


class _Middleware:
    def __init__(self, app: Any) -> None:
        self.app = app


def test_custom_middleware_uses_vllm_path() -> None:
    app, args = FastAPI(), SimpleNamespace(sse_keep_alive_interval=0)
    generator = object()
    serving = SimpleNamespace(completion_stream_generator=generator)
    app.state.openai_serving_chat, app.state.openai_serving_completion = None, serving
    app.add_middleware(_Middleware)
    streaming.watch(app, args)
    assert serving.completion_stream_generator is generator
    app.user_middleware.clear()
    streaming.watch(app, SimpleNamespace(sse_keep_alive_interval=5))
    assert serving.completion_stream_generator is generator
    streaming.watch(app, args)
    assert serving.completion_stream_generator is not generator


@pytest.mark.parametrize("stop", [[], ["quoted"], ["café", "The"], [". The end"]], ids=json.dumps)
@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("end", ["length", "end of text", "stop token", "engine error"])
async def test_joined_outputs_are_the_same_answer(served, stop, included, end) -> None:
    """A whole response, with its usage, of outputs one by one and of all that came at once."""
    body = COMPLETION[1] | {"max_tokens": 400, "stop": stop, "include_stop_str_in_output": included, "stream": False}
    one_by_one = script(served.tokens(TEXT), ONE_BY_ONE, ENDS[end])
    batches = [
        Batch([EngineCoreOutput("r", tokens, finish_reason=f, stop_reason=s)], 1.0) for tokens, f, s in one_by_one
    ]
    joined = [(o.new_token_ids, o.finish_reason, o.stop_reason) for o in join(batches).outputs]
    assert len(joined) <= 2 < len(one_by_one)
    answers = []
    for served.core.script in (one_by_one, joined):
        answers.append(await served.ask(COMPLETION[0], body))
    assert answers[0] == answers[1]
