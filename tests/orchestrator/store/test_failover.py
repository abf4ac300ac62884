"""Sentinels and clusters of real servers: the primary is found, followed under load, and gets the functions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from support_redis import fresh_namespace, job
from support_servers import TIMEOUT_S, Node, Start, free_port, nodes, watched_pair
from support_steering import set_desired
from support_wait import until

from orchestrator.store.client import Redis, RedisAway, connect
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Registry

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with nodes(tmp_path) as begin:
        yield begin


@pytest.fixture
async def connected(start: Start) -> AsyncIterator[Callable[..., Awaitable[Redis]]]:
    clients = []

    async def connected(url: str, timeout_s: float = TIMEOUT_S) -> Redis:
        clients.append(await connect(url, timeout_s))
        return clients[-1]

    yield connected
    for client in clients:
        await client.aclose()


async def ask(node: Node, *command: object) -> object:
    async with await node.client() as client:
        return await client.execute_command(*command)


class Load:
    """Frontends that enqueue and a worker that claims and acknowledges, all of which ask again while Redis is away."""

    def __init__(self, redis: Redis) -> None:
        self.namespace = fresh_namespace()
        self.queue = PrefillQueue(redis, self.namespace)
        self.registry = Registry(redis, self.namespace)
        self.done: set[str] = set()
        self.errors = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._enqueue(number)) for number in range(8)] + [
            asyncio.create_task(self._work())
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        broken = [result for result in results if not isinstance(result, asyncio.CancelledError)]
        assert not broken, broken

    async def more(self, jobs: int) -> None:
        wanted = len(self.done) + jobs

        async def reached() -> bool:
            return len(self.done) >= wanted

        await until(reached, f"{jobs} more jobs are done")

    async def _enqueue(self, client: int) -> None:
        number = 0
        while True:
            number += 1
            request_id = f"{client}-{number}"
            while request_id not in self.done:  # a client that waits asks again: its job may have been lost
                try:
                    await self.queue.enqueue(job(request_id))
                except RedisAway:
                    self.errors += 1
                await asyncio.sleep(0.01)

    async def _work(self) -> None:
        while True:
            with contextlib.suppress(RedisAway):
                claims, _ = await self.queue.claim("w", 10_000, 16, window=0, claimer="idle")
                for claim in claims:
                    await self.queue.ack("w", claim.job.request_id, claim.job.attempt)
                    self.done.add(claim.job.request_id)
            await asyncio.sleep(0.005)


async def assert_told(events: AsyncIterator[object]) -> None:
    """That the subscription is new: nobody changes anything."""
    await anext(events)


async def test_the_primary_that_sentinels_name_is_followed(start, connected):
    primary, replica, sentinel = await watched_pair(start)
    nobody = f"127.0.0.1:{free_port()}"
    redis = await connected(f"redis+sentinel://{nobody},{sentinel.address}/fleet", 1.0)
    load = Load(redis)
    events = load.registry.watch()
    await assert_told(events)
    async with load.running():
        await load.more(50)
        assert load.errors == 0
        primary.kill()
        await load.more(50)
    await assert_told(events)
    await events.aclose()
    await set_desired(load.registry, 1, 2, "after")
    there = await replica.client()
    assert (await Registry(there, load.namespace).desired()).decode == 2
    await there.aclose()


@pytest.fixture
async def cluster(start) -> list[Node]:
    """A primary with all slots, and its replica."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
    primary, replica = start(*options), start(*options)
    await ask(primary, "CLUSTER ADDSLOTSRANGE", 0, 16383)
    await ask(replica, "CLUSTER MEET", "127.0.0.1", primary.port)
    primary_id = (await ask(primary, "CLUSTER MYID")).decode()

    async def replicates() -> bool:
        with contextlib.suppress(RedisAway):
            await ask(replica, "CLUSTER REPLICATE", primary_id)
        info = await ask(replica, "INFO", "replication")
        state = info if isinstance(info, dict) else {}
        return state.get("master_link_status") == "up"

    await until(replicates, "the replica is in step")
    return [primary, replica]


async def test_a_move_within_a_cluster_is_followed_without_an_error(cluster, connected):
    primary, replica = cluster
    # The replica is asked first, and names the primary.
    redis = await connected(f"redis+cluster://{replica.address},{primary.address}")
    load = Load(redis)
    async with load.running():
        await load.more(50)
        await ask(replica, "CLUSTER FAILOVER")

        async def promoted() -> bool:
            return (await ask(replica, "INFO", "replication"))["role"] == "master"

        await until(promoted, "the replica is the primary")
        await load.more(50)
        assert load.errors == 0, "a client noticed"
    assert await ask(replica, "FUNCTION LIST"), "the functions are on the new primary"


