"""Launchers follow the list of models: a real registry, models without processes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from support_redis import fresh_namespace, lose
from support_wait import until

from orchestrator.config.models import namespace_of
from orchestrator.launch.fleet_processes import StartFailed
from orchestrator.launch.pools.model_list import ModelFollower, begin_list
from orchestrator.process.parent import own_identity
from orchestrator.process.tasks import cancelled
from orchestrator.store.client import Redis
from orchestrator.store.fields import Frontend, Launcher
from orchestrator.store.operator.models import ListedModel, ModelList, ModelState, ModelStore, forget_namespace
from orchestrator.store.registry import Registry

TREE = {"models": {"a": {"model": "demo"}, "b": {"model": "demo"}}}


class Model:
    """The processes of one, which are none."""

    def __init__(self, registry: Registry, seen: list[str], name: str, fails: Exception | None = None) -> None:
        self.registry, self.seen, self.name, self.fails = registry, seen, name, fails
        self.frontends = self.watch = self
        self.is_first = name == "a"

    async def until_started(self) -> None:
        if self.fails:
            raise self.fails
        self.seen.append(f"{self.name}: workers")

    def serve(self) -> None:
        self.seen.append(f"{self.name}: frontends")

    def leave(self) -> None:
        self.seen.append(f"{self.name}: no frontends")

    def read_soon(self) -> None: ...

    async def until_served(self) -> None: ...


class Models:
    def __init__(self, seen: list[str], models: dict[str, Model]) -> None:
        self.seen, self.models = seen, models

    @property
    def first(self) -> Model:
        return self.models["a"]

    async def add(self, name: str, model: Model) -> None:
        self.models[name] = model

    async def remove(self, name: str) -> None:
        self.seen.append(f"{name}: no workers")
        del self.models[name]


class World:
    def __init__(self, redis: Redis) -> None:
        self.redis, self.fleet = redis, fresh_namespace()
        self.store = ModelStore(redis, self.fleet)
        self.seen: list[str] = []
        self.fails: Exception | None = None

    def registry(self, name: str) -> Registry:
        return Registry(self.redis, namespace_of(self.fleet, name))

    async def frontend(self, name: str, url: str = "http://x") -> None:
        await self.registry(name).refresh_frontend(Frontend("f", url, "1"), 60)

    async def change(self, name: str, model: ListedModel) -> None:
        seen = await self.store.read()
        assert seen is not None and await self.store.change(seen, seen.with_model(name, model))

    async def state(self, name: str) -> str:
        listed = await self.store.read()
        assert listed is not None
        return listed.models[name].state.value if name in listed.models else "gone"

    @contextlib.asynccontextmanager
    async def launcher(self, without: str = "") -> AsyncIterator[None]:
        """`without`: a model that does not run here."""

        async def make(name: str, section: dict[str, Any]) -> Any:
            return Model(self.registry(name), self.seen, name, self.fails)

        async def forget(name: str) -> bool:
            return await forget_namespace(self.redis, namespace_of(self.fleet, name))

        listed = await begin_list(self.redis, self.fleet, TREE)
        names = listed.models.keys() - {without}
        models: Any = Models(self.seen, {name: Model(self.registry(name), self.seen, name) for name in names})
        running = asyncio.create_task(ModelFollower(self.store, models, make, forget, listed).run())
        try:
            yield
        finally:
            await cancelled(running)


@pytest.fixture
def world(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("orchestrator.launch.pools.model_list._EVERY_S", 0.02)
    monkeypatch.setattr("orchestrator.launch.pools.model_list.COME_BACK_S", 0.0)
    return World(redis)


async def test_workers_come_first_and_frontends_leave_first(world: World) -> None:
    await world.frontend("a")
    async with world.launcher():
        await world.change("c", ListedModel({}, ModelState.ADDING))
        await until(lambda: world.seen == ["c: workers", "c: frontends"], "it is added here")
        await world.frontend("c", url="")
        await asyncio.sleep(0.1)
        assert await world.state("c") == "adding", "a frontend that starts does not serve it yet"
        await world.frontend("c")
        await _until(world, "c", "serving")
        world.seen.clear()
        await world.change("c", ListedModel({}, ModelState.REMOVING))
        await until(lambda: world.seen, "frontends leave it")
        assert set(world.seen) == {"c: no frontends"} and await world.state("c") == "removing"
        await world.registry("c").leave_frontend("f")
        await _until(world, "c", "gone")
        assert world.seen[-1] == "c: no workers"


async def test_workers_wait_for_frontends_that_redis_has_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.launch.pools.model_list.COME_BACK_S", 600.0)
    for name in ("a", "b"):
        await world.frontend(name)
    async with world.launcher():
        await world.change("b", ListedModel({}, ModelState.REMOVING))
        await until(lambda: "b: no frontends" in world.seen)
        await lose(world.store)
        await world.registry("b").leave_frontend("f")
        await asyncio.sleep(0.3)
        await world.frontend("b")
        monkeypatch.setattr("orchestrator.launch.pools.model_list.COME_BACK_S", 0.0)
        await asyncio.sleep(0.1)
        assert "b: no workers" not in world.seen
        await world.registry("b").leave_frontend("f")
        await until(lambda: "b: no workers" in world.seen)


@pytest.mark.parametrize("here", [True, False], ids=["the model runs here", "it runs elsewhere"])
async def test_workers_wait_though_another_launcher_has_put_the_lost_list_back(
    world: World, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    monkeypatch.setattr("orchestrator.launch.pools.model_list.COME_BACK_S", 600.0)
    await begin_list(world.redis, world.fleet, TREE)
    await world.change("b", ListedModel({}, ModelState.REMOVING))
    await world.registry("a").refresh_launcher("another", Launcher(), 60)  # whose list counts
    await world.frontend("a")  # Redis has lost all others
    async with world.launcher(without="" if here else "b"):
        await asyncio.sleep(0.3)
        assert await world.state("b") == "removing" and "b: no workers" not in world.seen
        monkeypatch.setattr("orchestrator.launch.pools.model_list.COME_BACK_S", 0.0)
        await _until(world, "b", "gone")


@pytest.mark.parametrize(
    ("fails", "why"),
    [(StartFailed("c-worker-0: no room"), "c-worker-0: no room"), (KeyError("a defect"), "KeyError: 'a defect'")],
)
async def test_a_model_that_cannot_start_is_taken_out_with_the_reason(world: World, fails: Exception, why: str) -> None:
    await world.frontend("a")
    world.fails = fails
    async with world.launcher():
        await world.registry("c").refresh_launcher("another", Launcher(), 60)  # it has not taken it out yet
        await world.change("c", ListedModel({}, ModelState.ADDING))
        await _until(world, "c", "removing")
        listed = await world.store.read()
        assert listed is not None and listed.models["c"].why == why
        await until(lambda: "c: no workers" in world.seen, "it ends here")
        assert await world.state("c") == "removing", "another launcher still runs it"
        await world.registry("c").leave_launcher("another")
        await _until(world, "c", "gone")


async def test_a_launcher_that_joins_takes_the_list_over_and_one_that_is_alone_writes_its_own(world: World) -> None:
    assert list((await begin_list(world.redis, world.fleet, TREE)).models) == ["a", "b"]
    await world.registry("b").refresh_launcher(own_identity(), Launcher(), 60)
    assert list((await begin_list(world.redis, world.fleet, {"models": {"c": {}}})).models) == ["a", "b"]
    await world.registry("b").leave_launcher(own_identity())
    listed = await begin_list(world.redis, world.fleet, {"models": {"c": {}}})
    assert list(listed.models) == ["c"] and listed.revision == 2


async def test_a_list_that_redis_has_lost_is_put_back(world: World) -> None:
    async with world.launcher():
        known = await world.store.read()
        await lose(world.store)
        deadline = asyncio.get_running_loop().time() + 60
        while await world.store.read() != known:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.02)
        assert isinstance(known, ModelList)


async def _until(world: World, name: str, state: str) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while await world.state(name) != state:
        assert asyncio.get_running_loop().time() < deadline, (name, state, world.seen)
        await asyncio.sleep(0.02)


async def test_a_list_that_cannot_be_followed_once_is_followed_on(world: World) -> None:
    fails = [OSError(24, "Too many open files")]

    class Failing(ModelStore):
        async def read(self) -> ModelList | None:
            if fails:
                raise fails.pop()
            return await super().read()

    world.store = Failing(world.redis, world.fleet)
    async with world.launcher():
        await until(lambda: not fails)
        world.store = ModelStore(world.redis, world.fleet)
        await world.frontend("a")
        await world.frontend("c")
        await world.change("c", ListedModel({}, ModelState.ADDING))
        await _until(world, "c", "serving")


async def test_a_list_that_another_launcher_has_begun_meanwhile_ends_no_model_here(world: World) -> None:
    """Redis was away until all entries had run out, or has lost them, and that launcher was the first to be there."""
    other = {"models": {"c": {}, "b": {"model": "of-its-file"}}}
    for lost in (True, False):
        async with world.launcher(), world.launcher():
            known = await world.store.read()
            assert known is not None
            if lost:
                await lose(world.store)
            assert list((await begin_list(world.redis, world.fleet, other)).models) == ["c", "b"]

            async def joined(known: ModelList = known) -> bool:
                found = await world.store.read()
                return found is not None and found.models.keys() == {"a", "b", "c"} and found.begun != known.begun

            await until(joined, "the models of both")
            found = await world.store.read()
            assert found is not None and {**found.models, **known.models} == found.models, "b is as it runs here"
            await asyncio.sleep(0.2)
            assert await world.store.read() == found, "they agree"
            assert not [line for line in world.seen if line.endswith("no workers")]


async def test_a_removal_is_not_undone_by_a_launcher_that_did_not_know_the_list(world: World) -> None:
    """It was ordered before that one's next look."""
    async with world.launcher():
        known = await world.store.read()
        assert known is not None
        models = {**known.models, "b": ListedModel({"model": "demo"}, ModelState.REMOVING)}
        assert await world.store.change(known, ModelList(9, models, begun="another"))
        await _until(world, "b", "gone")
        assert "b: no workers" in world.seen


async def test_a_list_that_an_older_release_has_changed_is_the_same_list(world: World) -> None:
    """It does not write which list it is."""
    async with world.launcher():
        known = await world.store.read()
        assert known is not None
        assert await world.store.change(known, msgspec.structs.replace(known.without("b"), begun=""))
        await until(lambda: "b: no workers" in world.seen)
        assert await world.state("b") == "gone"


async def test_launchers_that_begin_at_once_have_no_list_of_another(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.launcher():
        first = await world.store.read()
        second = await begin_list(world.redis, world.fleet, TREE)
        assert first is not None and first.begun != second.begun, "no launcher was registered yet"
        await asyncio.sleep(0.2)
        assert await world.store.read() == second and not caplog.records
