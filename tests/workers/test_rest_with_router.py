"""A request for an idle model asks for its workers, and waits for them: real workers under the real router."""

import asyncio

import msgspec
import pytest
from support_router import RouterClient
from support_steering import set_desired
from support_wait import until
from support_workers import Workers, running_workers

from orchestrator.fleet.control_calls import CallFailed
from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.router.request import Overloaded
from orchestrator.store.planned import Seen
from orchestrator.types import IDLE, WAKE, DesiredRatio, PauseState, Role

IMPATIENT = {"placement_timeout_s": 0.1}


async def sleeping(workers: Workers) -> RouterClient:
    """A frontend of a fleet that became idle before any worker came."""
    await set_desired(workers.registry, 0, 1)
    seen = Seen.ratio(await workers.registry.desired())
    assert await workers.registry.steer(seen, desired=DesiredRatio(0, 1, IDLE, why="no request")) is not None
    client = await workers.router()
    assert client.connection.rest.away
    client.connection.router.check_admission()  # it is not refused unread
    return client


async def woken(workers: Workers) -> DesiredRatio | None:
    desired = await workers.registry.desired()
    return desired if desired is not None and not desired.idle else None


async def test_the_next_request_wakes_an_idle_model_and_waits_longer_than_for_a_worker_that_is_there(
    redis_server: EmbeddedRedis,
) -> None:
    async with running_workers(redis_server, routing=IMPATIENT) as workers:
        await wakes(workers)


async def wakes(workers: Workers) -> None:
    client = await sleeping(workers)
    asking = asyncio.create_task(client.ask([1, 2, 3], 4))
    desired = await until(lambda: woken(workers), "its workers are asked for")
    assert (desired.decode, desired.set_by) == (1, WAKE)
    await asyncio.sleep(1.2)  # a heartbeat: the frontend knows that it was woken, and waits on
    assert not asking.done() and client.connection.rest.away
    await workers.start(Role.DECODE)
    await asking
    await until(lambda: not client.connection.rest.away, "it serves")


async def test_a_request_whose_workers_do_not_come_back_is_refused_in_time(redis_server: EmbeddedRedis) -> None:
    async with running_workers(redis_server, routing=IMPATIENT) as workers:
        workers.config = msgspec.structs.replace(workers.config, cold_start_s=0.5)
        client = await sleeping(workers)
        with pytest.raises(Overloaded) as refused:
            await client.answer([1, 2, 3], 4)
        assert (refused.value.status, refused.value.reason) == (503, "no_decode_worker")
        assert refused.value.retry_after_s > 0


async def test_idle_time_counts_from_the_last_request(workers: Workers) -> None:
    await workers.start(Role.DECODE)
    client = await workers.router(decode=1)
    rest = client.connection.rest
    await asyncio.sleep(0.2)
    before = rest.idle_s(0, 0)
    assert before > 0.1
    await client.ask([1, 2, 3], 4)
    assert rest.idle_s(0, client.connection.router.learning.offered.requests) < before
    assert rest.idle_s(True, 1) < 0.1, "one is in flight"


async def test_a_paused_model_is_not_idle(workers: Workers) -> None:
    """Requests that wait for its end are in no router, and its workers are what keeps the pause."""
    await workers.start(Role.DECODE)
    client = await workers.router(decode=1)
    connection = client.connection

    async def told_idle_s() -> float:
        await connection._send_heartbeat()
        return (await workers.registry.frontends())[connection.frontend_id].idle_s

    await connection.pause.begin("wait", False)
    await asyncio.sleep(0.2)
    assert await told_idle_s() == 0.0
    await connection.pause.end()
    await asyncio.sleep(0.2)
    assert await told_idle_s() >= 0.1


async def test_an_order_for_the_workers_of_an_idle_model_says_how_it_has_some(redis_server: EmbeddedRedis) -> None:
    async with running_workers(redis_server) as workers:
        client = await sleeping(workers)
        with pytest.raises(CallFailed, match="the model is idle and has no worker; send it a request first"):
            await client.connection.pause.begin("wait", False)
        with pytest.raises(CallFailed, match="the model is idle"):  # nobody has paused it
            await client.connection.pause.end()
        assert (await workers.registry.desired()).idle, "neither wakes anybody"


async def test_a_pause_that_outlived_the_workers_of_an_idle_model_is_ended(redis_server: EmbeddedRedis) -> None:
    async with running_workers(redis_server) as workers:
        client = await sleeping(workers)
        client.connection.fleet.pause.note("gone", PauseState(3, "wait", True))
        resuming = asyncio.create_task(client.connection.pause.end())
        await until(lambda: woken(workers), "its workers are asked for")
        await workers.start(Role.DECODE)
        await resuming
        assert not client.connection.pause.active
        await client.ask([1, 2, 3], 4)
