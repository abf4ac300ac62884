"""What an operator's orders mean for the fleet, and for workers that no launcher runs."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support_redis import fresh_namespace, worker
from support_steering import set_desired

from orchestrator.config.settings import Refused
from orchestrator.store import documents
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.configuration import Rollout, Version
from orchestrator.store.planned import PlannedWorker, Seen
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Registry
from orchestrator.store.steering import Steering, comes_on_top, refuse_too_many, surplus
from orchestrator.types import DesiredRatio, Role


def seen(name: str, role: Role = Role.DECODE, ready: bool = True) -> PlannedWorker:
    return PlannedWorker(name, role, ready, owned=False)


def test_scale_drains_surplus_started_by_hand():
    there = [seen("decode-0"), seen("hand-a"), seen("hand-b"), seen("hand-p", Role.PREFILL)]
    launched = {"decode-0"}
    assert surplus(DesiredRatio(1, 3), there, launched) == []
    assert surplus(DesiredRatio(1, 2), there, launched) == ["hand-a"], "of the role that is too many"
    assert surplus(DesiredRatio(0, 3), there, launched) == ["hand-p"]
    assert surplus(DesiredRatio(3, 1), there, launched) == [], "roles are changed, nobody leaves"
    assert surplus(DesiredRatio(0, 1), there, launched) == ["hand-a", "hand-b", "hand-p"]
    assert surplus(DesiredRatio(0, 1), there[:1], launched) == [], "a launcher drains its own"


def test_only_a_surplus_that_no_launcher_runs_comes_on_top():
    there = [seen("decode-0"), seen("hand-a"), seen("hand-p", Role.PREFILL)]
    cases = [(DesiredRatio(1, 1), ["hand-a"]), (DesiredRatio(0, 2), ["hand-p"]), (DesiredRatio(1, 2), [])]
    for wanted, on_top in cases:
        assert [w.id for w in there if comes_on_top(w, wanted, there, {"decode-0"})] == on_top, wanted
    assert not comes_on_top(there[0], DesiredRatio(1, 1), there, {"decode-0"}), "its launcher would start another"


def test_more_workers_than_there_is_room_for_are_refused():
    refuse_too_many(DesiredRatio(4, 6), [8], by_hand=2)
    refuse_too_many(DesiredRatio(4, 6), [4, 6], by_hand=0)
    refuse_too_many(DesiredRatio(500, 500), [8, None], by_hand=0)  # a cluster that grows is one of them
    refuse_too_many(DesiredRatio(500, 500), [], by_hand=4)  # workers on other hosts may come
    with pytest.raises(Refused, match="^4P7D: there is room for 10 workers, .* not for 11"):
        refuse_too_many(DesiredRatio(4, 7), [4, 4], by_hand=2)


def test_the_last_ready_decode_worker_is_not_drained():
    assert surplus(DesiredRatio(0, 1), [seen("hand-a"), seen("decode-0", ready=False)], {"decode-0"}) == []


@pytest.mark.slow  # a server of its own
async def test_nobody_sees_an_order_without_its_desired_ratio(redis: Redis):
    """A launcher that read between the two started a worker in place of the one that leaves."""
    namespace = fresh_namespace()
    registry, another = Registry(redis, namespace), Registry(redis, namespace)
    for name, role in (("d0", Role.DECODE), ("d1", Role.DECODE), ("d2", Role.DECODE), ("p0", Role.PREFILL)):
        await registry.join(worker(name, role), 60)
    await set_desired(registry, 1, 3, "test")
    call, seen = redis.call, list[tuple[set[str], int, int]]()

    async def then_look(library: Any, verb: str, *args: Any) -> Any:
        answer = await call(library, verb, *args)
        if verb != "read":
            reading = await another.read()
            assert reading.desired is not None
            seen.append(({*reading.orders}, reading.desired.prefill, reading.desired.decode))
        return answer

    redis.call = then_look  # type: ignore[method-assign]
    steering = Steering(registry, PrefillQueue(redis, namespace), heartbeat_s=0)
    assert await steering.drain("d2", force=False)
    assert await steering.change_role("d1", Role.PREFILL, force=False)
    states = [state for state, before in zip(seen, [None, *seen], strict=False) if state != before]
    assert states == [(set(), 1, 3), ({"d2"}, 1, 2), ({"d1", "d2"}, 2, 1)]


async def test_orders_wait_for_workers_that_a_redis_without_its_data_has_not_heard_of(redis: Redis) -> None:
    """Else one that is there seems to be unknown, and the first that comes back seems to be the last decode worker."""
    namespace = fresh_namespace()
    registry = Registry(redis, namespace)
    steering = Steering(registry, PrefillQueue(redis, namespace), heartbeat_s=1.5)
    ready = [worker(name, Role.DECODE) for name in ("d0", "d1")]
    await registry.join(ready[0], 60)
    await set_desired(registry, 0, 2, "test")
    draining = asyncio.create_task(steering.drain("d1", force=False))
    await asyncio.sleep(0.3)
    await registry.join(ready[1], 60)  # its first heartbeat since
    assert await draining


class AfterReading:
    """A Redis after whose next reading somebody else acts, before this one does."""

    def __init__(self, redis: Redis, *others: Callable[[], Awaitable[Any]]) -> None:
        self._redis, self._others = redis, [*others]

    async def call(self, library: Any, verb: str, *args: Any) -> Any:
        answer = await self._redis.call(library, verb, *args)
        if verb == "read" and self._others:
            await self._others.pop()()
        return answer

    async def execute_command(self, *args: Any) -> Any:
        return await self._redis.execute_command(*args)


class LosesAnswers:
    """A Redis that carries out what changes something, and whose connection breaks before the answer comes."""

    def __init__(self, redis: Redis, losses: int) -> None:
        self._redis, self._losses = redis, losses
        self.execute_command = redis.execute_command

    async def call(self, library: Any, verb: str, *args: Any) -> Any:
        answer = await self._redis.call(library, verb, *args)
        if verb in ("once", "steer", "write_document") and self._losses:
            self._losses -= 1
            raise RedisAway("Connection closed by server")
        return answer


@pytest.fixture
async def fleet(redis: Redis) -> Callable[..., Steering]:
    """One prefill and four decode workers; each call gives an operator."""
    namespace = fresh_namespace()
    registry = Registry(redis, namespace)
    for name in ("p0", "d0", "d1", "d2", "d3"):
        role = Role.PREFILL if name == "p0" else Role.DECODE
        await registry.join(worker(name, role), 60)
    await set_desired(registry, 1, 4)

    def operator(*others: Callable[[], Awaitable[Any]]) -> Steering:
        slow: Any = AfterReading(redis, *others)
        return Steering(Registry(slow, namespace), PrefillQueue(slow, namespace), heartbeat_s=0)

    return operator


async def ratio_of(fleet: Callable[..., Steering]) -> tuple[int, int]:
    desired = await fleet()._registry.desired()
    assert desired is not None
    return desired.prefill, desired.decode


async def test_operators_at_once_lose_no_order(fleet: Callable[..., Steering]) -> None:
    await fleet(lambda: fleet().drain("d1", force=False)).drain("d0", force=False)
    assert await ratio_of(fleet) == (1, 2)
    told = (await fleet()._registry.read()).orders
    assert {name for name, order in told.items() if order.drain} == {"d0", "d1"}
    await fleet(lambda: fleet().scale(decode=3)).scale(prefill=2)
    assert await ratio_of(fleet) == (2, 3)


async def test_operators_at_once_do_not_take_the_last_decode_worker(fleet: Callable[..., Steering]) -> None:
    for name in ("d0", "d1"):
        await fleet().drain(name, force=False)
    with pytest.raises(Refused, match="d2: is the last decode worker"):
        await fleet(lambda: fleet().drain("d3", force=False)).drain("d2", force=False)
    assert await ratio_of(fleet) == (1, 1)


@pytest.mark.parametrize("losses", [1, 2])
async def test_an_order_whose_answer_is_lost_is_carried_out_once_and_told_as_done(
    redis: Redis, fleet: Callable[..., Steering], monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    monkeypatch.setattr(documents, "_ASK_AGAIN_S", 0.01)
    namespace = fleet()._registry.keys.prefix.removeprefix("pd:{").removesuffix("}:")
    told = []

    def losing() -> Any:
        return LosesAnswers(redis, losses)

    for name in ("d0", "d1"):
        steering = Steering(Registry(losing(), namespace), PrefillQueue(redis, namespace), heartbeat_s=0)
        told.append(await steering.drain(name, force=False))
    steering = Steering(Registry(losing(), namespace), PrefillQueue(redis, namespace), heartbeat_s=0)
    told.append(await steering.change_role("d2", Role.PREFILL, force=False))
    assert told == [True, True, True] and await ratio_of(fleet) == (2, 1)
    steering = Steering(Registry(losing(), namespace), PrefillQueue(redis, namespace), heartbeat_s=0)
    assert (await steering.scale(decode=3)).decode == 3 and await ratio_of(fleet) == (2, 3)
    began = Rollout(Version(0, {}), Version(1, {}))
    assert await Registry(losing(), namespace).rollout.change(None, began, by_operator=True)


async def test_an_order_that_nobody_answers_any_more_is_told_as_unknown(
    redis: Redis, fleet: Callable[..., Steering], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_PATIENCE_S", 0.05)
    namespace = fleet()._registry.keys.prefix.removeprefix("pd:{").removesuffix("}:")
    away: Any = LosesAnswers(redis, 1000)
    with pytest.raises(RedisAway, match="whether .* is not known: look with `orchestrator status`"):
        await Steering(Registry(away, namespace), PrefillQueue(redis, namespace), heartbeat_s=0).scale(decode=3)
    assert await ratio_of(fleet) == (1, 3)


async def test_an_order_is_not_given_again_after_a_stop_of_its_process(
    redis: Redis, fleet: Callable[..., Steering], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still for longer than Redis keeps answers, and another operator has given another order since."""
    namespace = fleet()._registry.keys.prefix.removeprefix("pd:{").removesuffix("}:")

    async def stop(_: float) -> None:
        later = documents._now() + 2 * documents._PATIENCE_S
        await redis.delete(*await redis.keys(f"pd:{{{namespace}}}:answered:*"))
        await fleet().scale(decode=2)
        monkeypatch.setattr(documents, "_now", lambda: later)

    monkeypatch.setattr(documents, "asyncio", SimpleNamespace(sleep=stop))
    losing: Any = LosesAnswers(redis, 1)
    with pytest.raises(RedisAway, match="whether .* is not known"):
        await Steering(Registry(losing, namespace), PrefillQueue(redis, namespace), heartbeat_s=0).scale(decode=3)
    assert await ratio_of(fleet) == (1, 2)


