"""How vLLM's worker makes its NIXL agent: with our settings, and with more than one try."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.logger import init_logger

logger = init_logger("vllm.pd.push")

_TRIES, _PAUSE_S = 5, 0.2


@contextlib.contextmanager
def agent_settings() -> Iterator[None]:
    """In this context vLLM's workers make agents by `quiet` and `patient`."""
    config, agent = base_worker.nixl_agent_config, base_worker.NixlWrapper
    base_worker.nixl_agent_config, base_worker.NixlWrapper = quiet(config), patient(agent)
    try:
        yield
    finally:
        base_worker.nixl_agent_config, base_worker.NixlWrapper = config, agent


def quiet(config: Any) -> Any:
    """NIXL's agent configuration without a progress thread, which spins a whole core per idle engine, and with
    strict locking, since three threads call NIXL."""
    strict = vars(sys.modules[config.__module__])["nixl_thread_sync_t"].NIXL_THREAD_SYNC_STRICT
    return functools.partial(config, enable_prog_thread=False, sync_mode=strict)


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
