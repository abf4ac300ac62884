"""Bad input over HTTP: whatever the body, the answer is no 5xx, it comes in time, and the fleet serves on.

Bodies are made from the server's own schema, each with one or two fields that are hostile.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from support_fleet import RunningFleet, running_fleet, token_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BODIES = 200  # for each path
ANSWER_TIMEOUT_S = 20
MAX_BODY_BYTES = 1_000_000
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
]
TEXT = [{"role": "user", "content": "hello"}]
SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TEXT, "max_tokens": 3},
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": TEXT, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": TEXT},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
}
HOSTILE: list[Any] = [
    None,
    True,
    "",
    "x",
    "\x00\ud7ff\U0010ffff",
    "half \ud83d",
    "x" * 10_000,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63) - 1,
    1e308,
    -0.5,
    float("nan"),
    float("inf"),
    [],
    [[]],
    [None],
    [-1],
    [2**40],
    ["x", 1],
    {},
    {"": {}},
    {"type": "x"},
    [{}],
    [{"role": "user"}],
    [{"role": "nobody", "content": [{"type": "text"}]}],
    [{"type": "function", "function": {}}],
]
# What the simulated engine has not, and says so with an error.
NOT_SIMULATED = {
    "echo",
    "use_beam_search",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "response_format",
    "structured_outputs",
    "text",
}


@pytest.fixture(scope="module")
def fleet():
    with running_fleet("sim-2p2d.yaml", f"limits.max_body_bytes={MAX_BODY_BYTES}") as running:
        yield running


def fields_of(schema: dict[str, Any], path: str) -> list[str]:
    """The names of a path's body in the server's own schema."""
    body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    names: set[str] = set()
    for choice in [body, *body.get("anyOf", ())]:
        if "$ref" in choice:
            choice = schema["components"]["schemas"][choice["$ref"].rpartition("/")[2]]
        names |= choice.get("properties", {}).keys()
    return sorted(names - NOT_SIMULATED)


def bodies(model: str, fields: list[str], path: str, count: int) -> list[bytes]:
    draw = random.Random(path)
    found = []
    for _ in range(count):
        body = {"model": model} | SOUND[path]
        if "stream" in fields:
            body["stream"] = draw.choice([True, False])
        for name in draw.sample(fields, draw.choice([1, 1, 2])):
            body[name] = draw.choice(HOSTILE)
        found.append(json.dumps(body).encode())
    return found


async def answer(client: httpx.AsyncClient, path: str, body: bytes) -> str | None:
    """What is wrong with the answer, or None."""
    headers = {"content-type": "application/json"}
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answered = await client.post(path, content=body, headers=headers)
    except TimeoutError:
        return f"no answer: {path} {body[:300]!r}"
    if answered.status_code >= 500 or '"code":500' in answered.text:
        return f"{answered.status_code}: {path} {body[:300]!r}: {answered.text[:300]}"
    return None


@pytest.mark.parametrize("path", PATHS)
async def test_a_hostile_field_is_answered_with_no_5xx(fleet: RunningFleet, path: str) -> None:
    fields = fields_of(fleet.http.get("/openapi.json").json(), path)
    gate = asyncio.Semaphore(8)
    async with fleet.client() as client:

        async def one(body: bytes) -> str | None:
            async with gate:
                return await answer(client, path, body)

        wrong = await asyncio.gather(*(one(body) for body in bodies(fleet.model, fields, path, BODIES)))
    assert [why for why in wrong if why is not None] == []
    fleet.assert_no_leaks()


BROKEN = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"model":' + b'"x"' * 3,
    b'"' + b"a" * 1000,
    b"1e999",
]


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_is_no_json_object_is_answered_with_4xx(fleet: RunningFleet, path: str) -> None:
    async with fleet.client() as client:
        for body in BROKEN:
            answered = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert 400 <= answered.status_code < 500, (body[:50], answered.status_code, answered.text[:300])


HALF = "half \ud83d"
HALVES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"bad_words": [HALF]}),
    ("/v1/chat/completions", {"bad_words": [HALF], "stream": True}),
    ("/v1/responses", {"metadata": {"a": HALF}, "stream": True}),
    ("/v1/responses", {"tools": [{"type": "function", "name": HALF, "parameters": {}}], "stream": True}),
    ("/v1/messages", {"system": HALF}),
    ("/tokenize", {"prompt": HALF}),
    ("/detokenize", {"model": HALF}),
]


@pytest.mark.parametrize(("path", "fields"), HALVES)
async def test_text_with_half_a_character_is_answered_with_400(
    fleet: RunningFleet, path: str, fields: dict[str, Any]
) -> None:
    async with fleet.client() as client:
        body = json.dumps({"model": fleet.model} | SOUND[path] | fields)
        answered = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert answered.status_code == 400 and "lone surrogate, \\ud83d" in answered.json()["error"]["message"]


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
@pytest.mark.parametrize("path", PATHS[:2])
async def test_a_number_that_no_engine_can_be_sent_is_answered_with_400(
    fleet: RunningFleet, path: str, number: int
) -> None:
    async with fleet.client() as client:
        answered = await client.post(path, json={"model": fleet.model, **SOUND[path], "top_k": number})
        assert answered.status_code == 400 and answered.json()["error"]["type"] == "BadRequestError", answered.text


async def test_too_much_is_refused(fleet: RunningFleet) -> None:
    async def chunks():
        for _ in range(100):
            yield b"x" * 20_000

    async with fleet.client() as client:
        for content in (b"x" * 2 * MAX_BODY_BYTES, chunks()):
            answered = await client.post("/v1/completions", content=content)
            assert answered.status_code == 413 and "limits.max_body_bytes" in answered.text
        for more in ({"n": 129}, {"n": 129, "use_beam_search": True}):
            body = {"model": fleet.model, "prompt": "hello", "max_tokens": 2} | more
            answered = await client.post("/v1/completions", json=body)
            assert answered.status_code == 400 and "128" in answered.text, answered.text
    (served,) = await fleet.ask_all([token_prompt(300, 1)], concurrency=1)
    assert served.ok
