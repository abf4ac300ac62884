"""What is kept of a fleet's events, against a real server."""

import msgspec
from support_redis import fresh_namespace, keys_of, worker
from support_steering import set_desired

from orchestrator.store.fields import Launcher
from orchestrator.store.operator.events import EventLog
from orchestrator.store.planned import BY_HAND
from orchestrator.store.registry import Registry
from orchestrator.types import Role


async def told(log: EventLog) -> list[tuple[str, str]]:
    return [(event.type, event.fields.get("id", "")) for event in await log.read()]


async def test_registry_logs_join_flip_and_leave(redis):
    namespace = fresh_namespace()
    registry, log = Registry(redis, namespace), EventLog(redis, namespace)
    info = worker("w1")
    await registry.join(info, 60.0)
    await registry.refresh(info, 60.0)
    await registry.refresh(msgspec.structs.replace(info, role=Role.DECODE), 60.0)
    await registry.join(info, 60.0)  # its process was killed, and started again under the same id
    await registry.leave("w1")
    await set_desired(registry, 2, 3, "scale")
    events = await log.read()
    assert [event.type for event in events] == ["joined", "flipped", "lost", "joined", "left", "scaled"]
    assert events[0].fields == {"kind": "worker", "id": "w1", "role": "prefill"}
    assert events[1].fields == {"kind": "worker", "id": "w1", "from": "prefill", "to": "decode"}
    assert events[-1].fields == {"prefill": "2", "decode": "3", "by": "scale", "why": ""}
    assert events[0].at <= events[-1].at


async def test_a_worker_that_falls_silent_is_lost(redis):
    namespace = fresh_namespace()
    registry, log = Registry(redis, namespace), EventLog(redis, namespace)
    await registry.join(worker("w1"), 60.0)
    await redis.delete(registry.keys.worker("w1"))  # as when its time is over
    assert await registry.workers() == {}
    assert await told(log) == [("joined", "w1"), ("lost", "w1")]


async def test_what_a_worker_by_hand_holds_its_id_by_is_no_launcher_that_comes_and_goes(redis):
    namespace = fresh_namespace()
    registry, log = Registry(redis, namespace), EventLog(redis, namespace)
    for holder in (f"{BY_HAND}h/1/1", f"{BY_HAND}h/2/1", "h/3/1"):
        await registry.refresh_launcher(holder, Launcher({"w1": Role.DECODE}), 60.0)
    assert await registry.claim_id(f"{BY_HAND}h/4/1", Role.DECODE, 60.0, "w2")
    await registry.leave_launcher(f"{BY_HAND}h/1/1")
    await redis.delete(f"{registry.keys.prefix}launcher:{BY_HAND}h/2/1")  # as when its time is over
    assert len(await registry.launchers()) == 2
    assert await told(log) == [("joined", "h/3/1")]


async def test_readers_continue_and_stream_is_bounded(redis):
    namespace = fresh_namespace()
    log = EventLog(redis, namespace)
    assert await log.read() == []
    for number in range(3):
        await log.note("retried", why=f"w{number}", count="2")
    first, *rest = await log.read()
    assert await log.read(after=first.id) == rest
    assert await log.read(after=rest[-1].id) == []
    assert [event.fields["why"] for event in await log.read(limit=2)] == ["w1", "w2"], "the newest"
    for _ in range(6000):
        await log.note("retried", why="x")
    assert len(await log.read(limit=10_000)) < 5_200
    assert await keys_of(redis, namespace) == {"noted"}
