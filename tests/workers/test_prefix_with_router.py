"""Prefix caches of simulated workers as real routers see them: found, followed, lost and found again."""

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
    return client.connection.prefixes.index.look_up(prefix_keys(prompt, 16)).blocks(worker.id)


def believes_all(client: RouterClient, *workers: LocalWorker) -> bool:
    """Exactly what they hold."""
    index = client.connection.prefixes.index
    for worker in workers:
        kv, bit = worker.engine._scheduler.kv, index.bits.get(worker.id)
        keys = {key for key in (*kv._refs, *kv._cached) if kv.holds(key)}
        believed = {key for key, holders in index._holders.items() if bit is not None and holders >> bit & 1}
        if believed != keys:
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
