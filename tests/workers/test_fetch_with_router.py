"""Prefixes fetched from other workers' caches, between simulated workers under real routers."""

import asyncio
import itertools
import signal
from typing import Any

import msgspec
import pytest
from support_router import RouterClient, SimRouterCodec
from support_wait import until
from support_workers import LocalWorker, WorkerProcess, Workers, running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.policy.prefix_keys import prefix_keys
from orchestrator.store.fields import Departed
from orchestrator.types import FinishReason, KVEndpoint, KVSource, PrefillJob, Role
from orchestrator.wire.messages import Fetch, Prefix, Submit
from workers.engine import EngineInfo, EngineRequest, Group, InvalidEngineRequest
from workers.prefills import LATE_FETCHES, Fetches
from workers.sim.codec import WireOutput
from workers.sim.engine import SimEngine

SECTIONS: dict[str, Any] = {
    "sim": {"prefill_us_per_token": 400.0, "speed": 1.0},
    "kv": {"fetch": "auto", "transfer_timeout_s": 3.0},
    "routing": {"remote_prefill_min_tokens": 100},
}
PROMPT = list(range(1000, 1800))  # 50 blocks
PREFIX_TOKENS = 800


def turn(number: int) -> list[int]:
    """What was said, and 160 new tokens: too many to compute where it decodes."""
    return [*PROMPT, *range(5000 + 200 * number, 5160 + 200 * number)]


async def joined(workers: Workers, decode: int, prefill: int = 1) -> RouterClient:
    return await workers.router(prefill, decode)


def counts(client: RouterClient, worker: LocalWorker) -> tuple[dict[str, int], int]:
    load = client.connection.fleet.workers[worker.id].load
    return (load.fetches, load.fetched_tokens) if load is not None else ({}, 0)


async def forget(client: RouterClient, worker: LocalWorker) -> None:
    """Its cache is empty, and the router knows. What is on its way by an answer comes before the reset."""
    await worker.engine.call("reset_prefix_cache", [], {})
    worker.agent._prefix.cleared()
    await until(lambda: held(client, worker.id) == 0, f"{worker.id} holds nothing")


def held(client: RouterClient, worker_id: str) -> int:
    return client.connection.prefixes.index.look_up(prefix_keys(PROMPT, 16)).blocks(worker_id)


async def holding(client: RouterClient, prefill: LocalWorker, decode: LocalWorker | WorkerProcess) -> None:
    """The decode worker has the prompt cached, the prefill worker does not."""
    await client.ask(PROMPT, 4)
    await until(lambda: held(client, decode.id) == held(client, prefill.id) == 50, "the events of both")
    await forget(client, prefill)


async def test_a_prefill_worker_fetches_what_a_decode_worker_holds(workers: Workers) -> None:
    prefill, decode = await workers.start(Role.PREFILL), await workers.start(Role.DECODE)
    watcher = await workers.frontend(prefill, decode)
    client = await joined(workers, 1)
    await holding(client, prefill, decode)
    stats: list[Any] = []
    output, complete = prefill.agent._prefills.output, stats.append

    def seen(attempt: Any, given: Any, *more: Any) -> None:
        complete(given.prefill_stats)
        output(attempt, given, *more)

    prefill.agent._prefills.output = seen  # type: ignore[method-assign]
    await client.ask(turn(0), 4)
    await until(lambda: counts(client, prefill) == ({"fetched": 1}, PREFIX_TOKENS), "the fetch is counted")
    assert [it.num_cached_tokens for it in stats] == [PREFIX_TOKENS], "the rest alone was computed"
    await client.ask(turn(1), 4)
    assert counts(client, prefill) == ({"fetched": 1}, PREFIX_TOKENS), "it has it by now"
    assert watcher.loads


async def test_a_decode_worker_that_prefills_fetches_too(redis_server: EmbeddedRedis) -> None:
    sections = SECTIONS | {"routing": SECTIONS["routing"] | {"decode_choice": "round_robin"}}
    async with running_workers(redis_server, **sections) as workers:
        decodes = [await workers.start(Role.DECODE) for _ in range(2)]
        watcher = await workers.frontend(*decodes)
        client = await joined(workers, 2, prefill=0)
        await client.ask(PROMPT, 4)
        await until(lambda: any(held(client, worker.id) == 50 for worker in decodes), "its events")
        (asker,) = (worker for worker in decodes if not held(client, worker.id))
        numbers = itertools.count()

        async def fetches() -> bool:
            await client.ask(turn(next(numbers)), 4)  # by either worker
            if held(client, asker.id) and not counts(client, asker)[1]:
                await forget(client, asker)  # it did not wait for an answer that was late, and computed
            return counts(client, asker)[1] > 0

        await until(fetches, "a fetch")
        fetched, tokens = counts(client, asker)
        assert tokens == fetched["fetched"] * PREFIX_TOKENS
        assert watcher.loads


