"""A real Redis that is filled until it refuses, under real workers and the real router."""

import asyncio
import itertools
import signal

import pytest
from support_bench import counted
from support_redis import job
from support_wait import until
from support_workers import Workers, running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.store.client import RedisAway
from orchestrator.types import Role

pytestmark = pytest.mark.slow

BODY_BYTES, ROOM_BYTES = 64 << 10, 6 << 20
TIMEOUT_S = 3.0


async def fill(workers: Workers) -> int:
    """Jobs of a frontend that is gone, and that no worker claims, until there is no memory. Returns how many."""
    used = (await workers.redis.info("memory"))["used_memory"]
    await workers.redis.config_set("maxmemory", used + ROOM_BYTES)
    for number in range(ROOM_BYTES // BODY_BYTES * 2):
        try:
            await workers.queue.enqueue(job(f"lost-{number}", body=bytes(BODY_BYTES), reply_to="gone", tokens=10**9))
        except RedisAway as error:
            assert "maxmemory" in str(error)
            break
    else:
        raise AssertionError("it is not full")
    # Its buffers come and go. With less than it has now, it refuses until jobs go.
    await workers.redis.config_set("maxmemory", used + ROOM_BYTES // 2)
    return number


@pytest.mark.parametrize("lives", [True, False], ids=["prefill lives", "prefill is killed"])
async def test_a_full_redis_ends_no_request_and_gets_room_again(redis_server: EmbeddedRedis, lives: bool):
    """Nobody but the fleet does anything for it: workers of either role sweep what nobody waits for. Else no other
    worker could register."""
    sections = {
        "routing": {"remote_prefill_min_tokens": 100},
        "workers": {"timeout_s": TIMEOUT_S},
    }
    async with running_workers(redis_server, **sections) as workers:
        client = workers.unstarted_router()
        numbers = itertools.count()

        async def ask() -> None:
            number = next(numbers)
            await client.ask([number, *range(400)], 4)

        async def prefilled_remotely() -> bool:
            before = placed("remote", "long_prompt")
            await ask()
            return placed("remote", "long_prompt") > before

        try:
            decode, prefill = await workers.start(Role.DECODE), await workers.spawn(Role.PREFILL)
            await client.start()
            await until(lambda: client.connection.fleet.ready(Role.DECODE) == 1, "greetings")
            await until(prefilled_remotely, "a prefill worker prefills")
            prefill.kill(signal.SIGSTOP)  # it would claim what fills the queue
            try:
                assert await fill(workers) > 50
            finally:
                prefill.kill(signal.SIGCONT if lives else signal.SIGKILL)
            await until(lambda: client.connection.queue.depth is None, "the frontend sees that it refuses")
            await asyncio.gather(*(ask() for _ in range(20)))
            assert placed("local", "queue_unavailable") > 0 or not lives
            await until(lambda: client.connection.queue.depth is not None, "there is room again")
            assert (await workers.redis.info("memory"))["used_memory"] < await bound(workers)
            if not lives:  # while it is full a worker that starts ends, to be started again
                prefill = await workers.spawn(Role.PREFILL)
            for worker in (decode, prefill):
                await workers.registered(worker.id)
            await until(prefilled_remotely, "a prefill worker prefills again")
            assert client.unexpected == 0 and not client.connection.router.requests
        finally:
            await client.close()
            await workers.redis.config_set("maxmemory", 0)


async def bound(workers: Workers) -> int:
    return int((await workers.redis.config_get("maxmemory"))["maxmemory"])


def placed(decision: str, reason: str) -> float:
    return counted("pd_placements", decision=decision, reason=reason)
