"""Which models a frontend that no launcher starts serves: its file's, as the fleet has them."""

from pathlib import Path

from support_redis import fresh_namespace

from orchestrator.config.models import fleet_namespace, load_models, namespace_of, shared_part
from orchestrator.config.settings import read_tree
from orchestrator.frontend.models.served import Served, as_listed
from orchestrator.store.fields import Launcher
from orchestrator.store.operator.models import ListedModel, ModelList, ModelState, ModelStore
from orchestrator.store.registry import Registry


async def test_a_frontend_started_by_hand_has_the_models_that_the_fleet_has(redis, tmp_path: Path):
    (file := tmp_path / "fleet.yaml").write_text(
        f"namespace: {fresh_namespace()}\nengine: sim\nslo: {{ttft_s: 3}}\n"
        "models: {a: {model: x}, b: {model: y}}\n"
    )
    models = load_models(file)
    ours = [Served(name, config) for name, config in models.items()]
    shared = shared_part(read_tree(file))
    assert await as_listed(ours, shared, redis) == ours, "no launcher has written a list"
    store = ModelStore(redis, fleet_namespace(models))
    listed = {
        "a": ListedModel({"model": "x"}, ModelState.REMOVING),
        "b": ListedModel({"model": "elsewhere"}),
        "c": ListedModel({"model": "z", "frontend": {"server_args": {"enable_auto_tool_choice": True}}}),
    }
    assert await store.change(None, ModelList(1, listed))
    assert await as_listed(ours, shared, redis) == ours, "the list is of a fleet that has ended"
    await Registry(redis, namespace_of(fleet_namespace(models), "b")).refresh_launcher("host/1/1", Launcher(), 60)
    b, c = await as_listed(ours, shared, redis)
    assert b == ours[1], "its own file says what it is started with"
    assert (c.name, c.generation, c.config.model, c.config.slo.ttft_s) == ("c", None, "z", 3)
    assert c.config.namespace == f"{fleet_namespace(models)}.c"
    assert c.config.frontend.server_args == {"enable_auto_tool_choice": True}
