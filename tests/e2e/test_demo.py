"""What `make up` serves: the demo model, really computed on one engine and decoded on the other."""

import json
from typing import Any

import pytest
from support_fleet import RunningFleet, paste, running_fleet

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = "You answer briefly. " * 60 + "What is the capital of France?"


def asked_anew(number: int) -> str:
    """A question whose prefix is cached nowhere, long enough to be prefilled remotely."""
    return f"{number}. {QUESTION}"


@pytest.fixture(scope="module")
def fleet():
    with running_fleet("demo-1p1d-cpu.yaml") as running:
        yield running
        running.assert_no_leaks()


def test_the_curls_after_ready_say_paris_from_one_worker_and_from_two(fleet: RunningFleet):
    short, long = fleet.curls()
    assert "Paris" in paste(short)["choices"][0]["message"]["content"]
    fleet.wait_for_line(r"pd\.request .* prefilled and decoded by", 10)
    # Another try is another prompt: the one before is cached where it was decoded.
    answer, _ = fleet.asked_remotely(lambda tries: paste(long.replace("You answer", f"You{tries * ' do'} answer", 1)))
    assert "Paris" in answer["choices"][0]["message"]["content"]
    fleet.wait_for_line(r"pd\.request .* prefilled by worker-0, dec", 10)
    assert not [line for line in fleet.log if "WARNING" in line], "vLLM's warnings are in the log file"


async def test_chat_answers_and_explains_itself(fleet: RunningFleet):
    body: dict[str, Any] = {"model": fleet.model, "max_tokens": 24, "temperature": 0}

    def ask(tries: int) -> Any:
        body["messages"] = [{"role": "user", "content": asked_anew(10 * tries)}]
        return fleet.http.post("/v1/chat/completions", json=body).json()

    answer, line = fleet.asked_remotely(ask)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert line["exposed_ms"] >= 0
    assert line["prefill_worker"] == "worker-0" and line["decode_worker"] == "worker-1" and line["attempts"] == 1
    # Asked again it is short where it was decoded: its KV is there.
    async with fleet.client() as client:
        again = await client.post("/v1/chat/completions", json=body)
    assert again.json()["choices"] == answer["choices"]
    request_id = again.headers["x-request-id"]
    line = fleet.until(lambda: [x for x in fleet.request_lines() if x["id"] == request_id], "its log line")[0]
    assert (line["decision"], line["reason"]) == ("local", "short_prompt"), line
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert line["cached_tokens"] == cached > 0


async def test_streaming_logprobs_structured_output_and_responses_work_over_two_engines(fleet: RunningFleet):
    """vLLM's own endpoints, each on a prompt long enough to be prefilled remotely."""
    before = fleet.metric("pd_placements_total", decision="remote")

    def body_of(number: int, **more):
        messages = [{"role": "user", "content": asked_anew(number)}]
        return {"model": fleet.model, "messages": messages, "max_tokens": 8, "temperature": 0, **more}

    async with fleet.client() as client:
        pieces = []
        async with client.stream("POST", "/v1/chat/completions", json=body_of(1, stream=True)) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    pieces += [c["delta"].get("content") or "" for c in json.loads(line[6:])["choices"]]
        assert "Paris" in "".join(pieces)
        answer = (await client.post("/v1/chat/completions", json=body_of(2, logprobs=True, top_logprobs=2))).json()
        assert len(answer["choices"][0]["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
        choice = {"structured_outputs": {"choice": ["Berlin", "Madrid"]}}
        answer = (await client.post("/v1/chat/completions", json=body_of(3, **choice))).json()
        assert answer["choices"][0]["message"]["content"] in ("Berlin", "Madrid")
        answer = await client.post(
            "/v1/responses",
            json={"model": fleet.model, "input": asked_anew(4), "max_output_tokens": 12, "temperature": 0},
        )
        assert answer.status_code == 200 and "Paris" in answer.text
    assert fleet.metric("pd_placements_total", decision="remote") == before + 4
