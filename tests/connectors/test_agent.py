"""How vLLM's worker makes its NIXL agent: a backend that fails because of a vanished interface is made again."""

from __future__ import annotations

from typing import Any

import pytest

agent_module = pytest.importorskip("connectors.agent")
nixl_api = pytest.importorskip("nixl._api")

pytestmark = pytest.mark.vllm


class FailingAgent(nixl_api.nixl_agent):  # type: ignore[misc]
    """Fails with the errors that are left, then is made."""

    errors: list[Exception] = []

    def __init__(self, name: str) -> None:
        self.name = name
        if self.errors:
            raise self.errors.pop(0)


FailingAgent.__module__ = nixl_api.nixl_agent.__module__


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(FailingAgent, "errors", [])


def backend_error() -> Exception:
    error: Any = nixl_api.nixlBind.nixlBackendError
    return error("NIXL_ERR_BACKEND")


def test_a_backend_that_fails_is_made_again() -> None:
    FailingAgent.errors += [backend_error(), backend_error()]
    assert agent_module.patient(FailingAgent)("a").name == "a"


def test_tries_end_and_other_errors_are_not_tried_again() -> None:
    FailingAgent.errors += [backend_error() for _ in range(agent_module._TRIES + 1)]
    with pytest.raises(nixl_api.nixlBind.nixlBackendError):
        agent_module.patient(FailingAgent)("a")
    assert len(FailingAgent.errors) == 1
    FailingAgent.errors[:] = [nixl_api.nixlBind.nixlNotFoundError("no plugin"), backend_error()]
    with pytest.raises(nixl_api.nixlBind.nixlNotFoundError):
        agent_module.patient(FailingAgent)("a")
    assert len(FailingAgent.errors) == 1


def test_settings_hold_in_their_context_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an agent of its own: UCX must not be loaded in a process that forks engines."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    monkeypatch.setattr(base_worker, "NixlWrapper", FailingAgent)
    FailingAgent.errors += [backend_error()]
    config = base_worker.nixl_agent_config
    with agent_module.agent_settings():
        assert base_worker.NixlWrapper("a").name == "a"
        assert base_worker.nixl_agent_config(num_threads=1).enable_pthread is False
    assert (base_worker.nixl_agent_config, base_worker.NixlWrapper) == (config, FailingAgent)
