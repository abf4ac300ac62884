"""Control calls over a real mesh: a fleet answers as one engine, all or none."""

import asyncio
import gc
from typing import Any

import msgspec
import pytest
from support_router import RouterClient
from support_wait import until
from support_workers import LocalWorker, Workers, running_workers

from orchestrator.fleet import control_calls
from orchestrator.fleet.control_calls import CallFailed, Unanswered
from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.policy.prefix_keys import reusable_keys
from orchestrator.types import PauseState, Role
from orchestrator.wire.messages import Call
from workers import serving
from workers.engine import EngineDead

SECTIONS = {"routing": {"remote_prefill_min_tokens": 100, "first_token": "prefill"}}


class Adapter(msgspec.Struct, array_like=True):
    """As vLLM's LoRARequest goes over the wire, which this test does without."""

    lora_name: str
    lora_int_id: int


async def fleet(workers: Workers) -> tuple[list[RouterClient], LocalWorker, LocalWorker]:
    prefill, decode = await workers.start(Role.PREFILL), await workers.start(Role.DECODE)
    return [await workers.router(prefill=1, decode=1) for _ in range(2)], prefill, decode


def answering(worker: LocalWorker, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> list[tuple[str, list, dict]]:
    """The worker's engine answers these calls, or raises them; the calls it got are returned."""
    calls = []

    async def call(method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        calls.append((method, args, kwargs))
        if isinstance(answers[method], Exception):
            raise answers[method]
        return answers[method]

    monkeypatch.setattr(worker.engine, "call", call)
    return calls


async def test_arguments_by_name_reach_every_worker_and_answers_are_combined(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (client, other), prefill, decode = await fleet(workers)
    first = answering(prefill, monkeypatch, profile=None, list_loras=[1, 2], reset_prefix_cache=True)
    second = answering(decode, monkeypatch, profile=None, list_loras=[2, 3], reset_prefix_cache=False)
    calls = client.connection.calls
    await calls.call("profile", [True], {"profile_prefix": "p"})
    assert first == second == [("profile", [True], {"profile_prefix": "p"})]
    assert await calls.call("list_loras", []) == {2}
    assert await calls.call("reset_prefix_cache", []) is False


async def test_failed_call_is_undone_on_other_workers(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (client, other), prefill, decode = await fleet(workers)
    broken = RuntimeError("no such adapter")
    first = answering(prefill, monkeypatch, add_lora=broken, remove_lora=broken)
    second = answering(decode, monkeypatch, add_lora=True, remove_lora=True)
    with pytest.raises(CallFailed, match=f"add_lora: worker {prefill.id}: .*no such adapter.*{decode.id}"):
        await client.connection.calls.call("add_lora", [Adapter("a", 7)])
    assert [call[0] for call in second] == ["add_lora", "remove_lora"] and second[1][1] == [7]
    assert [call[0] for call in first] == ["add_lora", "remove_lora"]  # it may have failed late
    with pytest.raises(CallFailed, match="no such adapter"):  # on both: there is nothing to undo
        monkeypatch.setattr(decode.engine, "call", prefill.engine.call)
        await client.connection.calls.call("add_lora", [Adapter("a", 7)])
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_workers_that_must_agree_are_named_when_they_differ(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (client, other), prefill, decode = await fleet(workers)
    answering(prefill, monkeypatch, fingerprint_lora="one")
    answering(decode, monkeypatch, fingerprint_lora="two")
    with pytest.raises(CallFailed, match=f"workers differ: .*'two' on {decode.id}"):
        await client.connection.adapters.identify("x", "/a")
    answering(decode, monkeypatch, fingerprint_lora="one")
    found = await client.connection.adapters.identify("x", "/a")
    assert found == await other.connection.adapters.identify("x", "/a")


async def test_a_worker_whose_engine_dies_meanwhile_fails_no_load(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves, and its successor gets the adapter with the first request for it."""
    (client, other), prefill, decode = await fleet(workers)
    dead = answering(prefill, monkeypatch, add_lora=EngineDead("the engine of m has ended"))
    answering(decode, monkeypatch, add_lora=True)
    calls = client.connection.calls
    loading = asyncio.create_task(calls.call("add_lora", [Adapter("x", 7)]))
    await until(lambda: dead)
    await asyncio.sleep(0.1)
    assert not loading.done()
    calls.worker_lost(prefill.id)
    assert await loading is True


@pytest.mark.parametrize("how", ["hangs", "tells"])
async def test_a_call_to_a_worker_whose_engine_dies_is_answered_while_redis_is_away(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nobody hears from the registry that the worker leaves. This frontend has no request there."""
    (client, other), prefill, decode = await fleet(workers)
    monkeypatch.setattr(client.connection.membership, "_on_lost", lambda *_: None)
    asked = asyncio.Event()

    async def unanswered(*_: Any) -> None:
        asked.set()
        if how == "tells":
            raise EngineDead("the engine of m has ended")
        await asyncio.Event().wait()

    monkeypatch.setattr(prefill.engine, "call", unanswered)
    answering(decode, monkeypatch, add_lora=True)
    loading = asyncio.create_task(client.connection.calls.call("add_lora", [Adapter("x", 7)]))
    await asked.wait()
    await prefill.engine.stop()
    assert await loading is True


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [(None, None, Unanswered), (None, RuntimeError("rank 64"), CallFailed), (None, True, Unanswered)],
)
async def test_a_call_that_nobody_has_failed_is_told_from_one_that_an_engine_has(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, first: Any, second: Any, kind: type[CallFailed]
) -> None:
    """None: it does not answer."""
    (client, other), *both = await fleet(workers)
    monkeypatch.setattr(control_calls, "CALL_TIMEOUT_S", 1.0)  # of taking it back

    async def silent(*_: Any) -> None:
        await asyncio.Event().wait()

    for worker, answer in zip(both, (first, second), strict=True):
        if answer is None:
            monkeypatch.setattr(worker.engine, "call", silent)
        else:
            answering(worker, monkeypatch, add_lora=answer, remove_lora=True)
    with pytest.raises(CallFailed, match=r"no answer within 1 s") as raised:
        await client.connection.calls.call("add_lora", [Adapter("x", 7)], timeout_s=1.0)
    assert type(raised.value) is kind


async def test_an_engine_that_does_not_answer_has_not_failed(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker waits for it a little less long than the frontend, whose client may ask again."""
    monkeypatch.setattr(serving, "CALL_TIMEOUT_S", 0.2)
    (client, other), prefill, decode = await fleet(workers)

    async def silent(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(decode.engine, "call", silent)
    with pytest.raises(Unanswered, match="no answer within 1 s"):
        await client.connection.calls.call("reset_prefix_cache", [], timeout_s=1.0)


async def test_worker_refuses_unknown_method(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, frontend = await workers.served(Role.DECODE)
    calls = answering(worker, monkeypatch)
    frontend.transport.send(worker.id, Call(1, "shutdown"))
    await until(lambda: frontend.replies)
    assert frontend.replies[0].error == "shutdown: not a control method" and calls == []


@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_a_fleet_is_paused_as_one_engine_for_every_frontend(redis_server: EmbeddedRedis, mode: str) -> None:
    async with running_workers(redis_server, sim={"speed": 1.0}, **SECTIONS) as workers:
        (client, other), prefill, decode = await fleet(workers)
        tokens = 50 if mode == "wait" else 1000  # that none ends before the pause comes, on a busy machine too
        asked = [asyncio.create_task(c.ask([i, *range(300 * i)], tokens)) for i, c in enumerate((client, other))]
        await until(lambda: client.connection.router.requests and other.connection.router.requests, "both asked")
        await client.connection.pause.begin(mode, clear_cache=False)
        assert client.connection.pause.active
        await until(lambda: other.connection.pause.active, "the other frontend knows")
        paused = await client.connection.calls.call("is_scheduler_paused", [])
        assert paused is True
        if mode == "wait":
            assert all(task.done() for task in asked)
        else:
            assert not any(task.done() for task in asked)
        await other.connection.pause.end()
        await asyncio.gather(*asked)
        await client.ask([9, *range(300)], 5)
        assert not client.connection.pause.active


async def engine_paused(worker: LocalWorker) -> bool:
    return bool(await worker.engine.call("is_scheduler_paused", [], {}))


async def test_joining_worker_is_paused_and_resumed(redis_server: EmbeddedRedis) -> None:
    """Also when nobody is left of those who were told: neither the frontend that was asked, nor a worker."""
    async with running_workers(redis_server, sim={"speed": 1.0}, **SECTIONS) as workers:
        (client, other), *first = await fleet(workers)
        known = other.connection.fleet
        await client.connection.pause.begin("keep", clear_cache=False)
        await until(lambda: other.connection.pause.active, "the other frontend knows")
        await client.close()
        joined = await workers.start(Role.DECODE)
        await until(lambda: engine_paused(joined))
        for worker in first:
            worker.agent.request_stop(5.0)
            await worker.stopped()
        await until(lambda: list(known.workers) == [joined.id], "the first ones are gone")
        assert other.connection.pause.active
        last = await workers.start(Role.DECODE)
        await until(lambda: last.id in known.workers and known.workers[last.id].connected, "the last has joined")
        await until(lambda: engine_paused(last))
        await other.connection.pause.end()
        assert not other.connection.pause.active
        assert not await engine_paused(joined) and not await engine_paused(last)
        await asyncio.gather(*(other.ask([i, 2, 3], 5) for i in range(8)))
        later = await workers.start(Role.DECODE)
        await until(lambda: later.id in known.workers and known.workers[later.id].connected, "one more has joined")
        assert not other.connection.pause.active and not await engine_paused(later)


@pytest.mark.parametrize("pausing", [True, False])
async def test_lost_worker_does_not_block_pause(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, pausing: bool
) -> None:
    (client, other), _prefill, decode = await fleet(workers)
    pause, calls, asked = client.connection.pause, client.connection.calls, asyncio.Event()
    if not pausing:
        await pause.begin("wait", clear_cache=False)

    async def silent(*_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(decode.engine, "call", silent)
    changing = asyncio.create_task(pause.begin("wait", clear_cache=False) if pausing else pause.end())
    await asked.wait()
    known = client.connection.fleet.workers[decode.id]
    known.note_connected(False)
    calls.worker_lost(decode.id)
    await changing
    assert pause.active is pausing
    with pytest.raises(CallFailed, match=f"{decode.id}: it is gone"):  # nobody tells it that later
        known.note_connected(True)
        calling = asyncio.create_task(calls.call("reset_prefix_cache", []))
        await asyncio.sleep(0.1)
        calls.worker_lost(decode.id)
        await calling


@pytest.mark.parametrize(("method", "args"), [("fingerprint_lora", ["x", "/a"]), ("add_lora", [Adapter("a", 7)])])
async def test_an_adapter_is_loaded_though_a_worker_is_lost_meanwhile(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, method: str, args: list[Any]
) -> None:
    """The one that is asked first. It gets the adapter with the first request that needs it."""
    (client, other), prefill, decode = await fleet(workers)
    calls, asked = client.connection.calls, asyncio.Event()
    first = next(worker for worker in (prefill, decode) if worker.id == next(iter(client.connection.fleet.workers)))

    async def silent(*_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    for worker in (prefill, decode):
        answering(worker, monkeypatch, **{method: True})
    monkeypatch.setattr(first.engine, "call", silent)
    calling = asyncio.create_task(calls.call(method, args))
    await asked.wait()
    calls.worker_lost(first.id)
    assert await calling is True


async def test_late_pause_call_is_ignored(workers: Workers) -> None:
    (client, other), prefill, decode = await fleet(workers)
    await client.connection.pause.begin("wait", clear_cache=False)
    paused = client.connection.fleet.pause.state
    await other.connection.pause.end()
    client.connection.calls.tell(decode.id, "set_pause", list(msgspec.structs.astuple(paused)))
    assert await client.connection.calls.call("is_scheduler_paused", []) is False  # the same way, so after it
    await client.ask([9, *range(300)], 5)


async def test_simultaneous_pause_is_refused(workers: Workers) -> None:
    clients, *_ = await fleet(workers)
    begun = [c.connection.pause.begin(mode, False) for c, mode in zip(clients, ("keep", "wait"), strict=True)]
    errors = [error for error in await asyncio.gather(*begun, return_exceptions=True) if error]
    assert all(isinstance(error, CallFailed) and "ask again" in str(error) for error in errors), errors
    assert len(errors) < 2 and all(client.connection.pause.active for client in clients)
    await clients[0].connection.pause.end()
    await until(lambda: not any(client.connection.pause.active for client in clients), "nobody is paused")
    await clients[1].ask([1, 2, 3], 5)


async def test_a_pause_clears_prefix_caches_and_frontends_know(workers: Workers) -> None:
    (client, other), prefill, decode = await fleet(workers)
    prompt = [7, *range(300)]
    keys = reusable_keys(prompt, workers.simulated(Role.DECODE).block_size)
    await client.ask(prompt, 5)

    def known_blocks() -> int:
        hits = other.connection.prefixes.index.look_up(keys)
        return hits.blocks(prefill.id) + hits.blocks(decode.id)

    await until(known_blocks, "the other frontend knows what is cached")
    await client.connection.pause.begin("wait", clear_cache=True)
    await until(lambda: not known_blocks(), "it knows that nothing is")
    await client.connection.pause.end()


async def test_a_pause_that_fails_pauses_nobody(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    (client, other), prefill, decode = await fleet(workers)
    broken = RuntimeError("cannot")
    answering(prefill, monkeypatch, pause_scheduler=broken, resume_scheduler=None)
    with pytest.raises(CallFailed, match=f"set_pause: worker {prefill.id}: .*cannot"):
        await client.connection.pause.begin("abort", clear_cache=True)
    await until(lambda: not client.connection.pause.active and not other.connection.pause.active, "nobody is paused")
    await client.ask([1, 2, 3], 5)  # the decode worker's engine runs


async def test_a_pause_that_has_failed_fails_whoever_asks_for_it_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a frontend does that may have lost the first answer."""
    (client, other), prefill, decode = await fleet(workers)
    answering(prefill, monkeypatch, pause_scheduler=RuntimeError("cannot"))
    state = list(msgspec.structs.astuple(PauseState(1, "keep", True)))
    for _ in range(2):
        with pytest.raises(CallFailed, match=f"set_pause: worker {prefill.id}: .*cannot"):
            await client.connection.calls.call("set_pause", state)


async def test_start_up_calls_wait_for_worker(workers: Workers) -> None:
    client = await workers.router()
    waiting = asyncio.create_task(client.connection.worker_connected())
    with pytest.raises(CallFailed, match="no worker is connected"):
        await client.connection.calls.call("reset_prefix_cache", [])
    assert not waiting.done()
    await workers.start(Role.DECODE)
    await waiting
    assert await client.connection.calls.call("reset_prefix_cache", []) is True