async def test_an_order_that_redis_refuses_is_told_so_at_once(redis: Redis, fleet: Callable[..., Steering]) -> None:
    await redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisAway, match="it refused FCALL") as told:
            async with asyncio.timeout(documents._PATIENCE_S / 2):
                await fleet().scale(decode=3)
    finally:
        await redis.config_set("maxmemory", 0)
    assert "not known" not in str(told.value)
    assert (await fleet().scale(decode=3)).decode == 3


@pytest.mark.parametrize("way", ["scale", "drain", "change_role"])
async def test_the_last_prefill_worker_stays_where_long_prompts_would_be_refused_without_it(
    fleet: Callable[..., Steering], way: str
) -> None:
    document = fleet()._registry.configuration

    def order(force: bool) -> Awaitable[Any]:
        match way:
            case "scale":
                return fleet().scale(prefill=0, force=force)
            case "drain":
                return fleet().drain("p0", force=force)
        return fleet().change_role("p0", Role.DECODE, force=force)

    refusing = Version(1, {"routing": {"fallback": "refuse"}})
    assert await document.change(None, refusing)
    with pytest.raises(Refused, match="routing.fallback: refuse every long prompt would get 503.* --force"):
        await order(force=False)
    assert await ratio_of(fleet) == (1, 4)
    await order(force=True)
    assert (await ratio_of(fleet))[0] == 0
    if way == "scale":
        await fleet().scale(decode=3)  # the fleet has none by now
        await fleet().scale(prefill=1)
    assert await document.change(refusing, Version(2, {"routing": {"fallback": "local"}}))
    await fleet().scale(prefill=0)