async def test_what_is_fetched_for_a_prompt_says_its_own_frontend_alone(workers: Workers) -> None:
    prefill, decode, own = await workers.pair()
    other = await workers.frontend(prefill, decode)
    request = own.new(turn(0), 4)
    claimed = await own.claimed(request, cached={PrefillJob.LENT: PREFIX_TOKENS})
    assert claimed.cached_tokens == 0, "it waits for an answer"
    key = claimed.kv_source.key
    other.transport.send(prefill.id, Fetch(key, Prefix(KVSource(decode.info.kv, f"{key}~"), PREFIX_TOKENS)))
    await own.finished(request)
    await until(lambda: own.loads[prefill.id].waiting == own.loads[prefill.id].running == 0, "a report")
    assert own.loads[prefill.id].fetches == {}


async def test_what_nobody_lends_is_computed_unless_it_was_aborted(workers: Workers) -> None:
    asker, holder = await workers.start(Role.DECODE), await workers.start(Role.DECODE)
    frontend = await workers.frontend(asker, holder)
    aborted, waits = frontend.new(turn(0), 4), frontend.new(turn(1), 4)
    for sequence, request in enumerate((aborted, waits), 1):
        prefix = Prefix(KVSource(holder.info.kv, f"{request.id}#1~"), PREFIX_TOKENS)
        submit = Submit(request.id, 1, sequence, len(request.prompt), prefix=prefix)
        assert frontend.transport.send(asker.id, submit, frontend.frames(request))
    await until(lambda: len(asker.engine._scheduler.requests) == 2, "both fetch")
    frontend.abort(asker.id, aborted)
    await frontend.finished(waits)
    await until(lambda: frontend.loads[asker.id].fetches == {"late": 2}, "both are counted")
    assert not aborted.tokens and f"{aborted.id}#1" not in asker.engine._scheduler.requests


async def test_nobody_waits_for_a_holder_from_which_nothing_comes_in_time_again_and_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall that drops: each prompt whose beginning it has would wait for up to two seconds."""
    asker, tried = await workers.start(Role.DECODE), list[str]()
    fetches, ends = asker.agent._prefills.fetches, asyncio.Event()

    async def take(request: EngineRequest) -> None:
        if request.key == "silent-1~":
            raise InvalidEngineRequest("this engine does not take it, which says nothing of the holder")
        tried.append(request.key)
        if ends.is_set():
            fetches.take(WireOutput(request.key, [1], finish_reason=FinishReason.LENGTH))

    async def fetch(holder: str, number: int) -> None:
        source = KVSource(KVEndpoint(holder, "127.0.0.1", 1), f"{holder}-{number}~")
        await fetches.fetch(Prefix(source, 16), [])

    monkeypatch.setattr(asker.engine, "submit", take)
    monkeypatch.setattr("workers.prefills.wait_limit_s", lambda tokens, s_per_token: 0.01)
    for number in range(LATE_FETCHES + 2):
        await fetch("silent", number)
    assert tried == [f"silent-{number}~" for number in range(LATE_FETCHES + 1) if number != 1]
    await fetch("another", 0)
    assert tried[-1] == "another-0~"
    ends.set()
    await fetch("another", 1)
    load = asker.agent._load
    assert load.rests_from() == ["silent"], "and not of another, of which one in a row was late"
    frontend = await workers.frontend(asker)
    await until(lambda: frontend.loads[asker.id].rests_from == ["silent"], "frontends hear of it")
    await asker.agent._peer_died(Departed("w", "silent", "tcp://127.0.0.1:1", "127.0.0.1", 1, claims=False))
    await fetch("silent", 9)
    assert tried[-1] == "silent-9~"


async def test_nothing_is_asked_for_while_it_is_off(redis_server: EmbeddedRedis) -> None:
    async with running_workers(redis_server, **SECTIONS | {"kv": {"fetch": "off"}}) as workers:
        prefill, decode = await workers.start(Role.PREFILL), await workers.start(Role.DECODE)
        client = await joined(workers, 1)
        await holding(client, prefill, decode)
        await client.ask(turn(0), 4)
        assert counts(client, prefill) == ({}, 0)


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the prefills whose worker asks what it can fetch, and waits for the answer."""
    asked: list[str] = []
    answered = Fetches.answered

    async def noted(fetches: Fetches, key: str) -> Prefix | None:
        asked.append(key)
        return await answered(fetches, key)

    monkeypatch.setattr(Fetches, "answered", noted)
    return asked


