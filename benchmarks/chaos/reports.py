"""Load reports of workers, received without a frontend: the phase of each worker, and whose work it still holds."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing, suppress

from orchestrator.process.parent import own_identity
from orchestrator.store.client import RedisAway, connect
from orchestrator.store.registry import Frontend, Registry
from orchestrator.types import Role, WorkerInfo, WorkerLoad
from orchestrator.wire.curve import KeyPair
from orchestrator.wire.transport import FrontendTransport

# Phases of a worker's work, by its load report. Blocks that only a prefix cache keeps count as free.
PHASES: dict[str, Callable[[WorkerLoad], bool]] = {
    "idle": lambda load: not load.running and not load.waiting and load.blocks_free == load.blocks_total,
    "claimed": lambda load: load.waiting_tokens > 0,  # it holds a prompt that is not computed
    "prefilling": lambda load: load.running > 0,
    "pushing": lambda load: not load.running and not load.waiting and load.blocks_free < load.blocks_total,
    "awaiting_kv": lambda load: load.waiting > 0,
    "decoding": lambda load: load.running > 0,
}


class NotSeen(RuntimeError):
    """No worker was seen in that phase in time."""


class Reports:
    """Subscribes to every worker that is registered now."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self._redis_url, self._namespace = redis_url, namespace

    async def workers(self) -> dict[str, WorkerInfo]:
        async with await connect(self._redis_url, 5.0) as redis:
            return await Registry(redis, self._namespace).workers()

    async def listen(self, workers: dict[str, WorkerInfo], timeout_s: float) -> AsyncGenerator[WorkerLoad, None]:
        """Yields load reports for `timeout_s`. It registers as a frontend, since workers accept no others."""
        keys, name = KeyPair.new(), f"observer-{uuid.uuid4().hex[:8]}"
        redis = await connect(self._redis_url, 5.0)
        transport = FrontendTransport(name, keys=keys)
        registry = Registry(redis, self._namespace)
        try:
            await registry.refresh_frontend(Frontend(name, "", own_identity(), mesh_key=keys.public), timeout_s)
            for info in workers.values():
                transport.connect(info.id, info.request_address, info.load_address, info.mesh_key)
            deadline = asyncio.get_running_loop().time() + timeout_s
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        messages = await transport.receive_published()
                except TimeoutError:
                    return
                for message in messages:
                    if isinstance(message, WorkerLoad):
                        yield message
        finally:
            transport.close()
            with suppress(RedisAway):
                await registry.leave_frontend(name)
            await redis.aclose()

    async def caught(
        self, role: Role, phase: str, timeout_s: float, stir: Callable[[], None], spared: Collection[int] = ()
    ) -> WorkerInfo:
        """The first worker of that role that is seen in that phase. `stir` is called about once a second until there is
        one. `spared`: pids that are left out. Raises NotSeen."""
        deadline = time.monotonic() + timeout_s
        while True:  # after a fault of Redis the workers must register again
            every = (await self.workers()).items()
            workers = {name: info for name, info in every if info.role is role and info.pid not in spared}
            if workers or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        stirred_at, heard, last = 0.0, Counter[str](), dict[str, WorkerLoad]()
        async with aclosing(self.listen(workers, timeout_s)) as reports:
            async for load in reports:
                heard[load.worker_id] += 1
                last[load.worker_id] = load
                if PHASES[phase](load):
                    return workers[load.worker_id]
                if time.monotonic() - stirred_at > 1.0:
                    stirred_at = time.monotonic()
                    stir()
        latest = [
            f"{name}: {heard[name]}, the last with {load.running} running, {load.waiting} waiting and "
            f"{load.blocks_total - load.blocks_free} blocks held"
            for name, load in last.items()
        ]
        told = "; ".join(latest) or "none"
        raise NotSeen(f"no {role.value} worker was seen {phase} within {timeout_s:g} s; reports: {told}")
