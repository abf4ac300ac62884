"""vLLM's models over the fleet's list of adapters: what clients are answered, on a real Redis, without engines."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from support_redis import fresh_namespace
from support_wait import until

from orchestrator.fleet import adapters as adapters_module
from orchestrator.fleet.adapters import AdapterView
from orchestrator.fleet.control_calls import CallFailed, Unanswered
from orchestrator.frontend import edge
from orchestrator.process.tasks import cancelled
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.registry import Frontend, Registry

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class Workers:
    """In place of `ControlCalls`. `files`: what is at a path."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {"/a": "a", "/b": "b"}
        self.loaded: list[tuple[str, int]] = []
        self.fails, self.kind = "", CallFailed
        self.failing = {"/a", "/b"}  # paths of which `fails` is said

    async def call(self, method: str, args: list[Any]) -> Any:
        from vllm.exceptions import LoRAAdapterNotFoundError

        if method == "fingerprint_lora":
            if args[1] not in self.files:
                raise CallFailed(f"fingerprint_lora: worker w1: {LoRAAdapterNotFoundError(*args)}")
            return self.files[args[1]]
        assert method == "add_lora"
        (adapter,) = args
        if self.fails and adapter.lora_path in self.failing:
            raise self.kind(self.fails)
        assert not adapter.load_inplace
        self.loaded.append((adapter.lora_path, adapter.lora_int_id))
        return True


class Fleet:
    def __init__(self, redis: Any) -> None:
        self.redis, self.namespace, self.workers = redis, fresh_namespace(), Workers()
        self.tasks: list[asyncio.Task[None]] = []

    async def frontend(self, name: str, static: dict[str, str] | None = None) -> Any:
        from vllm.entrypoints.openai.models.protocol import BaseModelPath, LoRAModulePath

        from orchestrator.frontend.engine import FleetLLM, _carried_out
        from orchestrator.frontend.models.adapters import FleetModels

        registry = Registry(self.redis, self.namespace)

        async def announce() -> None:
            await registry.refresh_frontend(Frontend(name, "http://f", "p", adapters=view.serves), 60.0)

        view = AdapterView(registry, self.workers, announce)
        await announce()
        self.tasks.append(asyncio.create_task(view.run()))
        await view.begin()

        class Engine(SimpleNamespace):
            add_lora = FleetLLM.add_lora

        async def add_lora_async(adapter: Any) -> Any:
            return await _carried_out(self.workers.call("add_lora", [adapter]))

        model_config = SimpleNamespace(max_model_len=100, model="base")
        core = SimpleNamespace(add_lora_async=add_lora_async)
        engine = Engine(adapters=view, engine_core=core, model_config=model_config, renderer=None, input_processor=None)
        modules = [LoRAModulePath(*pair) for pair in (static or {}).items()]
        models = FleetModels(engine, [BaseModelPath("base", "/base")], lora_modules=modules or None)
        await models.init_static_loras()
        return models


@pytest.fixture
async def fleet(redis: Redis) -> AsyncIterator[Fleet]:
    fleet = Fleet(redis)
    yield fleet
    await cancelled(*fleet.tasks)


async def load(models: Any, name: str, path: str, inplace: bool = False) -> tuple[int, str]:
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    asked = LoadLoRAAdapterRequest(lora_name=name, lora_path=path, load_inplace=inplace)
    return _answer(await models.load_lora_adapter(asked))


async def unload(models: Any, name: str) -> tuple[int, str]:
    from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

    return _answer(await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name)))


def _answer(reply: Any) -> tuple[int, str]:
    return (200, reply) if isinstance(reply, str) else (reply.error.code, reply.error.message)


def served(models: Any) -> dict[str, tuple[str, int]]:
    return {name: (one.lora_path, one.lora_int_id) for name, one in models.lora_requests.items()}


async def test_an_adapter_is_served_by_all_frontends_by_one_number(fleet: Fleet) -> None:
    first, second = await fleet.frontend("f1"), await fleet.frontend("f2")
    assert (await load(first, "x", "/a"))[0] == (await load(second, "y", "/b"))[0] == 200
    assert served(first) == served(second) and set(served(first)) == {"x", "y"}
    assert sorted(fleet.workers.loaded) == sorted(served(first).values())
    assert len({number for _, number in fleet.workers.loaded}) == 2
    assert served(await fleet.frontend("f1-again")) == served(first)
    cards = await second.show_available_models()
    assert [(card.id, card.root, card.parent) for card in cards.data[1:]] == [("x", "/a", "base"), ("y", "/b", "base")]
    assert (await unload(second, "x"))[0] == 200
    assert set(served(first)) == set(served(second)) == {"y"}
    assert (await unload(first, "x"))[0] == 404


