"""The list of adapters against a real server: its revision, who serves it, and what a server may have lost."""

from __future__ import annotations

import asyncio

import pytest
from support_redis import fresh_namespace
from support_wait import DEADLINE_S

from orchestrator.store.keys import Keys
from orchestrator.store.operator.adapters import Adapter, AdapterList, AdapterStore
from orchestrator.store.registry import Frontend, Registry

X, Y = Adapter("x", "/a/x", 100_001), Adapter("y", "/a/y", 100_002, base_model="m", is_3d=True)


@pytest.fixture
def namespace() -> str:
    return fresh_namespace()


@pytest.fixture
def store(redis, namespace) -> AdapterStore:
    return AdapterStore(redis, namespace)


@pytest.fixture
def registry(redis, namespace) -> Registry:
    return Registry(redis, namespace)


async def joined(registry: Registry, name: str, url: str = "http://f") -> None:
    await registry.refresh_frontend(Frontend(id=name, url=url, process="p"), 30.0)


async def test_a_change_needs_the_revision_that_is_there(store):
    first = await store.change("x", X, 0)
    assert first > 0
    assert await store.change("y", Y, 0) == 0, "its author has not seen x"
    second = await store.change("y", Y, first)
    assert second > first
    assert await store.follow("f", 0) == AdapterList(second, {"x": X, "y": Y})
    assert await store.follow("f", second) is None
    third = await store.change("x", None, second)
    assert await store.follow("f", second) == AdapterList(third, {"y": Y})


async def test_frontends_that_serve_an_older_list_are_named(store, registry):
    for name, url in (("old", "http://f"), ("new", "http://f"), ("starting", ""), ("silent", "http://f")):
        await joined(registry, name, url)
    revision = await store.change("x", X, 0)
    await store.follow("old", revision - 1)
    await store.follow("new", revision)
    assert sorted(await store.behind(revision)) == ["old", "silent"], "one that starts reads the list before it serves"
    await store.follow("starting", revision - 1)
    assert sorted(await store.behind(revision)) == ["old", "silent", "starting"]
    await joined(registry, "new")  # a heartbeat takes nothing back
    await registry.leave_frontend("old")
    await registry.leave_frontend("silent")
    assert await store.behind(revision) == ["starting"]
    assert set(await registry.frontends()) == {"new", "starting"}
    await store.follow("starting", revision)
    assert await store.behind(revision) == []


async def test_a_lost_list_is_put_back_and_no_newer_one_replaced(store, redis, namespace):
    first = await store.change("x", X, 0)
    second = await store.change("y", Y, first)
    keys = Keys(namespace)
    await redis.delete(keys.adapters, keys.adapters_revision)
    await store.restore(AdapterList(first, {"x": X}))
    assert await store.follow("f", 0) == AdapterList(first, {"x": X})
    await store.restore(AdapterList(second, {"x": X, "y": Y}))
    await store.restore(AdapterList(first, {}))
    assert await store.follow("f", 0) == AdapterList(second, {"x": X, "y": Y})
    await redis.delete(keys.adapters, keys.adapters_revision)
    assert await store.change("y", Y, 0) > second, "it grows by the clock, though the server has forgotten it"


async def test_damaged_values_are_left_out(store, redis, namespace, caplog):
    keys = Keys(namespace)
    await redis.set(keys.adapters, "not a hash")
    revision = await store.change("x", X, 0)
    await redis.hset(keys.adapters, "broken", "{")
    assert await store.follow("f", 0) == AdapterList(revision, {"x": X})
    assert "left out an adapter" in caplog.text


async def test_a_change_is_told_at_once(store):
    told = store.changes()
    await anext(told)  # the subscription
    waiting = asyncio.ensure_future(anext(told))
    await store.change("x", X, 0)
    async with asyncio.timeout(DEADLINE_S):
        await waiting
    await told.aclose()
