"""What a launcher reads from one snapshot of the registry."""

import asyncio
import errno
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from support_redis import Server, fresh_namespace, worker
from support_steering import order_restart
from support_wait import until

from orchestrator.launch.registry_watch import RegistryWatch, Snapshot
from orchestrator.process.tasks import cancelled
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.planned import loading_by_hand
from orchestrator.store.registry import Frontend, Registry
from orchestrator.types import Role, WorkerState


@pytest.mark.parametrize(
    ("reaches", "connected"),
    [((2, 2), True), ((3, 2), True), ((2, 2, 2), True), ((2, 1), False), ((0, 2), False), ((2,), False)],
)
def test_a_fleet_is_connected_when_each_serving_frontend_reaches_all_ready_workers(reaches, connected):
    ready = [msgspec.structs.replace(worker(name), state=WorkerState.READY) for name in ("a", "b")]
    leaves = msgspec.structs.replace(worker("c"), state=WorkerState.DRAINING)
    serving = {f"f{n}": Frontend(f"f{n}", "http://x", "1", reaches=r) for n, r in enumerate(reaches)}
    leaving = {"old": Frontend("old", "", "2", reaches=0)}
    snapshot = Snapshot(workers={info.id: info for info in [*ready, leaves]}, frontends=serving | leaving)
    assert snapshot.connected(2) is connected, "two are here: one that another model's registry has is in this one too"


async def test_a_worker_that_leaves_while_the_registry_is_read_is_there_with_its_orders_or_not_at_all(redis: Redis):
    """One that drains without an order to restart counts as leaving for good, and another would be started for it."""
    registry, other = (Registry(redis, namespace) for namespace in [fresh_namespace()] * 2)
    await registry.join(worker("a"), 60)
    await order_restart(registry, "a")
    call = redis.call

    async def then_it_is_gone(library: Any, function: str, *args: Any) -> Any:
        answer = await call(library, function, *args)
        if function == "read":
            redis.call = call  # type: ignore[method-assign]
            await other.leave("a")
        return answer

    redis.call = then_it_is_gone  # type: ignore[method-assign]
    watch = RegistryWatch(registry, AsyncMock())
    await watch.read()
    assert watch.snapshot.workers.keys() == {"a"} and watch.snapshot.orders["a"].restart
    await watch.read()
    assert watch.snapshot.workers == watch.snapshot.orders == {}


async def test_a_worker_by_hand_that_joins_while_the_registry_is_read_is_not_missed(redis: Redis):
    """Another would be started in its place."""
    registry, other = (Registry(redis, namespace) for namespace in [fresh_namespace()] * 2)
    assert await registry.claim_id("by-hand:h/1/1", Role.PREFILL, 60, "a")
    call = redis.call

    async def then_it_joins(library: Any, function: str, *args: Any) -> Any:
        answer = await call(library, function, *args)
        redis.call = call  # type: ignore[method-assign]
        await other.join(worker("a"), 60)
        await other.leave_launcher("by-hand:h/1/1")
        return answer

    redis.call = then_it_joins  # type: ignore[method-assign]
    watch = RegistryWatch(registry, AsyncMock())
    await watch.read()
    assert "a" in {*watch.snapshot.workers, *loading_by_hand(watch.snapshot.launchers)}


async def test_the_reading_after_an_outage_says_so_once_it_was_acted_upon(server: Server, redis: Redis):
    seen: list[bool] = []

    async def act(snapshot: Snapshot) -> None:
        seen.append(snapshot.was_away)
        if len(seen) == 2:
            raise RedisAway("away again")

    watch = RegistryWatch(Registry(redis, fresh_namespace()), act)
    await watch.read()
    server.stop()
    await watch.read()
    server.start()

    async def is_back() -> bool:
        await watch.read()
        return len(seen) >= 4

    await until(is_back, "its snapshots are acted upon again")
    assert seen == [False, True, True, False]


async def test_a_reading_that_cannot_be_acted_upon_does_not_end_the_watch(redis: Redis):
    """With it the whole fleet would end: for want of a descriptor, say."""
    act = AsyncMock(side_effect=[OSError(errno.EMFILE, "Too many open files"), None])
    watch = RegistryWatch(Registry(redis, fresh_namespace()), act)
    running = asyncio.create_task(watch.run())
    await until(lambda: act.await_count == 2 or running.done())
    assert not running.done()
    await cancelled(running)


async def test_nobody_is_missed_while_the_registry_is_not_read(redis: Redis):
    """Redis was away, or this process did not run: who is not there at first can have been there meanwhile."""
    watch = RegistryWatch(Registry(redis, fresh_namespace()), AsyncMock())
    await watch.read()
    first = watch.snapshot
    await watch.read()
    assert 0 < watch.snapshot.looked_s == watch.snapshot.read_at - first.read_at
    watch.snapshot = msgspec.structs.replace(watch.snapshot, read_at=watch.snapshot.read_at - 60)
    await watch.read()
    assert watch.snapshot.looked_s == 2.0
