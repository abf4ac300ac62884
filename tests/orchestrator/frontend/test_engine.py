"""What stands in place of vLLM's engine-core client offers what vLLM's server may call there."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.fleet.view import Fleet
from orchestrator.wire.control import METHODS, REFUSED

pytestmark = pytest.mark.vllm


def core(**parts: Any) -> Any:
    from orchestrator.frontend.engine import FleetCore

    given = {"router": None, "fleet": Fleet("f"), "calls": None, "pause": None} | parts
    return FleetCore(SimpleNamespace(**given), ("generate",))


def test_every_method_that_vllms_server_calls_has_a_row() -> None:
    from vllm.v1.engine import async_llm, core_client

    tree = ast.parse(inspect.getsource(async_llm))
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute | ast.Name)
        and getattr(node.value, "attr", getattr(node.value, "id", "")) == "engine_core"
    }
    assert len(called) > 30
    offered = {name for name, _ in inspect.getmembers(core_client.AsyncMPClient, inspect.iscoroutinefunction)}
    named = called | {name for name in offered if name.endswith("_async") and "call_utility" not in name}
    fleet_core = core()
    assert [name for name in sorted(named) if not hasattr(fleet_core, name)] == []
    engines = {name.removesuffix("_async") for name in offered}
    assert METHODS.keys() - {"set_pause"} <= engines
    assert METHODS.keys().isdisjoint(REFUSED)


@pytest.mark.parametrize("method", sorted(REFUSED))
async def test_what_no_fleet_can_do_is_refused_with_501_and_a_name(method: str) -> None:
    from vllm.exceptions import GracefulHTTPError

    with pytest.raises(GracefulHTTPError, match=f"{method} is not supported over a fleet") as refused:
        await getattr(core(), f"{method}_async")("x", mode="abort")
    assert refused.value.http_status == 501


def test_no_other_method_is_offered() -> None:
    with pytest.raises(AttributeError):
        core().shutdown_everything_async  # noqa: B018
