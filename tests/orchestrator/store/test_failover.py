"""Sentinels and clusters of real servers: the primary is found, followed under load, and gets the functions."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support_redis import eventually, fresh_namespace, job, queue_config

from orchestrator.launch.host.redis_server import server_binary
from orchestrator.store.client import Redis, RedisAway, connect
from orchestrator.store.events import Resync
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Registry

pytestmark = pytest.mark.slow
TIMEOUT_S = 5.0
BUS_OFFSET = 10_000  # from a cluster node's port to that of its bus


class Node:
    """One server process, on a port of its own."""

    def __init__(self, folder: Path, *arguments: str, config: str | None = None) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        own = folder / str(self.port)
        own.mkdir()
        command = [server_binary()]
        if config is not None:
            (own / "node.conf").write_text(config)
            command.append(str(own / "node.conf"))
        command += [*arguments, "--port", str(self.port), "--dir", str(own), "--save", ""]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, cwd=own)

    async def client(self) -> Redis:
        async def connected() -> Redis | None:
            with contextlib.suppress(RedisAway):
                return await connect(f"redis://{self.address}", TIMEOUT_S)
            return None

        client = await eventually(connected, f"{self.address} answers")
        assert client is not None
        return client

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port + BUS_OFFSET < 65536:
            return port


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Node]]:
    started: list[Node] = []

    def begin(*arguments: str, config: str | None = None) -> Node:
        started.append(Node(tmp_path, *arguments, config=config))
        return started[-1]

    yield begin  # type: ignore[misc]
    for node in started:
        node.kill()


async def ask(node: Node, *command: object) -> object:
    client = await node.client()
    try:
        return await client.execute_command(*command)
    finally:
        await client.aclose()


class Load:
    """Frontends that enqueue and a worker that claims and acknowledges, all of which ask again while Redis is away."""

    def __init__(self, redis: Redis) -> None:
        self.namespace = fresh_namespace()
        self.queue = PrefillQueue(redis, self.namespace, queue_config())
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

        await eventually(reached, f"{jobs} more jobs are done")

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
                claims, _ = await self.queue.claim("w", 10_000, 16, window=0, idle=True)
                for claim in claims:
                    await self.queue.ack("w", claim.job.request_id, claim.job.attempt)
                    self.done.add(claim.job.request_id)
            await asyncio.sleep(0.005)


async def assert_resynced(events: AsyncIterator[object]) -> None:
    async with asyncio.timeout(15):
        while not isinstance(await anext(events), Resync):
            pass


async def test_the_primary_that_sentinels_name_is_followed(start):
    primary = start()
    replica = start("--replicaof", "127.0.0.1", str(primary.port))
    sentinel = start(
        "--sentinel",
        config=f"sentinel monitor fleet 127.0.0.1 {primary.port} 1\n"
        "sentinel down-after-milliseconds fleet 300\nsentinel failover-timeout fleet 3000\n",
    )

    async def linked() -> bool:
        return b"slave0:" in await raw_info(sentinel) or b"slaves=1" in await raw_info(sentinel)

    await eventually(linked, "the Sentinel knows the replica")
    nobody = f"127.0.0.1:{free_port()}"
    redis = await connect(f"redis+sentinel://{nobody},{sentinel.address}/fleet", 1.0)
    load = Load(redis)
    events = load.registry.watch()
    try:
        await assert_resynced(events)
        async with load.running():
            await load.more(50)
            assert load.errors == 0
            primary.kill()
            await load.more(50)
        await load.registry.set_desired(1, 2, "after")
        await assert_resynced(events)
        there = await replica.client()
        assert (await Registry(there, load.namespace).desired()).decode == 2
        await there.aclose()
    finally:
        await events.aclose()
        await redis.aclose()


async def raw_info(node: Node) -> bytes:
    """Of a Sentinel, which refuses what a client asks of servers."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(b"INFO sentinel\r\n")
        head = await reader.readline()
        text = await reader.readexactly(int(head[1:])) if head.startswith(b"$") else head
        writer.close()
        return text
    return b""


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

    await eventually(replicates, "the replica is in step")
    return [primary, replica]


async def test_a_move_within_a_cluster_is_followed_without_an_error(cluster):
    primary, replica = cluster
    # The replica is asked first, and names the primary.
    redis = await connect(f"redis+cluster://{replica.address},{primary.address}", TIMEOUT_S)
    load = Load(redis)
    try:
        async with load.running():
            await load.more(50)
            await ask(replica, "CLUSTER FAILOVER")

            async def promoted() -> bool:
                return (await ask(replica, "INFO", "replication"))["role"] == "master"

            await eventually(promoted, "the replica is the primary")
            await load.more(50)
            assert load.errors == 0, "a client noticed"
        assert await ask(replica, "FUNCTION LIST"), "the functions are on the new primary"
    finally:
        await redis.aclose()


async def test_a_cluster_whose_primary_dies_is_followed(cluster):
    primary, replica = cluster
    redis = await connect(f"redis+cluster://{primary.address},{replica.address}", TIMEOUT_S)
    load = Load(redis)
    events = load.registry.watch()
    try:
        await assert_resynced(events)
        async with load.running():
            await load.more(50)
            primary.kill()
            await ask(replica, "CLUSTER FAILOVER", "TAKEOVER")  # two nodes have no majority to vote
            await load.more(50)
        await assert_resynced(events)
    finally:
        await events.aclose()
        await redis.aclose()


async def test_one_address_of_a_cluster_leads_to_the_others(cluster):
    primary, replica = cluster
    redis = await connect(f"redis://{replica.address}", TIMEOUT_S)
    try:
        assert await PrefillQueue(redis, fresh_namespace(), queue_config()).depth()
    finally:
        await redis.aclose()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+sentinel://h:1", "the service's name is missing"),
        ("redis+cluster://,h:1", "is no HOST:PORT"),
        ("redis+magic://h:1", "is no scheme"),
        ("redis+sentinel://u:secret@h:port/s", "Port could not be cast"),
    ],
)
async def test_a_url_that_means_no_server_is_refused_by_its_part(url, why):
    with pytest.raises(RedisAway, match=why) as caught:
        await connect(url, 1.0)
    assert "secret" not in str(caught.value)