@pytest.mark.parametrize("lends", [{Role.PREFILL}, {Role.DECODE}], ids=["holder cannot", "asker cannot"])
async def test_an_engine_whose_kv_goes_whole_neither_asks_nor_is_asked(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, questions: list[str], lends: set[Role]
) -> None:
    start = SimEngine.start

    async def started(engine: SimEngine, group: Group) -> EngineInfo:
        return msgspec.structs.replace(await start(engine, group), lends=role in lends)

    monkeypatch.setattr(SimEngine, "start", started)
    async with running_workers(redis_server, **SECTIONS) as workers:
        role = Role.PREFILL
        prefill = await workers.start(role)
        role = Role.DECODE
        decode = await workers.start(role)
        client = await joined(workers, 1)
        await holding(client, prefill, decode)
        await client.ask(turn(0), 4)
        assert not questions and counts(client, prefill) == ({}, 0)
        await client.close()


async def test_nobody_asks_for_the_prefix_of_a_prompt_with_media(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, questions: list[str]
) -> None:
    prefill, decode = await workers.start(Role.PREFILL), await workers.start(Role.DECODE)
    client = await joined(workers, 1)
    await holding(client, prefill, decode)
    read = SimRouterCodec.read

    def with_media(codec: SimRouterCodec, *arguments: Any) -> Any:
        parsed = read(codec, *arguments)
        return msgspec.structs.replace(parsed, has_media=True)

    monkeypatch.setattr(SimRouterCodec, "read", with_media)
    await client.ask(turn(0), 4)
    assert not questions and counts(client, prefill) == ({}, 0)
    monkeypatch.setattr(SimRouterCodec, "read", read)
    await forget(client, prefill)
    await client.ask(turn(1), 4)
    assert questions, "of another prompt it does"
    await client.close()


@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
async def test_a_holder_that_fails_while_it_is_asked_costs_a_bounded_wait(
    redis_server: EmbeddedRedis, then: signal.Signals
) -> None:
    """And no request, and no block."""
    async with running_workers(redis_server, **SECTIONS | {"workers": {"timeout_s": 5.0}}) as workers:
        prefill, holder = await workers.start(Role.PREFILL), await workers.spawn(Role.DECODE)
        watcher = await workers.frontend(prefill)
        client = await joined(workers, 1)
        await holding(client, prefill, holder)
        other = await workers.start(Role.DECODE)
        await until(lambda: client.connection.fleet.ready(Role.DECODE) == 2, "another decode worker")
        holder.kill(signal.SIGSTOP)
        asking = asyncio.create_task(client.ask(turn(0), 4))
        await until(lambda: any(key.endswith("~") for key in prefill.engine._scheduler.requests), "it is asked")
        if then is signal.SIGKILL:
            holder.kill(then)
        await asking
        if then is signal.SIGCONT:
            holder.kill(then)
        await until(lambda: counts(client, prefill)[0], "the fetch is counted")
        assert counts(client, prefill)[0].keys() <= {"late", "missed"}
        for number in range(1, 4):
            await client.ask(turn(number), 4)
        assert watcher.loads and other


async def test_a_lost_prefix_is_computed(workers: Workers) -> None:
    prefill, decode = await workers.start(Role.PREFILL), await workers.start(Role.DECODE)
    client = await joined(workers, 1)
    await holding(client, prefill, decode)
    decode.engine._scheduler.kv.clear()  # and nobody is told
    await client.ask(turn(0), 4)
    await until(lambda: set(counts(client, prefill)[0]) & {"missed", "late"}, "the miss is counted")
    assert counts(client, prefill)[1] == 0


async def test_a_frontend_that_does_not_answer_is_not_waited_for(workers: Workers) -> None:
    prefill, decode, frontend = await workers.pair()
    request = frontend.new(PROMPT, 4)
    claimed = await frontend.claimed(request, cached={PrefillJob.LENT: PREFIX_TOKENS, prefill.id: 0})
    assert claimed.cached_tokens == 0, "it asks what to fetch"
    await frontend.finished(request)
    few = frontend.new(turn(1), 4)
    claimed = await frontend.claimed(few, cached={PrefillJob.LENT: 32})
    assert claimed.cached_tokens is None, "32 tokens are not worth asking"
    await frontend.finished(few)
