"""A plain request gets, byte for byte, what vLLM's own route answers; what is not plain, that route gets as it came."""

import asyncio
import json
import re
from argparse import Namespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from prometheus_client import REGISTRY
from support_served import CHAT, COMPLETION, ENDS, ONE_BY_ONE, PLAIN, TEXT, UNUSUAL, Served, script
from support_wait import until
from vllm.entrypoints.openai.completion.api_router import attach_router
from vllm.exceptions import GenerationError
from vllm.pooling_params import PoolingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason

from orchestrator.frontend import engine
from orchestrator.frontend.models.app import end_streams_of_failures
from orchestrator.frontend.plain import route
from orchestrator.frontend.vllm_codec import VllmCodec, aborted
from orchestrator.policy.placement import Reject
from orchestrator.router.request import Failure

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

ENDPOINTS = pytest.mark.parametrize("endpoint", [CHAT, COMPLETION], ids=["chat", "completion"])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests that went past vLLM's route."""
    requests: list[Any] = []
    validated = route.PlainRoute.validated

    def noted(self: route.PlainRoute, body: bytes) -> Any:
        asked = validated(self, body)
        if asked is not None:
            requests.append(asked)
        return asked

    monkeypatch.setattr(route.PlainRoute, "validated", noted)
    return requests


@pytest.mark.parametrize("kind", [COMPLETION, CHAT], ids=["completion", "chat"])
async def test_a_choice_that_fails_ends_the_others_though_nothing_is_streamed(
    served: Served, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, dict[str, Any]]
) -> None:
    path, body = kind
    play = served.core.add_request_async

    async def add(request: EngineCoreRequest) -> None:
        served.core.script = [([5], None, None)]  # and no end
        if request.request_id.startswith("1_"):
            served.core.script = [([5], None, None), ENDS["fleet's failure"]]
        await play(request)

    monkeypatch.setattr(served.core, "add_request_async", add)
    served.core.cancelled.clear()
    head, answer, *_ = await served.ask(path, body | {"n": 3, "stream": False})
    assert b" 500 " in head and b"every engine crashed on it" in answer
    assert sorted(name[:2] for name in served.core.cancelled) == ["0_", "2_"]
    assert not served.engine.output_processor.has_unfinished_requests()


async def test_a_response_made_in_the_background_ends_for_who_watches_it_also_where_it_fails(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses = served.app.state.openai_serving_responses
    monkeypatch.setattr(responses, "enable_store", True)
    monkeypatch.setattr(responses, "_run_background_request_stream", responses._run_background_request_stream)
    end_streams_of_failures(responses)
    asked = {"input": "Say it", "stream": True, "background": True, "store": True}
    served.core.script = [([5], None, None), ENDS["length"]]
    head, *events, _ = await served.ask("/v1/responses", asked)
    assert b" 200 " in head and b"response.created" in events[0] and b"response.completed" in events[-1]
    served.core.script = [([5], None, None), ENDS["fleet's failure"]]
    with pytest.raises(ValueError, match="invalid literal"):  # the connection breaks off
        await served.ask("/v1/responses", asked)


def answers(status: str) -> float:
    labels = {"handler": "/v1/completions", "method": "POST", "status": status}
    return REGISTRY.get_sample_value("http_requests_total", labels) or 0.0


async def by_vllm_alone(plain: route.PlainRoute, scope: Any, receive: Any, send: Any) -> None:
    await plain._vllms.handle(scope, receive, send)


async def both_ways(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes | dict[str, Any], **head: str
) -> bytes:
    ours = await served.ask(path, body, **head)
    with monkeypatch.context() as only_vllm:
        only_vllm.setattr(route.PlainRoute, "handle", by_vllm_alone)
        theirs = await served.ask(path, body, **head)
    assert ours == theirs
    return ours[0]


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("more", [*PLAIN, *UNUSUAL[:-1]], ids=json.dumps)
async def test_valid_requests_bypass_vllm_route(served, monkeypatch, taken, endpoint, stream, more) -> None:
    path, body = endpoint
    if not stream:
        more = {name: value for name, value in more.items() if name != "stream_options"}
    served.core.script = script(served.tokens(TEXT), ONE_BY_ONE, ENDS["length"])
    answer = await both_ways(served, monkeypatch, path, {**body, "max_tokens": 400, **more, "stream": stream})
    assert answer.startswith(b"HTTP/1.1 200") and len(taken) == 1


@ENDPOINTS
@pytest.mark.parametrize("end", ENDS)
async def test_unstreamed_answer_equals_vllm_answer(served, monkeypatch, taken, endpoint, end) -> None:
    path, body = endpoint
    served.core.script = script(served.tokens(TEXT), ONE_BY_ONE, ENDS[end])
    await both_ways(served, monkeypatch, path, {**body, "max_tokens": 400, "stream": False})
    assert len(taken) == 1


REFUSED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"prompt": "\xff"}',
    b'{"prompt": "a", "max_tokens": "many"}',
    b'{"prompt": "a", "temperature": {}}',
    b'{"prompt": "a\x01"}',
    b'{"prompt": "a", "cache_salt": ""}',
    b'{"messages": "none"}',
    b"[" * 100_000,
]