async def test_what_cannot_be_loaded_is_in_nobodys_list(fleet: Fleet) -> None:
    first, second = await fleet.frontend("f1"), await fleet.frontend("f2")
    status, why = await load(first, "x", "/nowhere")
    assert status == 404 and "worker w1" in why
    fleet.workers.fails = "add_lora: worker w2: rank 64 is too large (undone on w1)"
    assert await load(first, "x", "/a") == (500, fleet.workers.fails)
    assert served(first) == served(second) == {}
    fleet.workers.fails = ""
    assert (await load(first, "x", "/a"))[0] == 200
    status, why = await load(second, "x", "/b")
    assert status == 400 and "already been" in why


async def test_what_the_fleet_cannot_do_now_may_be_asked_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """503: no worker or engine has refused the adapter."""
    monkeypatch.setattr(adapters_module, "FOLLOW_TIMEOUT_S", 0.3)
    first = await fleet.frontend("f1")
    fleet.workers.fails, fleet.workers.kind = "add_lora: worker w2: no answer within 60 s", Unanswered
    status, why = await load(first, "x", "/a")
    assert status == 503 and why.startswith(fleet.workers.fails) and "try again" in why
    fleet.workers.fails = ""
    await Registry(fleet.redis, fleet.namespace).refresh_frontend(Frontend("stuck", "http://f", "p"), 60.0)
    status, why = await load(first, "x", "/a")
    assert status == 503 and "frontend stuck did not follow" in why and served(first) == {}


async def test_other_weights_under_a_known_name_have_another_number(fleet: Fleet) -> None:
    first, second = await fleet.frontend("f1"), await fleet.frontend("f2")
    await load(first, "x", "/a")
    before = served(first)
    fleet.workers.files["/a"] = "trained further"
    assert (await load(second, "x", "/a", inplace=True))[0] == 200
    assert served(first) == served(second) != before
    fleet.workers.files["/a"] = "a"
    assert (await load(second, "x", "/a", inplace=True))[0] == 200
    assert served(first) == before, "the same weights are the same adapter"


async def test_adapters_of_the_configuration_are_numbered_alike_and_stay(fleet: Fleet) -> None:
    first = await fleet.frontend("f1", {"s": "/a"})
    second = await fleet.frontend("f2", {"t": "/b", "s": "/a"})  # of another generation
    assert served(first)["s"] == served(second)["s"] and set(served(first)) == {"s"}
    assert (await load(first, "x", "/b"))[0] == 200
    assert set(served(second)) == {"s", "t", "x"}
    status, why = await unload(first, "s")
    assert status == 400 and "lora_modules" in why
    assert (await load(first, "s", "/b", inplace=True))[0] == 200
    assert served(second)["s"][0] == "/b"
    assert (await unload(second, "s"))[0] == 200
    assert served(first)["s"] == served(second)["s"] and served(first)["s"][0] == "/a"


async def test_an_adapter_that_a_resolver_finds_is_the_fleets(fleet: Fleet) -> None:
    from vllm.lora.request import LoRARequest

    class Resolver:
        async def resolve_lora(self, _: str, name: str) -> Any:
            return LoRARequest(name, 1, f"/{name}") if f"/{name}" in fleet.workers.files else None

    first, second = await fleet.frontend("f1"), await fleet.frontend("f2")
    for models in (first, second):
        models.lora_resolvers = [Resolver()]
    found = await asyncio.gather(*(models.resolve_lora("a") for models in (first, second)))
    assert found[0].lora_int_id == found[1].lora_int_id
    other = await second.resolve_lora("b")
    assert other.lora_int_id != found[0].lora_int_id
    await until(lambda: set(served(first)) == {"a", "b"}, "the first one follows")
    assert served(first) == served(second)
    assert (await first.resolve_lora("c")).error.code == 404
    for number in range(100):  # clients ask for anything
        assert (await first.resolve_lora(f"{number}")).error.code == 404
    assert len(first.lora_resolver_lock) == 0


