"""Prefix caches of simulated workers as real routers see them: found, followed, lost and found again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support_bench import counted
from support_router import RouterClient
from support_wait import until
from support_workers import LocalWorker, Workers, running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.policy.prefix_keys import prefix_keys
from orchestrator.types import PrefixEvents, Role, WorkerLoad
from orchestrator.wire.transport import WorkerTransport

SECTIONS = {
    "sim": {"speed": 10.0},
    "workers": {"timeout_s": 2.0},
    "routing": {"remote_prefill_min_tokens": 100},
}
PROMPT = list(range(1000, 1400))  # 25 blocks


@asynccontextmanager
async def fleet_of(
    server: EmbeddedRedis, prefill: int = 1, decode: int = 2
) -> AsyncIterator[tuple[Workers, RouterClient, list[LocalWorker]]]:
    async with running_workers(server, **SECTIONS) as workers:
        roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
        started = [await workers.start(role) for role in roles]
        yield workers, await workers.router(prefill, decode), started


def placed(reason: str) -> float:
    decision = "remote" if reason == "long_prompt" else "local"
    return counted("pd_placements", decision=decision, reason=reason)


def held(client: RouterClient, worker: LocalWorker, prompt: list[int] = PROMPT) -> int:
    return client.connection.prefixes.look_up(prefix_keys(prompt, 16)).blocks(worker.id)


def believes_all(client: RouterClient, *workers: LocalWorker) -> bool:
    """Exactly what they hold."""
    index = client.connection.prefixes.index
    for worker in workers:
        keys, bit = worker.engine._scheduler.cache._keys, index.bits.get(worker.id)
        believed = {key for key, holders in index._holders.items() if bit is not None and holders >> bit & 1}
        if believed != set(keys):
            return False
    return True


async def test_repeated_prompt_goes_to_its_prefix(redis_server: EmbeddedRedis) -> None:
    async with fleet_of(redis_server) as (_, client, (prefill, *decodes)):
        long, short = placed("long_prompt"), placed("short_prompt")
        await client.ask(PROMPT, 4)
        assert placed("long_prompt") == long + 1
        (holder,) = await until(
            lambda: [w for w in decodes if held(client, w) == 25], "the events of its decode worker"
        )
        await until(lambda: held(client, prefill) == 25, "the events of its prefill worker")
        other = next(worker for worker in decodes if worker is not holder)
        for number in range(5):
            await client.ask([*PROMPT, number], 4)
        assert placed("short_prompt") == short + 5
        assert held(client, other) == 0
        # What only the prefill worker has is no reason to prefill locally, but spares computing it.
        await holder.engine.call("reset_prefix_cache", [], {})
        for number in range(100):  # it is told with the holder's next step, and others may go to the other worker
            await client.ask([number] * 20, 1)
            if held(client, holder) == 0:
                break
        assert held(client, holder) == 0
        before = counted("pd_prefix_hit_tokens", side="prefill")
        await client.ask([*PROMPT, 7, 8, 9], 4)
        assert placed("long_prompt") == long + 2
        assert counted("pd_prefix_hit_tokens", side="prefill") == before + 400


async def test_lost_events_are_noticed_and_resynced(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, loses = WorkerTransport.publish, set[str]()

    def publish_or_lose(transport: WorkerTransport, message: WorkerLoad | PrefixEvents) -> None:
        if isinstance(message, WorkerLoad) or message.worker_id not in loses:
            publish(transport, message)

    monkeypatch.setattr(WorkerTransport, "publish", publish_or_lose)
    async with fleet_of(redis_server) as (_, client, started):
        prefill = started[0]
        await client.ask(PROMPT, 4)
        await until(lambda: believes_all(client, *started), "all events")
        resyncs = counted("pd_prefix_resyncs")
        loses.add(prefill.id)
        await client.ask([1, *PROMPT], 4)
        loses.clear()
        await until(lambda: believes_all(client, *started), "what a lost batch said")
        assert counted("pd_prefix_resyncs") > resyncs
        await client.ask([2, *PROMPT], 4)
        await until(lambda: believes_all(client, *started), "that events count again")


async def test_a_frontend_that_joins_late_learns_what_is_there(redis_server: EmbeddedRedis) -> None:
    async with fleet_of(redis_server) as (workers, client, started):
        for number in range(4):
            await client.ask([number, *PROMPT], 4)
        await until(lambda: believes_all(client, *started), "all events")
        late = await workers.router(prefill=1, decode=2)
        await until(lambda: believes_all(late, *started), "the snapshots")
        short = placed("short_prompt")
        await late.ask([3, *PROMPT], 4)
        assert placed("short_prompt") == short + 1


async def test_departed_worker_holds_no_prefix(redis_server: EmbeddedRedis) -> None:
    async with fleet_of(redis_server, prefill=0, decode=1) as (workers, client, (first,)):
        process = await workers.spawn(Role.DECODE)
        await until(lambda: client.connection.fleet.ready(Role.DECODE) == 2, "the greeting")
        for number in range(6):
            await client.ask([number, *PROMPT], 4)
        index = client.connection.prefixes.index
        await until(lambda: {process.id, first.id} <= index.bits.keys(), "events of both")
        await until(lambda: believes_all(client, first), "all events")
        process.kill()
        await until(lambda: process.id not in client.connection.fleet.workers, "that it is gone")
        assert process.id not in index.bits
        for number in range(6):
            await client.ask([number, *PROMPT], 4)
        await until(lambda: believes_all(client, first), "the events since")


async def test_a_reset_is_known_before_the_next_step(redis_server: EmbeddedRedis) -> None:
    async with fleet_of(redis_server) as (_, client, started):
        await client.ask(PROMPT, 4)
        await until(lambda: believes_all(client, *started) and not client.connection.prefixes.empty, "all events")
        await client.connection.calls.call("reset_prefix_cache", [])
        await until(
            lambda: not list(client.connection.prefixes.look_up(prefix_keys(PROMPT, 16)).longest()), "the reset"
        )
        long = placed("long_prompt")
        await client.ask(PROMPT, 4)
        assert placed("long_prompt") == long + 1


async def test_engines_without_caches_report_nothing(redis_server: EmbeddedRedis) -> None:
    async with running_workers(redis_server, **SECTIONS) as workers:
        decode, frontend = await workers.served(Role.DECODE, prefix_caching=False)
        client = await workers.router(decode=1)
        await client.ask(PROMPT, 4)
        await client.ask(PROMPT, 4)
        assert frontend.prefix_events == [] and client.connection.prefixes.empty
