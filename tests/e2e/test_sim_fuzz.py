"""Bad input over HTTP: whatever the body, the answer is no 5xx, it comes in time, and the fleet serves on.

Requests are made from the server's own schema by `http_fuzz`, to every operation; `make fuzz` sends many more of them.
"""

import json
from typing import Any

import pytest
from http_fuzz.cases import SOUND, Cases
from http_fuzz.run import others, send_all, wrong_answers
from support_fleet import RunningFleet, running_fleet, token_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BODIES = 100  # for each path
CASES = 500  # of all kinds
AT_ONCE = 8
MAX_BODY_BYTES = 1_000_000
MAX_N = 4
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
]


@pytest.fixture(scope="module")
def fleet():
    sets = (
        f"limits.max_body_bytes={MAX_BODY_BYTES}",
        "routing.remote_prefill_min_tokens=16",
        "workers.engine_args.enable_prefix_caching=false",
        # Answers are short and quick, so that those to sound requests cost little.
        "workers.engine_args.max_model_len=1024",
        "sim.speed=20",
        f"limits.max_n={MAX_N}",
    )
    with running_fleet("sim-2p2d.yaml", *sets) as running:
        yield running


@pytest.fixture
def cases(fleet: RunningFleet) -> Cases:
    return Cases(fleet.http.get("/openapi.json").json(), fleet.model, seed=7)


@pytest.mark.parametrize("path", PATHS)
async def test_a_hostile_field_is_answered_with_no_5xx(fleet: RunningFleet, cases: Cases, path: str) -> None:
    tally = await send_all(fleet.url, cases.with_fields(path, BODIES), AT_ONCE)
    assert [(wrong.status, wrong.said, wrong.case.shown()) for wrong in tally.wrong if not wrong.is_vllms_own] == []
    fleet.assert_no_leaks()


async def test_hostile_requests_of_every_kind_end_no_other(fleet: RunningFleet, cases: Cases) -> None:
    workers = {worker["id"] for worker in fleet.workers()}
    async with others(fleet) as beside:
        tally = await send_all(fleet.url, cases.take(CASES), AT_ONCE)
    assert [(wrong.status, wrong.said, wrong.case.shown()) for wrong in tally.wrong if not wrong.is_vllms_own] == []
    assert beside and wrong_answers(beside) == []
    fleet.assert_no_leaks()
    assert {worker["id"] for worker in fleet.workers()} == workers


# ---- by hand --------------------------------------------------------------------------------------------------------

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
        for more in ({"n": MAX_N + 1}, {"n": MAX_N + 1, "use_beam_search": True}):
            body = {"model": fleet.model, "prompt": "hello", "max_tokens": 2} | more
            answered = await client.post("/v1/completions", json=body)
            assert answered.status_code == 400 and f"at most {MAX_N}" in answered.text, answered.text
    (served,) = await fleet.ask_all([token_prompt(300, 1)], concurrency=1)
    assert served.ok
