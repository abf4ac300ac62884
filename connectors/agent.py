"""How vLLM's worker makes its NIXL agent: with our settings, and with more than one try."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.logger import init_logger

logger = init_logger("vllm.pd.push")

_TRIES, _PAUSE_S = 5, 0.2


@contextlib.contextmanager
def agent_settings(backends: Mapping[str, Mapping[str, object]] = {}) -> Iterator[None]:
    """In this context vLLM's workers make agents by `quiet`, `patient` and `configured`. `backends`: parameters of
    NIXL's backends, by their names."""
    config, agent = base_worker.nixl_agent_config, base_worker.NixlWrapper
    base_worker.nixl_agent_config, base_worker.NixlWrapper = quiet(config), patient(configured(agent, backends))
    try:
        yield
    finally:
        base_worker.nixl_agent_config, base_worker.NixlWrapper = config, agent


def quiet(config: Any) -> Any:
    """NIXL's agent configuration without a progress thread, which spins a whole core per idle engine, and with
    strict locking, since three threads call NIXL."""
    strict = vars(sys.modules[config.__module__])["nixl_thread_sync_t"].NIXL_THREAD_SYNC_STRICT
    return functools.partial(config, enable_prog_thread=False, sync_mode=strict)


def configured(agent: Any, backends: Mapping[str, Mapping[str, object]]) -> Any:
    """This class of agents, with these parameters of its backends. An agent raises ValueError for a parameter that a
    backend does not know, and RuntimeError for a backend that cannot be loaded here."""
    not_found = vars(sys.modules[agent.__module__])["nixlBind"].nixlNotFoundError

    class Configured(agent):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for name in backends:
                if name not in self.backends:
                    raise self._missing(name)

        def create_backend(self, backend: str, parameters: Mapping[str, str] = {}) -> None:
            given, known = backends.get(backend, {}), self.get_plugin_params(backend)
            for name in given:
                if known and name not in known:
                    raise ValueError(
                        f"kv.backends.{backend}.{name}: not a parameter of it; it has {', '.join(sorted(known))}"
                    )
            try:
                super().create_backend(backend, {**parameters, **{name: str(value) for name, value in given.items()}})
            except not_found:
                raise self._missing(backend) from None

        def _missing(self, name: str) -> RuntimeError:
            plugins = ", ".join(self.get_plugin_list())
            return RuntimeError(f"kv.backends.{name}: the NIXL that is installed cannot load it; it has {plugins}")

    Configured.__module__ = agent.__module__
    return Configured


def patient(agent: Any) -> Callable[..., Any]:
    """Makes agents of this class, and tries again where NIXL's backend cannot be made.

    UCX lists the host's network interfaces and then opens each. If one goes away in between, as those of containers do,
    the backend fails with "No such device". Raises what the last try raised.
    """
    failed = vars(sys.modules[agent.__module__])["nixlBind"].nixlBackendError

    def make(*args: Any, **options: Any) -> Any:
        for tries_left in reversed(range(_TRIES)):
            try:
                return agent(*args, **options)
            except failed as error:
                if not tries_left:
                    raise
                logger.warning(
                    "NIXL's backend could not be made (%s): perhaps a network interface went away; tries left: %d",
                    error,
                    tries_left,
                )
                time.sleep(_PAUSE_S)

    return make
