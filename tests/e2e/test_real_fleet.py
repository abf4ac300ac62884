"""The main job on real vLLM engines: KV moves over NIXL, tokens are those of one engine, faults cost nobody an answer.

float32 throughout, so that no difference can be put down to rounding.
"""

import asyncio
import json
import os
import signal
import time

import psutil
import pytest
from support_client import Answer
from support_fleet import START_TIMEOUT_S, RunningFleet, descendants, running_fleet, token_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

# A random model on one core each: block 32, so that prefixes hit often, and room for all prompts at once.
ENGINE = (
    "workers.engine_args.dtype=float32",
    "workers.engine_args.block_size=32",
    "workers.engine_args.kv_cache_memory_bytes=402653184",
)
LENGTHS = [10, 33, 64, 127, 128, 129, 200, 333, 400, 512, 513, 700, 900, 1024, 1300, 2600]
PROMPTS = [token_prompt(length, seed=i) for i, length in enumerate(LENGTHS)]
OTHERS = [token_prompt(length, seed=100 + i) for i, length in enumerate(LENGTHS)]  # no prefix of them is known
MAX_TOKENS = 16
SEEDED = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
TRIP = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
    "required": ["city", "days"],
}
# What agents ask for: each token depends on those before it by more than the model.
BOUND = [
    {"structured_outputs": {"json": TRIP}},
    {"structured_outputs": {"regex": "([a-f]{4}-[0-9]{6} )+"}},
    {"structured_outputs": {"grammar": 'root ::= "SELECT " name (", " name)* \nname ::= [a-z]+'}, **SEEDED},
    {"structured_outputs": {"json": TRIP}, "presence_penalty": 1.0, **SEEDED},
    {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    {"frequency_penalty": 2.0, "min_tokens": 300, **SEEDED},
]
BOUND_TOKENS = 400


def prompt_usage(fleet: RunningFleet) -> list[dict]:
    """What chat, Responses and Anthropic's Messages say of prompts asked for the first and for the second time."""
    usage = []
    for turn, stream in enumerate((False, True)):
        text = f"{turn} " + "count these words please " * 60
        chat = {"model": fleet.model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        for _ in range(2):
            if stream:
                body = chat | {"stream": True, "stream_options": {"include_usage": True}}
                events = fleet.http.post("/v1/chat/completions", json=body).text.split("\n\n")
                usage.append(json.loads(events[-3].removeprefix("data: "))["usage"])
            else:
                usage.append(fleet.http.post("/v1/chat/completions", json=chat).json()["usage"])
    responses = {"model": fleet.model, "input": "respond " * 200, "max_output_tokens": 4}
    usage += [fleet.http.post("/v1/responses", json=responses).json()["usage"] for _ in range(2)]
    messages = {"model": fleet.model, "messages": [{"role": "user", "content": "message " * 200}], "max_tokens": 4}
    usage += [fleet.http.post("/v1/messages", json=messages).json()["usage"] for _ in range(2)]
    return usage


async def ask_bound(fleet: RunningFleet) -> list[Answer]:
    async with fleet.client() as client:
        return await asyncio.gather(*(fleet.ask(client, PROMPTS[7], BOUND_TOKENS, **asked) for asked in BOUND))


def reused(usage: dict) -> int:
    """Prompt tokens that are in the prefix cache after the answer, found there or put there."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    return sum(count for name, count in details.items() if "cache" in name and isinstance(count, int))


@pytest.fixture(scope="module")
def aggregated(model):
    """Greedy and (to the others) seeded answers, usage and bound answers of decode workers only: prompts are prefilled
    where they decode."""
    with running_fleet("aggregated-cpu.yaml", *ENGINE, f"model={model}", "workers.decode.replicas=1") as fleet:
        greedy = asyncio.run(fleet.ask_all(PROMPTS, concurrency=8, max_tokens=MAX_TOKENS))
        seeded = asyncio.run(fleet.ask_all(OTHERS, concurrency=8, max_tokens=MAX_TOKENS, **SEEDED))
        for answer in greedy + seeded:
            assert answer.ok and len(answer.tokens) == MAX_TOKENS, answer.error
        bound = asyncio.run(ask_bound(fleet))
        assert fleet.metric("pd_placements_total", decision="remote") == 0
        usage = prompt_usage(fleet)
        fleet.assert_no_leaks()
    return [answer.tokens for answer in greedy], [answer.tokens for answer in seeded], usage, bound


@pytest.fixture(scope="module")
def truth(aggregated):
    return aggregated[0]


@pytest.fixture(scope="module")
def fleet(model, truth):
    routing = ("routing.remote_prefill_min_tokens=32", "routing.first_token=prefill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for /pause
        with running_fleet("demo-1p1d-cpu.yaml", *ENGINE, f"model={model}", *routing) as running:
            yield running


@pytest.fixture(autouse=True)
def nothing_leaks(fleet):
    yield
    fleet.assert_no_leaks()


async def test_remote_prefill_answers_as_one_engine_does_with_and_without_prefix_hits(fleet: RunningFleet, truth):
    cold = await fleet.ask_all(PROMPTS, concurrency=8, max_tokens=MAX_TOKENS)
    assert [a.error for a in cold if not a.ok] == []
    remote = fleet.metric("pd_placements_total", decision="remote")
    assert remote >= len(PROMPTS) - 1
    warm = await fleet.ask_all(PROMPTS, concurrency=8, max_tokens=MAX_TOKENS)
    assert [a.tokens for a in cold] == truth
    assert [a.tokens for a in warm] == truth
    # Transferred KV is not a prefix-cache hit: the first time round nothing is reported as cached.
    assert sum((a.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for a in cold) == 0
    fleet.until(lambda: fleet.metric("pd_kv_transfer_bytes_total") > 0, "a load report tells of the bytes")
    assert fleet.metric("pd_kv_transfer_descriptors_total") > 0
    assert fleet.metric("pd_kv_bad_messages_total") == 0
    assert fleet.metric("pd_retries_total") == 0


def test_a_fleet_on_one_machine_listens_on_loopback_only(fleet: RunningFleet):
    family = descendants(fleet.process.pid)
    ports = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN and each.pid in family]
    engines = {pid for pid in family if "EngineCore" in " ".join(psutil.Process(pid).cmdline())}
    assert len(engines) == 2 and engines <= {each.pid for each in ports}  # by UCX
    assert {each.laddr.ip for each in ports} == {"127.0.0.1"}


async def test_first_tokens_come_from_prefill_once_and_are_those_of_one_engine(fleet: RunningFleet, aggregated):
    early = fleet.metric("pd_first_tokens_early_total")
    assert early > 0  # of the greedy ones above
    answers = await fleet.ask_all(OTHERS, concurrency=8, max_tokens=MAX_TOKENS, **SEEDED)
    assert [a.tokens for a in answers] == aggregated[1]
    assert fleet.metric("pd_first_tokens_early_total") > early
    (answer,) = await fleet.ask_all([token_prompt(700, seed=99)], concurrency=1, max_tokens=MAX_TOKENS, logprobs=2)
    assert len(answer.tokens) == len(answer.logprobs) == MAX_TOKENS
    assert fleet.metric("pd_first_token_mismatches_total") == 0
    assert fleet.metric("pd_retries_total") == 0


async def test_usage_equals_that_of_one_engine(fleet: RunningFleet, aggregated):
    remote = fleet.metric("pd_placements_total", decision="remote")
    usage = prompt_usage(fleet)
    assert fleet.metric("pd_placements_total", decision="remote") == remote + 4, "decode has those that are asked again"
    assert usage[0]["prompt_tokens_details"]["created_cache_tokens"] > 200
    assert usage[::2] == aggregated[2][::2]  # asked for the first time
    # Of hits the decode engine knows nothing: it counts them as created when it answers before the prefill worker has
    # told of them, which an overloaded machine makes it do.
    assert [reused(said) for said in usage[1::2]] == [reused(said) for said in aggregated[2][1::2]]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_fleet_that_was_paused_answers_as_before(fleet: RunningFleet, truth, mode):
    async with fleet.client() as client:
        running = [asyncio.create_task(fleet.ask(client, prompt, MAX_TOKENS)) for prompt in PROMPTS[8:]]
        await asyncio.sleep(0.1)
        assert (await client.post("/pause", params={"mode": mode})).json() == {"status": "paused"}
        held = asyncio.create_task(fleet.ask(client, PROMPTS[3], MAX_TOKENS))
        if mode != "keep":
            await asyncio.gather(*running)
        await asyncio.sleep(1)
        assert not held.done() and (await client.get("/is_paused")).json() == {"is_paused": True}
        assert (await client.post("/resume")).json() == {"status": "resumed"}
        assert (await held).tokens == truth[3]
        for answer, right in zip(await asyncio.gather(*running), truth[8:], strict=True):
            assert answer.ok, answer.error
            assert answer.tokens == (right[: len(answer.tokens)] if mode == "abort" else right)


async def test_killing_the_only_prefill_worker_under_load_fails_nobody(fleet: RunningFleet, truth):
    prompts = PROMPTS[3:14]
    victim = fleet.workers("prefill")[0]["pid"]
    before = fleet.metric("pd_placements_total", reason="no_prefill_worker")
    async with fleet.under_load(prompts, concurrency=4, max_tokens=MAX_TOKENS) as answers:
        await asyncio.sleep(3)
        os.kill(victim, signal.SIGKILL)
        await fleet.soon(
            lambda: fleet.metric("pd_placements_total", reason="no_prefill_worker") > before, "requests go local"
        )
        await fleet.soon(lambda: fleet.shape() == (1, 1), "it came back by itself", START_TIMEOUT_S)
    assert [a.error for a in answers if not a.ok] == []
    assert all(a.tokens == truth[PROMPTS.index(a.prompt)] for a in answers)
    assert fleet.metric("pd_retries_total", why="claim_timeout") == 0  # what was queued went local at once


async def test_roles_change_in_place_and_both_engines_serve_both(fleet: RunningFleet, truth):
    first, second = fleet.workers("prefill")[0], fleet.workers("decode")[0]
    fleet.cli("role", first["id"], "decode")
    fleet.until(lambda: fleet.shape() == (0, 2), "two decode workers")
    started = time.monotonic()
    fleet.cli("role", second["id"], "prefill")
    fleet.until(lambda: fleet.shape() == (1, 1), "roles swapped")
    swapped_s = time.monotonic() - started
    assert fleet.workers("prefill")[0]["pid"] == second["pid"], "the same process has the other role"
    before = fleet.metric("pd_placements_total", decision="remote")
    answers = await fleet.ask_all(PROMPTS[8:], concurrency=4, max_tokens=MAX_TOKENS)
    assert [a.tokens for a in answers] == truth[8:]
    assert fleet.metric("pd_placements_total", decision="remote") > before
    print(f"role change of an idle worker, command included: {swapped_s:.2f} s")


async def test_the_only_decode_worker_is_killed_and_bound_answers_end_as_those_of_one_engine(
    fleet: RunningFleet, aggregated
):
    """The prefill worker takes its role meanwhile, or it is back before that."""
    (victim,) = fleet.workers("decode")
    lost, tokens = (fleet.metric(name) for name in ("pd_retries_total", "vllm:generation_tokens_total"))
    ended = fleet.metric("pd_requests_total", outcome="finished")
    asking = asyncio.create_task(ask_bound(fleet))
    begun = tokens + 20 * len(BOUND)
    await fleet.soon(lambda: fleet.metric("vllm:generation_tokens_total") >= begun, "a part of the answers")
    os.kill(victim["pid"], signal.SIGKILL)
    ended = fleet.metric("pd_requests_total", outcome="finished") - ended  # before: no worker is left to end another
    answers = await asking
    assert [answer.error for answer in answers if not answer.ok] == []
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in aggregated[3]]
    assert [answer.text for answer in answers] == [answer.text for answer in aggregated[3]]
    assert ended < len(BOUND) and fleet.metric("pd_retries_total") >= lost + len(BOUND) - ended
    fleet.until(lambda: fleet.shape() == (1, 1), "it came back by itself", START_TIMEOUT_S)


async def test_clients_that_disconnect_free_both_sides(fleet: RunningFleet):
    before = fleet.metric("pd_requests_total", outcome="aborted")
    async with fleet.client() as client:
        # Answers long enough that none has ended when all six hold blocks on the decode worker.
        tasks = [asyncio.create_task(fleet.ask(client, token_prompt(1500, 100 + i), 2000)) for i in range(6)]
        (decode,) = fleet.workers("decode")
        await fleet.soon(
            lambda: fleet.metric("pd_worker_requests", worker=decode["id"], state="running") == 6, "six decoding"
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    fleet.until(lambda: fleet.metric("pd_requests_total", outcome="aborted") == before + 6, "six aborted")
