"""What stands in place of vLLM's engine-core client offers what vLLM's server may call there."""

import ast
import asyncio
import inspect
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support_redis import worker

from orchestrator.config.access import LimitsConfig, SecurityConfig
from orchestrator.fleet.control_calls import CallFailed, Unanswered
from orchestrator.fleet.view import Fleet
from orchestrator.frontend.access import Access
from orchestrator.frontend.edge import EdgeMiddleware
from orchestrator.router.request import Batch
from orchestrator.types import WorkerLoad
from orchestrator.wire.control import METHODS, REFUSED

pytestmark = pytest.mark.vllm


def core(**parts: Any) -> Any:
    from orchestrator.frontend.engine import FleetCore

    given = {"router": None, "fleet": Fleet("f"), "calls": None, "pause": None} | parts
    return FleetCore(SimpleNamespace(**given), ("generate",))


def test_every_method_that_vllms_server_calls_has_a_row() -> None:
    from vllm.v1.engine import async_llm, core_client

    tree = ast.parse(inspect.getsource(async_llm))
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute | ast.Name)
        and getattr(node.value, "attr", getattr(node.value, "id", "")) == "engine_core"
    }
    assert len(called) > 30
    offered = {name for name, _ in inspect.getmembers(core_client.AsyncMPClient, inspect.iscoroutinefunction)}
    named = called | {name for name in offered if name.endswith("_async") and "call_utility" not in name}
    fleet_core = core()
    assert [name for name in sorted(named) if not hasattr(fleet_core, name)] == []
    engines = {name.removesuffix("_async") for name in offered}
    assert METHODS.keys() - {"set_pause", "fingerprint_lora"} <= engines
    assert METHODS.keys().isdisjoint(REFUSED)


@pytest.mark.parametrize("method", sorted(REFUSED))
async def test_unsupported_method_is_refused_with_501(method: str) -> None:
    from vllm.exceptions import GracefulHTTPError

    with pytest.raises(GracefulHTTPError, match=f"{method} is not supported over a fleet") as refused:
        await getattr(core(), f"{method}_async")("x", mode="abort")
    assert refused.value.http_status == 501


@pytest.mark.parametrize("method", ["pause_scheduler", "resume_scheduler", "add_lora", "reset_prefix_cache"])
async def test_a_call_that_workers_do_not_answer_is_refused_with_503(method: str) -> None:
    from orchestrator.frontend.engine import FleetRefused

    async def unanswered(*_: Any) -> None:
        raise Unanswered("worker w1: it is gone")

    async def failed(*_: Any) -> None:
        raise CallFailed("worker w1: rank 64 is too large")

    for how, kind in ((unanswered, FleetRefused), (failed, CallFailed)):
        pause, calls = SimpleNamespace(begin=how, end=how), SimpleNamespace(call=how)
        with pytest.raises(kind, match="worker w1") as refused:
            await getattr(core(pause=pause, calls=calls), f"{method}_async")()
        assert getattr(refused.value, "http_status", None) == (503 if how is unanswered else None)


def test_no_other_method_is_offered() -> None:
    with pytest.raises(AttributeError):
        core().shutdown_everything_async  # noqa: B018


async def test_what_was_aborted_while_the_fleet_was_paused_does_not_begin_when_the_pause_ends() -> None:
    fleet, submitted = Fleet("f"), list[str]()

    async def submit(request: Any) -> None:
        submitted.append(request.request_id)

    fleet.pause.ended.clear()
    fleet_core = core(fleet=fleet, router=SimpleNamespace(submit=submit))
    states = {"kept", "aborted"}
    fleet_core.is_wanted = states.__contains__
    adding = [fleet_core.add_request_async(SimpleNamespace(request_id=name)) for name in ("aborted", "kept")]
    waiting = asyncio.gather(*adding)
    await asyncio.sleep(0)
    states.remove("aborted")
    fleet.pause.ended.set()
    await waiting
    assert submitted == ["kept"]