async def test_an_order_is_refused_when_the_fleet_changes_all_the_time(fleet: Callable[..., Steering]) -> None:
    others = [lambda n=n: fleet().scale(decode=n) for n in range(1, 9)]
    with pytest.raises(Refused, match="the fleet changed 5 times .* so nothing was ordered"):
        await fleet(*others).scale(prefill=3)
    assert await ratio_of(fleet) == (1, 4)


async def test_who_has_read_the_newest_ratio_restores_it(redis: Redis) -> None:
    """In any order, and whatever was set on the empty server before."""
    registry = Registry(redis, fresh_namespace())
    await set_desired(registry, 1, 2)
    older = await registry.desired()
    await set_desired(registry, 3, 4)
    newest = await registry.desired()
    assert older is not None and newest is not None and older.set_at < newest.set_at
    for first, second in ((older, newest), (newest, older)):
        await redis.delete(registry.keys.desired)
        assert await registry.restored(first, await registry.desired()) == first
        await registry.restored(second, None)  # it read when there was none
        assert await registry.desired() == newest
    await set_desired(registry, 5, 6)
    await registry.restored(newest, None)
    assert await registry.restored(newest, found := await registry.desired()) == found
    assert found is not None and (found.prefill, found.decode) == (5, 6), "what was set since stands"