@ENDPOINTS
@pytest.mark.parametrize("content", REFUSED, ids=lambda content: repr(content)[2:42])
async def test_invalid_requests_get_vllm_error(served, monkeypatch, taken, endpoint, content) -> None:
    answer = await both_ways(served, monkeypatch, endpoint[0], content)
    assert answer.startswith(b"HTTP/1.1 4") and not taken


ODD = [
    b'"temperature": NaN',
    b'"temperature": 1e-400, "max_tokens": 3',
    b'"top_p": 1e400',
    b'"seed": -0, "max_tokens": 4.0',
    b'"seed": 99999999999999999999999999',
    b'"max_tokens": 3, "max_tokens": 4',
    b'"max_tokens": 1' + b"0" * 400,
    b'"user": "\\ud800"',
    b'"user": "\\u0000 \\ud83d\\udc4d"',
    b'"logit_bias": {"1": 1e2}, "min_p": 0.10000000000000000555',
    b'"\\u0075ser": "a", "no such": [1, {"a": null}]',
    b'"stop": ["a", 1]',
]


async def given_both_ways(served: Served, monkeypatch: pytest.MonkeyPatch, content: bytes) -> tuple[bytes, list[str]]:
    """The answer, and what the engine was given by either way."""
    served.core.script = [ENDS["length"]]
    given: list[str] = []
    add = served.core.add_request_async

    async def noted(request: Any) -> None:
        given.append(repr((request.prompt_token_ids, request.sampling_params)))
        await add(request)

    monkeypatch.setattr(served.core, "add_request_async", noted)
    return await both_ways(served, monkeypatch, "/v1/completions", content), given


@pytest.mark.parametrize("more", ODD, ids=lambda more: more.decode())
async def test_odd_values_mean_same_as_in_vllm_route(served, monkeypatch, more) -> None:
    """Two parsers read JSON here, and what they make of it is given to the engine."""
    content = b'{"model": "demo", "prompt": "Say it", ' + more + b"}"
    answer, given = await given_both_ways(served, monkeypatch, content)
    assert len(given) == (2 if answer.startswith(b"HTTP/1.1 200") else 0)
    assert len(set(given)) <= 1


TOKEN_IDS = ["[7, 5, 9]", "[5]", "[]", "[5, true, 9]", "[5, 6.0]", "[5, 6.5]", '[5, "6"]', "[5, -6, 9]", "[5, null]"]
TOKEN_IDS += ["[[5, 6], [7]]", "[5, 1" + "0" * 30 + "]", "[5, 999999]", json.dumps(list(range(1, 300)))]


@pytest.mark.parametrize("prompt", TOKEN_IDS, ids=lambda prompt: prompt[:40])
async def test_token_ids_mean_same_as_in_vllm_route(served, monkeypatch, prompt) -> None:
    """Pydantic checks few of them here."""
    answer, given = await given_both_ways(served, monkeypatch, b'{"model": "demo", "prompt": %s}' % prompt.encode())
    assert bool(given) == answer.startswith(b"HTTP/1.1 200")
    assert len(given) == 2 * len(set(given))


@pytest.mark.parametrize("content_type", ["text/plain", "application/json; charset=latin-1", "APPLICATION/JSON", ""])
async def test_other_content_types_use_vllm_route(served, monkeypatch, taken, content_type) -> None:
    served.core.script = [ENDS["length"]]
    content = json.dumps({"model": "demo", "prompt": "Say it"}).encode()
    await both_ways(served, monkeypatch, "/v1/completions", content, content_type=content_type)
    assert not taken


