"""vLLM's app as a frontend serves it, over an engine whose outputs are given; and requests to ask it."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import REGISTRY
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from orchestrator.config.access import LimitsConfig, SecurityConfig
from orchestrator.config.settings import parse_config
from orchestrator.fleet.view import Fleet
from orchestrator.frontend import edge
from orchestrator.frontend.access import Access
from orchestrator.frontend.engine import FleetCore, FleetLLM
from orchestrator.frontend.models.app import build_vllm_config
from orchestrator.frontend.plain import route, streaming
from orchestrator.frontend.untrusted.connections import BoundedHttp
from orchestrator.router.request import Failure

TURNS = 60  # of the event loop between two outputs: each is answered before the next
TEXT = 'A plain answer, "quoted" \\ and\n\tindented: naïve café, 漢字, 👍🏽 and 🧑‍🚀. The end'
Output = tuple[list[int], Any, Any]  # tokens, finish reason, stop reason


class Scripted(FleetCore):
    """An engine core whose outputs are given."""

    def __init__(self) -> None:
        nothing = SimpleNamespace(requests={}, check_admission=lambda slo_class: None)
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

    def __init__(self, app: FastAPI, core: Scripted, engine: FleetLLM, port: int) -> None:
        self.app, self.core, self.engine, self.port = app, core, engine, port

    def tokens(self, text: str) -> list[int]:
        return list(self.engine.renderer.tokenizer.encode(text, add_special_tokens=False))

    async def open(
        self, path: str, body: dict[str, Any] | bytes, method: str = "POST", content_type: str = "application/json"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # a client that does not read is soon noticed
        connection.connect(("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=2048)
        content = body if isinstance(body, bytes) else json.dumps({"model": "demo"} | body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: h\r\nx-request-id: same\r\ncontent-type: {content_type}\r\n"
        writer.write(head.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
        return reader, writer

    async def ask(self, path: str, body: dict[str, Any] | bytes, **head: str) -> list[bytes]:
        """The chunks of the response, the head first, without the time of day."""
        reader, writer = await self.open(path, body, **head)
        got = [await reader.readuntil(b"\r\n\r\n")]
        if b"chunked" in got[0]:
            while size := int(await reader.readline(), 16):
                got.append(await reader.readexactly(size))
                await reader.readline()
        got.append(await reader.read())
        writer.close()
        got[0] = re.sub(rb"date: [^\r]*", b"", got[0])
        return [re.sub(rb'"created":\d+', b'"created":0', part) for part in got]


@contextlib.asynccontextmanager
async def serving(plain: bool = False) -> AsyncIterator[Served]:
    """`plain`: as vLLM's own server serves it (`vllm/entrypoints/launchers/launcher.py`), without anything of ours."""
    config = parse_config({"model": "demo", "engine": "sim", "frontend": {"server_args": {"max_logprobs": 5}}})
    args, vllm_config = build_vllm_config(config)
    core = Scripted()
    engine = FleetLLM(vllm_config, core, 1)
    # Those of an app that this process had before: beside them this one would count nothing.
    for counter in {each for name, each in REGISTRY._names_to_collectors.items() if name.startswith("http_")}:
        REGISTRY.unregister(counter)
    app = build_app(args, ("generate",), vllm_config.model_config)
    await init_app_state(engine, app.state, args, ("generate",))
    if not plain:
        streaming.watch(app, args)
        route.install(app, args)
    access = Access(SecurityConfig(), LimitsConfig(), "")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    around = app if plain else edge.EdgeMiddleware(app, 1 << 24, access)
    http = "auto" if plain else BoundedHttp
    options = {"log_config": None, "access_log": False, "timeout_keep_alive": 65}
    server = uvicorn.Server(uvicorn.Config(around, http=http, **options))
    app.state.server = server
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield Served(app, core, engine, listener.getsockname()[1])
    server.should_exit = server.force_exit = True
    await serving
    engine.shutdown()


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
    {"max_tokens": None, "stream_options": None, "stop": [], "logit_bias": {}},
    {"stream_options": {}, "stop": "no such", "skip_special_tokens": True, "spaces_between_special_tokens": False},
    {"stop": ["é", "\n\t", "👍🏽 and 🧑"], "stop_token_ids": [], "allowed_token_ids": None},
    {"truncate_prompt_tokens": 2, "temperature": 0, "top_p": 1, "cache_salt": "s"},
]
PROMPTS: list[dict[str, Any]] = [  # of a completion
    {"prompt": [5, 6, 7]},
    {"prompt": [[5, 6, 7]]},
    {"prompt": ["Say it"]},
    {"prompt": "naïve 漢字 👍🏽\u2028", "add_special_tokens": True},
]
MESSAGES: list[dict[str, Any]] = [  # of a chat
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "it"}]}]},
    {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "a"}, {"role": "assistant"}]},
    {"max_completion_tokens": 50, "max_tokens": None},
    {"add_generation_prompt": True, "chat_template_kwargs": {"enable_thinking": False}},
    {"tools": None, "tool_choice": "none", "parallel_tool_calls": None, "response_format": None},
    {"metadata": None, "store": None, "logprobs": None, "top_logprobs": None},
]
UNUSUAL: list[dict[str, Any]] = [
    {"n": 2},
    {"echo": True},
    {"return_token_ids": True},
    {"no_such_field": 1},
    {"stream_interval": 4},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "text"}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "none"},
    {"best_of": 2},
    {"stream": False},
]
UNANSWERED: list[dict[str, Any]] = [  # unusual too; the scripted engine has no logprobs to tell
    {"logprobs": 1},
    {"logprobs": 0},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": False, "echo": False},
    {"prompt_logprobs": 1},
    {"suffix": "end"},
]