async def test_a_stream_that_the_fleet_cannot_serve_is_answered_with_400() -> None:
    """vLLM's server has begun to answer with 200 when the router reads the request."""
    from vllm.exceptions import VLLMValidationError

    async def submit(request: Any) -> None:
        raise VLLMValidationError("x-slo-class: no class 'bulk'")

    fleet_core = core(router=SimpleNamespace(submit=submit))
    fleet_core.is_wanted = lambda _: True

    async def app(scope: Any, receive: Any, send: Any) -> None:
        event_stream = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": event_stream})
        with pytest.raises(VLLMValidationError):
            await fleet_core.add_request_async(SimpleNamespace(request_id="r"))
        await send({"type": "http.response.body", "body": b"data: an error"})

    edge = EdgeMiddleware(app, 1000, Access(SecurityConfig(), LimitsConfig()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(edge), base_url="http://test") as client:
        answer = await client.post("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "x-slo-class: no class 'bulk'")


async def test_what_a_request_makes_in_the_background_is_limited() -> None:
    from orchestrator.frontend.engine import _counted

    go_on, tasks = asyncio.Event(), list[asyncio.Task[None]]()

    async def make() -> None:
        async with _counted(1):
            await go_on.wait()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        tasks.append(asyncio.create_task(make()))
        await asyncio.sleep(0)  # vLLM's server too answers in a later turn of the loop
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"queued"})

    edge = EdgeMiddleware(app, 1000, Access(SecurityConfig(), LimitsConfig(concurrent_per_key=2)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(edge), base_url="http://test") as client:
        assert [(await client.post("/v1/responses")).status_code for _ in range(3)] == [200, 200, 429]
        go_on.set()
        await asyncio.gather(*tasks)
        assert (await client.post("/v1/responses")).status_code == 200
        await asyncio.gather(*tasks)


async def test_many_prompts_and_choices_of_one_request_hold_up_nobody() -> None:
    """They come in one turn of the event loop, in which no other stream would get a token."""
    turns, submitted = 0, list[int]()

    async def submit(request: Any) -> None:
        time.sleep(0.002)  # noqa: ASYNC251 - as the router's work does, it holds up the loop
        submitted.append(turns)

    fleet_core = core(router=SimpleNamespace(submit=submit))
    fleet_core.is_wanted = lambda _: True

    async def prompt() -> None:
        for _ in range(4):  # choices
            await fleet_core.add_request_async(SimpleNamespace(request_id="r"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.gather(*(prompt() for _ in range(25)))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    streams = asyncio.create_task(others())
    edge = EdgeMiddleware(app, 1000, Access(SecurityConfig(), LimitsConfig()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(edge), base_url="http://test") as client:
        assert (await client.post("/v1/completions")).status_code == 200
    streams.cancel()
    assert len(submitted) == 100
    assert max(Counter(submitted).values()) < 20


async def test_few_prompts_of_one_request_cost_anything_before_those_ahead_have_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM makes all choices of a prompt before the first is placed: of 1,024 prompts with `n: 128` a gigabyte."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from orchestrator.frontend import edge
    from orchestrator.frontend.engine import FleetLLM

    made, placed = 0, asyncio.Event()

    async def add_request(llm: AsyncLLM, *_: Any) -> None:
        nonlocal made
        made += 1
        await placed.wait()

    monkeypatch.setattr(AsyncLLM, "add_request", add_request)
    llm = FleetLLM.__new__(FleetLLM)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asking = asyncio.gather(*(llm.add_request(str(number)) for number in range(200)))
        await asyncio.sleep(0.1)
        ahead = made
        placed.set()
        await asking
        assert edge.current.get() is not None and 1 < ahead < 100 < made == 200
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    served = EdgeMiddleware(app, 1000, Access(SecurityConfig(), LimitsConfig()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://test") as client:
        assert (await client.post("/v1/completions")).status_code == 200


async def test_load_is_reported_after_last_output() -> None:
    """A request that is aborted puts nothing out any more; vLLM's gauges must not show it as running for ever."""
    fleet, batches = Fleet("f"), asyncio.Queue[Batch]()
    fleet.upsert(worker("w"), 0.0)
    fleet_core = core(fleet=fleet, router=SimpleNamespace(batches=batches))
    fleet.take_load(WorkerLoad("w", 1, 100, 90, running=1, waiting=0, waiting_tokens=0, step_ms=1.0), 0.0)
    batches.put_nowait(Batch(["output"], 1.0))
    told = await fleet_core.get_output_async()
    assert told.outputs == ["output"] and told.scheduler_stats.num_running_reqs == 1
    fleet.take_load(WorkerLoad("w", 2, 100, 100, running=0, waiting=0, waiting_tokens=0, step_ms=1.0), 0.0)
    told = await fleet_core.get_output_async()
    assert told.outputs == [] and (told.scheduler_stats.num_running_reqs, told.scheduler_stats.kv_cache_usage) == (0, 0)
    again = asyncio.create_task(fleet_core.get_output_async())  # says nothing twice
    done, _ = await asyncio.wait({again}, timeout=2)
    assert not done
    batches.put_nowait(Batch(["last"], 2.0))
    assert (await again).outputs == ["last"]


async def test_outputs_that_have_come_are_taken_together() -> None:
    """Also those that came while nothing was there and somebody waited."""
    from vllm.v1.engine import EngineCoreOutput

    batches = asyncio.Queue[Batch]()
    fleet_core = core(fleet=Fleet("f"), router=SimpleNamespace(batches=batches))

    def come(*tokens: int) -> None:
        for token in tokens:
            batches.put_nowait(Batch([EngineCoreOutput("a", [token])], float(token)))

    async def taken() -> list[tuple[list[int], float]]:
        told = await fleet_core.get_output_async()
        return [(output.new_token_ids, told.timestamp) for output in told.outputs]

    come(1)
    assert await taken() == [([1], 1.0)]
    come(2, 3, 4)
    assert await taken() == [([2, 3, 4], 4.0)]
    waits = asyncio.create_task(taken())
    await asyncio.sleep(0.01)
    come(5, 6)
    assert await waits == [([5, 6], 6.0)]
