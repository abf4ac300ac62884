"""Frontends that follow one list of adapters, on a real server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support_redis import fresh_namespace, lose
from support_wait import until

from orchestrator.fleet import adapters
from orchestrator.fleet.adapters import AdapterFailed, AdapterRefused, AdapterView, refusal
from orchestrator.store.client import NotCarriedOut, Redis, RedisAway, connect
from orchestrator.store.configuration import Adapter, AdapterList
from orchestrator.store.documents import Document
from orchestrator.store.registry import Frontend, Registry

X, Y = Adapter("x", "/a/x", 100_001), Adapter("y", "/a/y", 100_002)


class Calls:
    """In place of `ControlCalls`: workers that read what is at a path."""

    async def call(self, method: str, args: list[Any]) -> str:
        assert method == "fingerprint_lora"
        return f"content of {args[1]}"


class Fleet:
    """Frontends of one namespace."""

    def __init__(self, redis: Redis) -> None:
        self.redis, self.namespace = redis, fresh_namespace()
        self.registry, self.tasks = Registry(redis, self.namespace), dict[str, asyncio.Task[None]]()

    def view(self, name: str, url: str = "http://f") -> AdapterView:
        async def announce() -> None:
            await self.registry.refresh_frontend(Frontend(name, url, "p", adapters=view.serves), 60.0)

        view = AdapterView(self.registry, Calls(), announce)
        return view

    async def join(self, name: str) -> AdapterView:
        view = self.view(name)
        await view._announce()
        self.tasks[name] = asyncio.create_task(view.run())
        await view.asked.wait()
        await view.begin()
        return view

    async def stop(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks.pop(name), return_exceptions=True)


@pytest.fixture
async def fleet(redis: Redis) -> AsyncIterator[Fleet]:
    fleet = Fleet(redis)
    yield fleet
    for name in list(fleet.tasks):
        await fleet.stop(name)


def test_a_name_is_one_adapter_and_so_is_a_number():
    known = AdapterList(1, {"x": X})
    assert refusal(known, X, replacing=False) is None
    other = Adapter("x", "/b/x", 100_003)
    assert "load_inplace" in (refusal(known, other, replacing=False) or "")
    assert refusal(known, other, replacing=True) is None
    assert "another name" in (refusal(known, Adapter("y", "/a/y", X.number), replacing=True) or "")


async def test_a_loaded_adapter_is_served_by_all_when_the_call_ends(fleet: Fleet):
    first, second = await fleet.join("f1"), await fleet.join("f2")
    told: list[AdapterList] = []
    second.on_change = told.append
    await first.load(X, replacing=False)
    assert told[-1].adapters == second.known.adapters == first.known.adapters == {"x": X}
    await second.load(Y, replacing=False)
    assert first.known.adapters == {"x": X, "y": Y}
    with pytest.raises(AdapterRefused, match="'x' is loaded from '/a/x'"):
        await second.load(Adapter("x", "/b", 100_003), replacing=False)
    await second.load(X, replacing=False)  # the same one is no other
    await first.unload("x")
    assert second.known.adapters == {"y": Y}
    later = await fleet.join("f3")
    assert later.known.adapters == {"y": Y}


async def test_a_list_that_could_not_be_taken_is_not_served(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adapters, "FOLLOW_TIMEOUT_S", 0.2)
    monkeypatch.setattr(adapters, "POLL_S", 0.05)
    first, second = await fleet.join("f1"), await fleet.join("f2")

    def defect(_: AdapterList) -> None:
        raise ZeroDivisionError

    second.on_change = defect
    with pytest.raises(AdapterFailed, match="frontend f2 did not follow"):
        await first.load(X, replacing=False)
    told: list[AdapterList] = []
    second.on_change = told.append
    await until(lambda: second.known == first.known and second.known.revision > 0)
    assert told[-1] == second.known and second.serves == second.known.revision


async def test_a_frontend_that_starts_is_not_waited_for_and_reads_the_list_before_it_serves(fleet: Fleet):
    first = await fleet.join("f1")
    starts = fleet.view("f2", url="")
    await starts._announce()
    await first.load(X, replacing=False)
    await starts.begin()
    assert starts.known.adapters == {"x": X}
    loading = asyncio.create_task(first.load(Y, replacing=False))  # now it is waited for
    await until(lambda: first.known.adapters == {"x": X, "y": Y})
    assert not loading.done()
    await starts.begin()
    await loading


async def test_all_frontends_give_an_adapter_the_same_number(fleet: Fleet):
    first, second = await fleet.join("f1"), await fleet.join("f2")
    x, y = await first.identify("x", "/a/x"), await second.identify("y", "/a/y")
    assert x.number != y.number and x == await second.identify("x", "/a/x")


async def test_simultaneous_loads_are_all_there(fleet: Fleet):
    views = [await fleet.join(f"f{number}") for number in range(4)]
    wanted = [Adapter(f"a{number}", "/a", 200_000 + number) for number in range(8)]
    await asyncio.gather(*(views[at % 4].load(one, replacing=False) for at, one in enumerate(wanted)))
    assert all(view.known.adapters == {one.name: one for one in wanted} for view in views)


async def test_a_frontend_that_does_not_follow_is_named_and_the_load_taken_back(fleet: Fleet, monkeypatch):
    monkeypatch.setattr(adapters, "FOLLOW_TIMEOUT_S", 0.3)
    first, _ = await fleet.join("f1"), await fleet.join("stuck")
    await first.load(X, replacing=False)
    await fleet.stop("stuck")
    with pytest.raises(AdapterFailed, match=r"frontend stuck did not follow .* within 0\.3 s; it was taken back"):
        await first.load(Y, replacing=False)
    with pytest.raises(AdapterFailed, match="it was taken back"):
        await first.load(Adapter("x", "/b", 100_003), replacing=True)
    assert first.known.adapters == {"x": X}
    with pytest.raises(AdapterFailed, match="it is out of the list, but frontend stuck did not follow"):
        await first.unload("x")
    await fleet.registry.leave_frontend("stuck")
    await first.load(Y, replacing=False)
    assert first.known.adapters == {"y": Y}


def followed_too_late(view: AdapterView, monkeypatch) -> asyncio.Event:
    """Once it is set, a load of this frontend fails, since another frontend does not serve it."""
    late = asyncio.Event()

    async def not_served() -> None:
        await late.wait()
        raise AdapterFailed("frontend f3 did not follow")

    monkeypatch.setattr(view, "_served_by_all", not_served)
    return late


async def test_a_load_that_is_taken_back_leaves_alone_what_was_loaded_in_its_place(fleet: Fleet, monkeypatch):
    first, second = await fleet.join("f1"), await fleet.join("f2")
    late = followed_too_late(first, monkeypatch)
    failing = asyncio.create_task(first.load(X, replacing=False))
    await until(lambda: second.known.adapters == {"x": X})
    newer = Adapter("x", "/b/x", 100_003)
    await second.load(newer, replacing=True)
    late.set()
    with pytest.raises(AdapterFailed, match="f3 did not follow; somebody else has changed it meanwhile"):
        await failing
    assert first.known.adapters == {"x": newer} == (await fleet.registry.adapters.read()).adapters


@pytest.mark.parametrize("unloaded", [True, False])
async def test_a_load_says_what_is_in_the_list_where_another_has_its_number_now(fleet: Fleet, monkeypatch, unloaded):
    first, second = await fleet.join("f1"), await fleet.join("f2")
    await first.load(X, replacing=False)
    late, newer = followed_too_late(first, monkeypatch), Adapter("x", "/b/x", 100_003)
    failing = asyncio.create_task(first.load(newer, replacing=True))
    await until(lambda: second.known.adapters == {"x": newer})
    if unloaded:
        await second.unload("x")
    await second.load(Adapter("y", "/a/y", X.number), replacing=False)
    late.set()
    why = "somebody else has changed it meanwhile" if unloaded else "it is in the list still, since the LoRA adapters"
    with pytest.raises(AdapterFailed, match=f"f3 did not follow; {why}"):
        await failing


async def test_frontends_put_back_a_list_that_redis_has_lost(fleet: Fleet, monkeypatch):
    monkeypatch.setattr(adapters, "POLL_S", 0.05)
    first, second = await fleet.join("f1"), await fleet.join("f2")
    await first.load(X, replacing=False)
    for load in (lambda: second.load(Y, replacing=False), lambda: asyncio.sleep(0)):
        await lose(fleet.registry.adapters)
        await load()  # at once: before anybody has noticed
        await until(fleet.registry.adapters.read, "the list is back")
    assert await fleet.registry.adapters.read() == first.known
    assert first.known.adapters == second.known.adapters == {"x": X, "y": Y}


async def test_a_list_that_cannot_be_read_is_replaced(fleet: Fleet):
    await fleet.redis.set(f"{fleet.registry.keys.prefix}adapters", "{")
    first = await fleet.join("f1")
    assert first.known.adapters == {}
    await first.load(X, replacing=False)
    assert await fleet.registry.adapters.read() == first.known


async def test_a_list_that_is_made_again_is_newer_than_the_one_that_was_lost(fleet: Fleet):
    first = await fleet.join("f1")
    await first.load(X, replacing=False)
    await fleet.stop("f1")
    await lose(fleet.registry.adapters)
    later = await fleet.join("f2")
    await fleet.registry.leave_frontend("f1")
    await later.load(Y, replacing=False)
    assert later.known.revision > first.known.revision > 0


async def test_a_moment_without_redis_fails_no_load(fleet: Fleet, monkeypatch):
    """A frontend takes it for away after half a second; a busy machine is slower at times."""
    first, second = await fleet.join("f1"), await fleet.join("f2")
    away: list[str] = []

    def fails_once(kind: type, name: str, error: type[RedisAway]) -> None:
        call = getattr(kind, name)

        async def failing(self: Any, *args: Any, **options: Any) -> Any:
            mine = self is first._registry or self is first._registry.adapters
            if mine and name not in away:
                away.append(name)
                raise error("slow")
            return await call(self, *args, **options)

        monkeypatch.setattr(kind, name, failing)

    fails_once(Document, "read", RedisAway)
    fails_once(Document, "change", NotCarriedOut)
    fails_once(Registry, "frontends", RedisAway)
    await first.load(X, replacing=False)
    assert set(away) == {"read", "change", "frontends"} and second.known.adapters == {"x": X}


async def test_a_change_of_which_nobody_knows_is_not_made_twice(fleet: Fleet, monkeypatch):
    first, changes = await fleet.join("f1"), list[AdapterList]()

    async def unknown(seen: Any, wanted: AdapterList, by_operator: bool = False) -> bool:
        changes.append(wanted)
        raise RedisAway("the answer is lost")

    monkeypatch.setattr(first._registry.adapters, "change", unknown)
    with pytest.raises(AdapterFailed, match="the list of adapters cannot be changed: the answer is lost"):
        await first.load(X, replacing=False)
    assert len(changes) == 1


async def test_nothing_is_done_while_redis_is_away(mortal, monkeypatch):
    monkeypatch.setattr(adapters, "FOLLOW_TIMEOUT_S", 0.3)
    redis = await connect(mortal.url, 5.0)
    fleet = Fleet(redis)
    view = await fleet.join("f")
    mortal.stop()
    with pytest.raises(AdapterFailed, match="the list of adapters cannot be changed: Redis at"):
        await view.load(X, replacing=False)
    assert view.known.adapters == {}
    mortal.start()
    await until(lambda: loads(view), "Redis is back")
    await fleet.stop("f")
    await redis.aclose()


async def loads(view: AdapterView) -> bool:
    try:
        await view.load(X, replacing=False)
    except AdapterFailed:
        return False
    return view.known.adapters == {"x": X}