async def test_other_methods_use_vllm_route(served, monkeypatch, taken) -> None:
    answer = await both_ways(served, monkeypatch, "/v1/completions", b"{}", method="GET")
    assert answer.startswith(b"HTTP/1.1 405") and not taken


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("begun", [False, True], ids=["before the first token", "after it"])
async def test_a_client_that_leaves_is_noticed(served, taken, stream, begun) -> None:
    word = served.tokens(" word")
    served.core.script = [(word, None, None)] * 100_000 if begun else []
    served.core.cancelled.clear()
    counted = {status: answers(status) for status in ("2xx", "4xx", "5xx")}
    reader, writer = await served.open("/v1/completions", {"prompt": "Say it", "max_tokens": 8000, "stream": stream})
    await until(lambda: served.engine.output_processor.request_states)
    if begun and stream:
        await reader.readuntil(b"data: ")
    writer.transport.abort()
    await until(lambda: served.core.cancelled and counted != {status: answers(status) for status in counted})
    served.core.playing.pop().cancel()
    assert len(taken) == 1 and not served.engine.output_processor.request_states
    assert answers("5xx") == counted["5xx"], "it was not our fault"


@ENDPOINTS
async def test_a_client_whose_frontend_ends_meanwhile_is_told_to_ask_again(served, taken, endpoint) -> None:
    path, body = endpoint
    served.core.script = []
    asked = asyncio.create_task(served.ask(path, body | {"max_tokens": 8000, "stream": False}))
    await until(lambda: served.engine.output_processor.request_states)
    for task in served.app.state.server.server_state.tasks:
        task.cancel()  # as uvicorn does when the time to end is over
    head, told = await asked
    served.core.playing.pop().cancel()
    assert len(taken) == 1 and not served.engine.output_processor.request_states
    assert head.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in head and b"this frontend is ending" in told


def test_changed_route_stays_vllm_route() -> None:
    def installed(**args: bool) -> int:
        route.install(app, Namespace(**{"enable_server_load_tracking": False} | args))
        return sum(isinstance(found, route.PlainRoute) for found in app.router.routes)

    app = FastAPI()
    app.post("/v1/completions")(lambda: None)
    assert installed() == 0
    attach_router(app)
    assert installed(enable_server_load_tracking=True) == 0
    assert installed() == 1


def test_the_api_is_described_as_before(served) -> None:
    described = served.app.openapi()["paths"]
    assert {"/v1/chat/completions", "/v1/completions"} <= described.keys()
    assert re.search("CompletionRequest", json.dumps(described["/v1/completions"]))


async def test_an_engine_gets_no_id_of_any_length_and_text(served, monkeypatch) -> None:
    """Of /v1/responses the body names it: it would be in Redis, in log lines and in the message of each token."""
    ids: list[str] = []
    add = served.core.add_request_async

    async def noted(request: Any) -> None:
        ids.append(request.request_id)
        await add(request)

    monkeypatch.setattr(served.core, "add_request_async", noted)
    served.core.script = [([9], FinishReason.LENGTH, None)]
    for given in ("mine", "x\n2026-01-01 ERROR pd.request: \x1b[2J" + "é" * 100_000, "y" * 100_000):
        answer = await served.ask("/v1/responses", {"input": "Say it", "request_id": given, "max_output_tokens": 4})
        assert b"200 OK" in answer[0] and json.loads(b"".join(answer[1:]))["id"] == given
    own, odd, long = ids
    assert own.startswith("mine_0-") and odd.startswith("x2026-01-01ERRORpd.request:[2J-")
    assert len(long) < 400 and all(re.fullmatch("[!-~]+", each) for each in ids)


@pytest.mark.parametrize("how", ["failed", "refused", "paused"])
async def test_a_pooling_request_that_fails_ends_alone(served, monkeypatch, how) -> None:
    """vLLM's output of a pooling request must have what pooling gave: it asserts that in the task of all requests."""
    codec, core = VllmCodec(), served.core
    refused = Failure("no_decode_worker", rejected=Reject("no_decode_worker", 1.0))
    failure = Failure("its worker was lost") if how == "failed" else refused
    add = core.add_request_async

    async def fail(request: EngineCoreRequest) -> None:
        if request.pooling_params is None:
            await add(request)
            return
        parsed = codec.read(request, 0)
        output = aborted(parsed, engine._PAUSED) if how == "paused" else codec.failure(parsed, failure)
        core.outputs.put_nowait(EngineCoreOutputs(outputs=[output], timestamp=1.0))

    monkeypatch.setattr(core, "add_request_async", fail)
    wanted = PoolingParams(task="embed")
    asked = EngineCoreRequest("pooled", [5, 6], None, None, wanted, 0.0, None, None, None)
    core.script = script(served.tokens(TEXT), ONE_BY_ONE, ENDS["length"])
    path, body = COMPLETION
    other = asyncio.create_task(served.ask(path, body))
    with pytest.raises(GenerationError if how == "failed" else engine.FleetRefused) as told:
        async for _ in served.engine.encode(asked, wanted, "pooled"):
            pytest.fail("it has no answer")
    if how != "failed":
        assert told.value.http_status == 503
    assert b"".join(await other).count(b"data: ") > 20 and not served.engine.errored
