"""The runners that a launcher asks a cluster for, by name: one call at a time for each, and none that nobody knows of.

| a call's answer                 | then |
|---------------------------------|------|
| comes while it is waited for    | that runner is used |
| comes late, and is asked for again by then | the same |
| comes late, and nobody asks     | that runner is ended; who asks while it ends gets a new one |
| is an error                     | the next call finds what the cluster may have made |
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.launch.ray.runner import Runner
from orchestrator.process.threads import in_background, in_thread


class Runners:
    def __init__(self) -> None:
        self._asking: dict[str, asyncio.Task[Any]] = {}  # by name, until the cluster has answered
        self._wanted: set[str] = set()

    async def named(self, name: str, options: dict[str, Any]) -> Any:
        """A new runner, or the one that has this name already. Raises RayError, ValueError. Waits for as long as it is
        not cancelled."""
        if name not in self._asking:
            self._asking[name] = asyncio.create_task(self._ask(name, options), name=f"runner-{name}")
        asking = self._asking[name]
        self._wanted.add(name)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            if asking.done():  # just now
                in_background(partial(end, name))
            raise
        finally:
            self._wanted.discard(name)

    async def _ask(self, name: str, options: dict[str, Any]) -> Any:
        try:
            while True:
                runner = await in_thread(lambda: ray.remote(Runner).options(name=name, **options).remote())
                if name in self._wanted:
                    return runner
                await in_thread(partial(end, name))
                if name not in self._wanted:  # nobody has asked for it meanwhile
                    return None
        except BaseException:  # of a launcher that ends too, which does not wait for the cluster
            if name not in self._wanted:
                in_background(partial(end, name))
            raise
        finally:
            del self._asking[name]


def end(name: str) -> None:
    """End the runner of this name, if there is one. Blocks."""
    with contextlib.suppress(ValueError, RayError, RuntimeError):
        ray.kill(ray.get_actor(name))
