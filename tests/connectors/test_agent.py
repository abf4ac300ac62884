"""How vLLM's worker makes its NIXL agent: a backend that fails because of a vanished interface is made again."""

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


class PluginAgent(nixl_api.nixl_agent):  # type: ignore[misc]
    """Has UCX, and a plugin that cannot be loaded."""

    def __init__(self, backends: list[str]) -> None:
        self.backends: dict[str, dict[str, str]] = {}
        for name in backends:
            if name in self.get_plugin_list():  # as NIXL's own does
                self.create_backend(name, {"given": "1"})

    def get_plugin_list(self) -> list[str]:
        return ["LIBFABRIC", "UCX"]

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        return {"num_workers": "1", "ucx_devices": ""} if backend == "UCX" else {}

    def create_backend(self, backend: str, parameters: dict[str, str]) -> None:
        if backend != "UCX":
            raise nixl_api.nixlBind.nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        self.backends[backend] = parameters


PluginAgent.__module__ = nixl_api.nixl_agent.__module__


def test_backends_get_their_parameters_as_text() -> None:
    made = agent_module.configured(PluginAgent, {"UCX": {"num_workers": 2}})(["UCX"])
    assert made.backends == {"UCX": {"given": "1", "num_workers": "2"}}
    assert agent_module.configured(PluginAgent, {})(["UCX"]).backends == {"UCX": {"given": "1"}}


@pytest.mark.parametrize(
    ("backends", "line"),
    [
        ({"UCX": {"workers": 2}}, r"kv.backends.UCX.workers: not a parameter of it; it has num_workers, ucx_devices"),
        ({"LIBFABRIC": {}}, r"kv.backends.LIBFABRIC: the NIXL .* cannot load it; it has LIBFABRIC, UCX"),
        ({"Mooncake": {}}, r"kv.backends.Mooncake: the NIXL .* cannot load it; it has LIBFABRIC, UCX"),
    ],
)
def test_what_the_installed_nixl_lacks_is_named_with_what_it_has(backends: dict[str, Any], line: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=line):
        agent_module.configured(PluginAgent, backends)(list(backends))


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