async def test_while_its_slot_migrates_redis_is_away_and_afterwards_nothing_is_lost(start, connected, cluster):
    """The old node sends who asks for a key that it has not to the new one (ASK), which has a part of the keys only.
    A function that followed would find half a queue, and leave keys there that the migration would stumble over."""
    old, _ = cluster
    new = start("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
    await ask(new, "CLUSTER MEET", "127.0.0.1", old.port)
    old_id, new_id = [(await ask(node, "CLUSTER MYID")).decode() for node in (old, new)]
    redis = await connected(f"redis+cluster://{old.address}")
    load = Load(redis)
    slot = await ask(old, "CLUSTER KEYSLOT", f"{{{load.namespace}}}")

    async def met() -> bool:
        known = str(await ask(new, "CLUSTER NODES")), str(await ask(old, "CLUSTER NODES"))
        return old_id in known[0] and new_id in known[1] and (await ask(new, "CLUSTER INFO"))["cluster_state"] == "ok"

    async def keys(node: Node) -> int:
        return int(await ask(node, "CLUSTER COUNTKEYSINSLOT", slot))

    await until(met, "the nodes have met")
    await set_desired(load.registry, 1, 2, "before")
    async with load.running():
        await load.more(50)
        await ask(new, "CLUSTER SETSLOT", slot, "IMPORTING", old_id)
        await ask(old, "CLUSTER SETSLOT", slot, "MIGRATING", new_id)
        errors = load.errors

        async def away() -> bool:
            return load.errors > errors + 20

        await until(away, "Redis is away for those who ask")
        assert await keys(new) == 0, "nothing was done where the keys are not yet"
        while there := await ask(old, "CLUSTER GETKEYSINSLOT", slot, 100):
            await ask(old, "MIGRATE", "127.0.0.1", new.port, "", 0, 1000, "KEYS", *there)
        for node in (new, old):
            await ask(node, "CLUSTER SETSLOT", slot, "NODE", new_id)
        await load.more(50)
    assert await keys(new) > 0 and await keys(old) == 0
    assert (await load.registry.desired()).decode == 2


async def test_a_cluster_whose_primary_dies_is_followed(cluster, connected):
    primary, replica = cluster
    redis = await connected(f"redis+cluster://{primary.address},{replica.address}")
    load = Load(redis)
    events = load.registry.watch()
    await assert_told(events)
    async with load.running():
        await load.more(50)
        primary.kill()
        await ask(replica, "CLUSTER FAILOVER", "TAKEOVER")  # two nodes have no majority to vote
        await load.more(50)
    await assert_told(events)
    await events.aclose()


async def test_waiting_worker_is_woken_after_move(cluster, connected):
    """One worker for each job: the queue counts who has heard it, and a node counts its own listeners only."""
    primary, replica = cluster
    redis = await connected(f"redis+cluster://{replica.address},{primary.address}")
    queue = PrefillQueue(redis, fresh_namespace(), "w")
    await queue.wait_for_work(10)  # ended by its new subscription
    began, within_s = time.monotonic(), 50.0
    waiting = asyncio.create_task(queue.wait_for_work(within_s))

    async def heard() -> bool:
        ((_, listeners),) = await ask(primary, "PUBSUB NUMSUB", queue.keys.wake("w"))
        return listeners == 1 == await redis.zcard(f"{queue.keys.prefix}waiters")

    await until(heard, "the worker listens at the node that has the queue, and waits")
    await queue.enqueue(job("a"))
    await waiting
    assert time.monotonic() - began < within_s, "it was told"
    await queue.aclose()


async def test_one_address_of_a_cluster_leads_to_the_others(cluster, connected):
    primary, replica = cluster
    redis = await connected(f"redis://{replica.address}", TIMEOUT_S)
    assert await PrefillQueue(redis, fresh_namespace()).depth()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+sentinel://h:1", "the service's name is missing"),
        ("redis+cluster://,h:1", "expected HOST:PORT"),
        ("redis+magic://h:1", "expected redis://"),
        ("embedded", "expected redis://"),
        ("redis+sentinel://u:secret@h:port/s", "expected a port from 1 to 65535"),
    ],
)
async def test_invalid_url_is_refused_by_part(url, why):
    with pytest.raises(RedisAway, match=why) as caught:
        await connect(url, 1.0)
    assert "secret" not in str(caught.value)
