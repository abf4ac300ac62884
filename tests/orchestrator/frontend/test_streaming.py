"""What is streamed past vLLM's server is, byte for byte, what vLLM's server streams: its app over a scripted engine."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from orchestrator.config.access import LimitsConfig, SecurityConfig
from orchestrator.config.settings import parse_config
from orchestrator.fleet.view import Fleet
from orchestrator.router.request import Failure

pytest.importorskip("vllm")

import uvicorn
from fastapi import FastAPI
from pydantic_core import to_json
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from orchestrator.frontend import edge, streaming
from orchestrator.frontend.access import Access
from orchestrator.frontend.engine import FleetCore, FleetLLM
from orchestrator.frontend.server import build_vllm_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

TURNS = 60  # of the event loop between two outputs: each is answered before the next
TEXT = 'A plain answer, "quoted" \\ and\n\tindented: naïve café, 漢字, 👍🏽 and 🧑‍🚀. The end'
Output = tuple[list[int], Any, Any]  # tokens, finish reason, stop reason


class Scripted(FleetCore):
    """An engine core whose outputs are given."""

    def __init__(self) -> None:
        nothing = SimpleNamespace(requests={}, check_admission=lambda: None)
        super().__init__(SimpleNamespace(router=nothing, fleet=Fleet("f"), calls=None, pause=None), ("generate",))
        self.script: list[Output] = []
        self.turns = TURNS
        self.outputs = asyncio.Queue[EngineCoreOutputs]()
        self.cancelled: list[str] = []
        self.stopped: list[str] = []
        self.playing: list[asyncio.Task[None]] = []

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.playing.append(asyncio.create_task(self._play(request.request_id, list(self.script))))

    async def _play(self, request_id: str, script: list[Output]) -> None:
        for tokens, finish_reason, stop_reason in script:
            for _ in range(self.turns):
                await asyncio.sleep(0)
            output = EngineCoreOutput(request_id, tokens, finish_reason=finish_reason, stop_reason=stop_reason)
            self.outputs.put_nowait(EngineCoreOutputs(outputs=[output], timestamp=1.0))

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.outputs.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.stopped += request_ids

    def cancel(self, request_ids: Any) -> None:
        self.cancelled += request_ids


class Served:
    """vLLM's app, as a frontend serves it."""

    def __init__(self, core: Scripted, engine: FleetLLM, port: int) -> None:
        self.core, self.engine, self.port = core, engine, port

    def tokens(self, text: str) -> list[int]:
        return list(self.engine.renderer.tokenizer.encode(text, add_special_tokens=False))

    async def open(self, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # a client that does not read is soon noticed
        connection.connect(("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=2048)
        content = json.dumps({"model": "demo"} | body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: h\r\nx-request-id: same\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
        return reader, writer

    async def ask(self, path: str, body: dict[str, Any]) -> list[bytes]:
        """The chunks of the response, the head first, without the time of day."""
        reader, writer = await self.open(path, body)
        got = [await reader.readuntil(b"\r\n\r\n")]
        if b"chunked" in got[0]:
            while size := int(await reader.readline(), 16):
                got.append(await reader.readexactly(size))
                await reader.readline()
        got.append(await reader.read())
        writer.close()
        got[0] = re.sub(rb"date: [^\r]*", b"", got[0])
        return [re.sub(rb'"created":\d+', b'"created":0', part) for part in got]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    config = parse_config({"model": "demo", "engine": "sim", "frontend": {"server_args": {"max_logprobs": 5}}})
    args, vllm_config = build_vllm_config(config)
    core = Scripted()
    engine = FleetLLM(vllm_config, core, 1)
    app = build_app(args, ("generate",), vllm_config.model_config)
    await init_app_state(engine, app.state, args, ("generate",))
    streaming.watch(app, args)
    access = Access(SecurityConfig(), LimitsConfig(), "")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    around = edge.EdgeMiddleware(app, 1 << 24, access)
    server = uvicorn.Server(uvicorn.Config(around, http="httptools", log_config=None, access_log=False))
    app.state.server = server
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield Served(core, engine, listener.getsockname()[1])
    server.should_exit = server.force_exit = True
    await serving
    engine.shutdown()


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


CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Say it"}], "stream": True}
COMPLETION = "/v1/completions", {"prompt": "Say it", "stream": True}
ONE_BY_ONE, IN_THREES, WITH_GAPS, EMPTY_FIRST = "one by one", "in threes", "with gaps", "empty first"


def script(tokens: list[int], how: str, end: Output) -> list[Output]:
    size = 3 if how == IN_THREES else 1
    outputs: list[Output] = [(tokens[at : at + size], None, None) for at in range(0, len(tokens), size)]
    if how == WITH_GAPS:
        outputs = [part for output in outputs for part in (output, ([], None, None))]
    if how == EMPTY_FIRST:
        outputs.insert(0, ([], None, None))
    return [*outputs, end]


ENDS: dict[str, Output] = {
    "length": ([9], FinishReason.LENGTH, None),
    "end of text": ([2], FinishReason.STOP, None),
    "stop token": ([9], FinishReason.STOP, 9),
    "aborted": ([], FinishReason.ABORT, None),
    "engine error": ([], FinishReason.ERROR, None),
    "fleet's failure": ([], FinishReason.ERROR, Failure("every engine crashed on it")),
    "client's fault": ([], FinishReason.ERROR, Failure("a wrong prompt", by_client=True)),
    "repetition": ([9], FinishReason.REPETITION, "repetition_detected"),
}


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("how", [ONE_BY_ONE, IN_THREES, WITH_GAPS, EMPTY_FIRST])
@pytest.mark.parametrize("end", ENDS)
async def test_outputs_of_every_shape(served, monkeypatch, sent_straight, endpoint, how, end) -> None:
    served.core.script = script(served.tokens(TEXT), how, ENDS[end])
    path, body = endpoint
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    await both_ways(served, monkeypatch, path, {**body, "max_tokens": 400, **usage})
    assert len(sent_straight) > 10


PLAIN: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
    {"stop": ["the"]},
    {"stop": ["café", "no such"]},
    {"stop": ["café"], "include_stop_str_in_output": True},
    {"stop": ["indented: naïve café"]},
    {"stop_token_ids": [5]},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": 3},
    {"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
    {"ignore_eos": True, "min_tokens": 3, "skip_special_tokens": False},
    {"logit_bias": {"5": 1.0}, "bad_words": ["worse"], "user": "u", "priority": 1},
    {"n": 1, "logprobs": None, "seed": None, "prompt_logprobs": None},
]
UNUSUAL: list[dict[str, Any]] = [
    {"n": 2},
    {"echo": True},
    {"return_token_ids": True},
    {"no_such_field": 1},
    {"stream_interval": 4},
    {"response_format": {"type": "json_object"}},
    {"stream": False},
]


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("more", PLAIN, ids=json.dumps)
async def test_plain_requests(served, monkeypatch, sent_straight, endpoint, more) -> None:
    path, body = endpoint
    served.core.script = script(served.tokens(TEXT), ONE_BY_ONE, ENDS["length"])
    got = await both_ways(served, monkeypatch, path, {**body, "max_tokens": 400, **more})
    assert len(sent_straight) > 5
    assert b"data: [DONE]\n\n" in got


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("more", UNUSUAL, ids=json.dumps)
async def test_unusual_requests_are_vllms_servers(served, monkeypatch, sent_straight, endpoint, more) -> None:
    path, body = endpoint
    served.core.script = script(served.tokens(TEXT), ONE_BY_ONE, ENDS["length"])
    await both_ways(served, monkeypatch, path, {**body, "max_tokens": 400, **more})
    assert not sent_straight


async def test_several_prompts_are_vllms_servers(served, monkeypatch, sent_straight) -> None:
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


async def test_a_client_that_does_not_read_gets_everything_later(served, monkeypatch) -> None:
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
        async with asyncio.timeout(60):
            while not refused:
                await asyncio.sleep(0.01)
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
    async with asyncio.timeout(60):
        while not served.core.cancelled:
            await asyncio.sleep(0.01)
    served.core.playing.pop().cancel()
    assert not served.engine.output_processor.request_states


def test_text_is_written_as_pydantic_writes_it() -> None:
    text = "".join(chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000)
    assert msgspec.json.encode(text) == to_json(text)


class _Middleware:
    def __init__(self, app: Any) -> None:
        self.app = app


def test_with_middleware_of_its_own_everything_is_vllms_servers() -> None:
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