async def test_a_ratio_that_nobody_has_read_is_restored_by_who_was_told_of_it(redis: Redis) -> None:
    registry, operator = Registry(redis, namespace := fresh_namespace()), Registry(redis, namespace)
    await set_desired(operator, 1, 2)
    held = await registry.desired()
    events = registry.watch()
    await anext(events)  # it listens
    await set_desired(operator, 3, 4)
    await anext(events)
    await events.aclose()
    await redis.delete(registry.keys.desired)
    restored = await registry.restored(held, await registry.desired())
    assert restored == await registry.desired()
    assert restored is not None and (restored.prefill, restored.decode) == (3, 4)


async def test_why_the_ratio_was_set_is_kept_until_it_is_set_again(redis: Redis) -> None:
    registry = Registry(redis, fresh_namespace())
    await registry.steer(Seen(), desired=DesiredRatio(2, 3, "ratio", why="bears twice as much"))
    first = await registry.desired()
    assert first is not None and first.why == "bears twice as much" and (await registry.read()).desired == first
    await redis.delete(registry.keys.desired)
    assert await registry.restored(first, None) == first == await registry.desired()
    await set_desired(registry, 1, 2)
    second = await registry.desired()
    assert second is not None and second.why == ""


async def test_a_host_whose_clock_is_behind_may_take_redis_over(redis: Redis) -> None:
    """What is set there is newer than what was set by the clock before."""
    registry = Registry(redis, fresh_namespace())
    await registry.restored(DesiredRatio(1, 2, "scale", 4e9), None)  # of the year 2096
    for decode in (3, 4):
        before = await registry.desired()
        await set_desired(registry, 1, decode)
        now = await registry.desired()
        assert before is not None and now is not None and now.set_at > before.set_at and now.decode == decode