async def test_an_adapter_that_a_resolver_finds_and_the_fleet_cannot_load_now_may_be_asked_for_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 would say that something is wrong with the request."""
    from vllm.lora.request import LoRARequest

    class Resolver:
        async def resolve_lora(self, _: str, name: str) -> Any:
            return LoRARequest(name, 1, f"/{name}")

    models = await fleet.frontend("f1")
    models.lora_resolvers = [Resolver()]
    for kind, status in ((Unanswered, 503), (CallFailed, 400)):
        fleet.workers.fails, fleet.workers.kind = "add_lora: worker w2: no", kind
        context = edge.RequestContext("r")
        token = edge.current.set(context)
        assert (await models.resolve_lora("a")).error.code == status
        assert (context.refusal is not None and context.refusal.status == 503) is (status == 503)
        edge.current.reset(token)


async def test_an_adapter_that_the_next_resolver_finds_too_is_refused_to_nobody(fleet: Fleet) -> None:
    """A stream whose request was refused on its way is answered with that, whatever comes of it."""
    from vllm.lora.request import LoRARequest

    class Resolver(SimpleNamespace):
        async def resolve_lora(self, _: str, name: str) -> Any:
            return LoRARequest(name, 1, self.path)

    models = await fleet.frontend("f1")
    models.lora_resolvers = [Resolver(path="/a"), Resolver(path="/b")]
    fleet.workers.fails, fleet.workers.kind = "add_lora: worker w2: no", Unanswered
    fleet.workers.failing = {"/a"}
    context = edge.RequestContext("r")
    token = edge.current.set(context)
    assert (await models.resolve_lora("x")).lora_path == "/b" and context.refusal is None
    edge.current.reset(token)


async def test_a_resolved_adapter_waits_for_no_redis(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client waits for the first token."""
    from vllm.lora.request import LoRARequest

    class Resolver:
        async def resolve_lora(self, _: str, name: str) -> Any:
            return LoRARequest(name, 1, f"/{name}")

    models, tries = await fleet.frontend("f1"), list[str]()
    models.lora_resolvers = [Resolver()]
    asks, sync = asyncio.current_task(), AdapterView._sync

    async def away(view: AdapterView) -> None:
        if asyncio.current_task() is not asks:
            return await sync(view)
        tries.append("away")
        raise RedisAway("away")

    monkeypatch.setattr(AdapterView, "_sync", away)
    assert (await models.resolve_lora("a")).lora_path == "/a"
    assert tries == ["away"]


async def test_an_unload_that_is_asked_for_again_waits_for_those_that_still_serve_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 asks for that: 404 would say that it is gone."""
    monkeypatch.setattr(adapters_module, "FOLLOW_TIMEOUT_S", 0.3)
    first, second = await fleet.frontend("f1", {"s": "/a"}), await fleet.frontend("f2")
    assert (await load(first, "x", "/b"))[0] == (await load(first, "s", "/b", inplace=True))[0] == 200
    registry = Registry(fleet.redis, fleet.namespace)
    await registry.refresh_frontend(Frontend("stuck", "http://f", "p", adapters=1), 60.0)
    for name in ("x", "s"):
        for asked in (first, second, first):
            status, why = await unload(asked, name)
            assert status == 503 and "it is out of the list, but frontend stuck did not follow" in why
    await registry.leave_frontend("stuck")
    assert [(await unload(asked, "x"))[0] for asked in (first, second)] == [404, 404]
    assert [(await unload(asked, "s"))[0] for asked in (first, second)] == [400, 404]


async def test_of_those_who_ask_for_one_adapter_together_one_asks_the_resolver(fleet: Fleet) -> None:
    from vllm.lora.request import LoRARequest

    asked: list[str] = []

    class Resolver:
        async def resolve_lora(self, _: str, name: str) -> Any:
            asked.append(name)
            await asyncio.sleep(0)
            return LoRARequest(name, 1, f"/{name}")

    models = await fleet.frontend("f1")
    models.lora_resolvers = [Resolver()]
    found = await asyncio.gather(*(models.resolve_lora("a") for _ in range(3)))
    assert len({one.lora_int_id for one in found}) == 1 and asked == ["a"]
