"""What the Redis tests share: a real server of their own, jobs, and checks that nothing is left behind."""

import asyncio
import contextlib
import os
import uuid
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

from support_info import worker_info
from support_servers import free_port

from orchestrator.launch.host import redis_server
from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.store.client import Redis
from orchestrator.store.documents import Document
from orchestrator.store.keys import Keys
from orchestrator.store.queue import Claim, PrefillQueue
from orchestrator.types import KVEndpoint, PrefillJob, Role, WorkerInfo

# PD_TEST_REDIS_SERVER=/usr/bin/redis-server runs these tests against another server.
if _other := os.environ.get("PD_TEST_REDIS_SERVER"):
    redis_server.server_binary = lambda: _other


class RedisOnPort(EmbeddedRedis):
    """One that others than this user reach, at a port that is free."""

    async def start(self, run_dir: Path, at: str | int = 0) -> str:
        return await super().start(run_dir, at or free_port())


class Server:
    """The embedded server for synchronous fixtures; the same port after a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._embedded = RedisOnPort()
        self.start()

    @property
    def url(self) -> str:
        return self._embedded.url

    @property
    def pid(self) -> int | None:
        return self._embedded.pid

    def start(self) -> None:
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        _finish(self._embedded.start(self._folder, port))

    def stop(self) -> None:
        _finish(self._embedded.stop())


def _finish(work: Awaitable[object]) -> None:
    """Run to its end here, also under a running loop: the server's few waits are short."""

    async def main() -> None:
        await work

    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        asyncio.run(main())
    finally:
        asyncio._set_running_loop(running)


@contextlib.contextmanager
def running_server(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    try:
        yield server
    finally:
        server.stop()


async def lose(document: Document[Any]) -> None:
    """As a Redis that was restarted."""
    await document._redis.delete(document._key)


def fresh_namespace() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


def job(
    request_id: str,
    tokens: int = 100,
    attempt: int = 1,
    reply_to: str = "f1",
    body: bytes = b"b",
    delay_s: float = 0.0,
) -> PrefillJob:
    return PrefillJob(request_id, attempt, tokens, tokens, 0.0, reply_to, body, delay_s=delay_s)


async def claim_head(queue: PrefillQueue, worker_id: str, max_tokens: int, max_jobs: int) -> list[Claim]:
    """What an idle worker claims that knows of no prefix: the head of the queue, in order."""
    claims, choice = await queue.claim(worker_id, max_tokens, max_jobs, window=0, claimer="idle")
    assert not choice
    return claims


async def dropped(redis: Redis, queue: PrefillQueue) -> dict[str, int]:
    """Jobs that were dropped, by why, as a person with redis-cli reads them."""
    counts = await redis.hgetall(f"{queue.keys.prefix}dropped")
    return {why.decode(): int(number) for why, number in counts.items()}


async def expire_lease(redis: Redis, queue: PrefillQueue, *request_ids: str) -> None:
    """Let leases have run out, without waiting for it."""
    for request_id in request_ids:
        assert await redis.zscore(queue.keys.leases, request_id) is not None, f"{request_id} is not claimed"
        await redis.zadd(queue.keys.leases, {request_id: 1.0})


async def make_old(redis: Redis, queue: PrefillQueue, *request_ids: str) -> None:
    """Let jobs have arrived long ago, so that a missing frontend counts."""
    for request_id in request_ids:
        await redis.hset(queue.keys.job(request_id), "arrived_at", "1000.0")


async def keys_of(redis: Redis, namespace: str) -> set[str]:
    prefix = Keys(namespace).prefix
    return {key.decode().removeprefix(prefix) async for key in redis.scan_iter(match=f"{prefix}*", count=1000)}


async def assert_no_leaks(redis: Redis, namespace: str) -> None:
    """Nothing of any job is left: what stays is the fleet and the statistics."""
    fleet = {"affine", "dropped", "waiters", "waits_until", "workers", "frontends", "desired", "sweep_cursor", "noted"}
    keys = await keys_of(redis, namespace) - fleet
    left = {key for key in keys if not key.startswith(("worker:", "frontend:"))}
    assert not left, f"left in Redis: {sorted(left)}"


def worker(worker_id: str, role: Role = Role.PREFILL, **changes: object) -> WorkerInfo:
    """As it registers itself."""
    told = {
        "model": "demo",
        "host": "127.0.0.1",
        "pid": 1234,
        "request_address": "tcp://127.0.0.1:5000",
        "load_address": "tcp://127.0.0.1:5001",
        "kv": KVEndpoint(f"engine-{worker_id}", "127.0.0.1", 5002, tp_size=2),
        "blocks_total": 512,
        "supported_tasks": ("generate", "embed"),
    }
    return worker_info(worker_id, role, **told | changes)
