"""`orchestrator model`: what it refuses, each in one line with the mend, and what it writes down."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from support_cli import orchestrator, refused
from support_redis import Server, fresh_namespace

from orchestrator.cli import handle as handle_module
from orchestrator.cli.models import model as model_module
from orchestrator.cli.models.model import Seen
from orchestrator.config.models import namespace_of
from orchestrator.config.settings import Refused
from orchestrator.store.client import Redis, RedisAway, connect
from orchestrator.store.fields import Launcher
from orchestrator.store.operator.models import ListedModel, ModelList, ModelState, ModelStore
from orchestrator.store.registry import Registry

T = TypeVar("T")


class Fleet:
    """What a fleet of the models `a` and `b` has in Redis."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, fresh_namespace()
        self.where = ("--namespace", self.name, "--redis", url)

    def ask(self, what: Callable[[Redis], Awaitable[T]]) -> T:
        async def main() -> T:
            async with await connect(self.url, 5) as redis:
                return await what(redis)

        return asyncio.run(main())

    def is_of(self, models: dict[str, ModelState], why: str = "") -> None:
        async def write(redis: Redis) -> None:
            store = ModelStore(redis, self.name)
            listed = {name: ListedModel({"model": "demo"}, state, why) for name, state in models.items()}
            assert await store.change(await store.read(), ModelList(1, listed))

        self.ask(write)

    def is_launched(self) -> None:
        async def write(redis: Redis) -> None:
            await Registry(redis, namespace_of(self.name, "a")).refresh_launcher("h/1/1", Launcher(), 60)

        self.ask(write)

    def listed(self) -> ModelList | None:
        return self.ask(lambda redis: ModelStore(redis, self.name).read())


@pytest.fixture
def fleet(server: Server) -> Fleet:
    return Fleet(server.url)


SERVE = {"a": ModelState.SERVING, "b": ModelState.SERVING}


@pytest.mark.parametrize(
    ("text", "options", "line"),
    [
        ("model: demo\nredis: {url: embedded}\n", (), "models.demo.redis: all models share it"),
        ("models: {x: {model: demo}}\n", (), "models is of a whole fleet; name a file with what stands under one"),
        ("model: demo\nfrontend: {port: 1}\n", (), "models.demo.frontend.port: all models share the frontends"),
        ("model: demo\nsloo: {}\n", (), "models.demo.sloo: "),
        ("model: demo\n", ("--name", "a b"), "models: expected text"),
        ("model: demo\n", ("--name", "a"), "a: the fleet has a model of this name; choose another with --name"),
        ("model: demo\nserved_model_name: b\n", ("--name", "c"), "served_model_name: clients know b as 'b' already"),
        ("model: org/c\n", (), "no launcher runs this fleet"),
    ],
)
def test_a_model_that_cannot_be_added_is_refused(
    fleet: Fleet, tmp_path: Path, text: str, options: tuple[str, ...], line: str
) -> None:
    (file := tmp_path / "model.yaml").write_text(text)
    fleet.is_of(SERVE)
    assert line in refused("model", "add", str(file), *options, *fleet.where)
    listed = fleet.listed()
    assert listed is not None and list(listed.models) == ["a", "b"]


def test_one_change_at_a_time_and_the_last_model_stays(fleet: Fleet) -> None:
    assert "has one model that its file does not name" in refused("model", "list", *fleet.where)
    fleet.is_of(SERVE)
    assert "c: the fleet has no such model; it has a, b" in refused("model", "remove", "c", *fleet.where)
    fleet.is_of({"a": ModelState.SERVING, "b": ModelState.ADDING})
    fleet.is_launched()
    assert "b: is adding; wait until it is done" in refused("model", "remove", "a", *fleet.where)
    for others in ({}, {"b": ModelState.REMOVING}):
        fleet.is_of({"a": ModelState.SERVING, **others})
        assert "a: is the only model of the fleet" in refused("model", "remove", "a", *fleet.where)


def test_list_shows_each_model(fleet: Fleet) -> None:
    fleet.is_of({"a": ModelState.SERVING, "b": ModelState.REMOVING})
    shown = json.loads(orchestrator("model", "list", "--json", *fleet.where).stdout)
    assert [(model["name"], model["state"], model["model"]) for model in shown["models"]] == [
        ("a", "serving", "demo"),
        ("b", "removing", "demo"),
    ]
    assert {"name", "prefill", "decode", "frontends", "by_hand", "why"} <= shown["models"][0].keys(), "none is left out"
    assert "removing" in orchestrator("model", "list", *fleet.where).stdout


def test_list_says_why_a_model_is_removed(fleet: Fleet) -> None:
    fleet.is_of({"a": ModelState.SERVING, "b": ModelState.REMOVING}, why="no room")
    assert "no room" in orchestrator("model", "list", *fleet.where).stdout


async def test_a_model_that_is_stuck_is_given_up_though_redis_misses_a_look_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, shown, now = 0, list[Seen](), 0.0
    listed = ModelList(1, {"a": ListedModel({"model": "demo"}, ModelState.ADDING)})

    async def read() -> ModelList:
        nonlocal looks, now
        looks, now = looks + 1, now + 1
        if looks % 5 == 0:
            raise RedisAway("it is slow")
        return listed if looks < 500 else listed.without("a")

    async def look(*_: object) -> Seen:
        return Seen("a", "adding")

    for module, name, value in (
        *((model_module, name, value) for name, value in (("_look", look), ("_LOOK_EVERY_S", 0.0))),
        *((model_module, name, lambda *_: SimpleNamespace(read=read)) for name in ("_store", "_registry")),
        (model_module, "time", SimpleNamespace(monotonic=lambda: now)),
        (handle_module, "_ASK_AGAIN_S", 0.0),
    ):
        monkeypatch.setattr(module, name, value)
    fleet: Any = None
    with pytest.raises(Refused, match="a: is still adding, and nothing has changed for 20 s"):
        await model_module._follow(fleet, "a", 20.0, shown.append, added=True)
    assert shown == [Seen("a", "adding")]
