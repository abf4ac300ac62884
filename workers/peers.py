"""Which other engines are proven dead, so that KV transfers with them can be ended safely.

Leaving the registry is a hint, not a proof: a worker that Redis lost may still be writing into our memory. Proof is
that neither its agent nor its engine accepts a connection any more, or that its host stays unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from orchestrator.store.client import RedisAway
from orchestrator.store.registry import Changed, Joined, Left, Registry, RegistryEvent, Resync
from orchestrator.types import WorkerInfo

log = logging.getLogger("pd.peers")

PROBE_TIMEOUT_S = 1.0
PROBE_INTERVAL_S = 0.5


class Peers:
    """Calls `on_dead` once for each engine proven dead, with what its worker was registered as."""

    def __init__(
        self, worker_id: str, registry: Registry, timeout_s: float, on_dead: Callable[[WorkerInfo], Awaitable[None]]
    ) -> None:
        """`timeout_s`: how long a host may be unreachable before its engines count as dead."""
        self._worker_id, self._registry = worker_id, registry
        self._timeout_s, self._on_dead = timeout_s, on_dead
        self._known: dict[str, WorkerInfo] = {}  # by engine id
        self._missing: dict[str, asyncio.Task[None]] = {}
        self._events: asyncio.Queue[RegistryEvent] = asyncio.Queue()

    def heard(self, event: RegistryEvent) -> None:
        """Membership changed. Acted upon by `run`."""
        self._events.put_nowait(event)

    async def run(self) -> None:
        """Runs until cancelled. Reads what changed and no more: a fleet of a thousand that starts makes a thousand
        events, and each of them reaches a thousand workers."""
        while True:
            event = await self._events.get()
            try:
                if isinstance(event, Left):
                    self._expect(event.id, None)
                elif isinstance(event, Joined | Changed):
                    self._expect(event.id, await self._registry.worker(event.id))
                elif isinstance(event, Resync):
                    await self.look()
            except RedisAway as error:
                log.debug("membership not read: %s", error)  # once it is back, a Resync comes

    async def look(self) -> None:
        """Compare with all of the registry. Raises RedisAway."""
        workers = await self._registry.workers()
        for worker_id in {info.id for info in self._known.values()} | workers.keys():
            self._expect(worker_id, workers.get(worker_id))

    def _expect(self, worker_id: str, info: WorkerInfo | None) -> None:
        """This process is registered under the id now; any other known by it has to be alive or proven dead."""
        if worker_id == self._worker_id:
            return
        if info is not None:
            self._known[info.kv.engine_id] = info
            if task := self._missing.pop(info.kv.engine_id, None):
                task.cancel()
        for engine_id, known in self._known.items():
            replaced = known.id == worker_id and known is not info
            if replaced and engine_id not in self._missing:
                self._missing[engine_id] = asyncio.create_task(self._prove(known), name=f"probe-{worker_id}")

    async def _prove(self, info: WorkerInfo) -> None:
        """Runs until the engine is proven dead, or cancelled because it is back."""
        engine_id = info.kv.engine_id
        unreachable_since = None
        while True:
            answers = [await listening(info.request_address), await probe(info.kv.host, info.kv.port)]
            if not any(answer is True for answer in answers):
                now = time.monotonic()
                unreachable_since = unreachable_since or now
                if all(answer is False for answer in answers) or now - unreachable_since > self._timeout_s:
                    break
            else:
                unreachable_since = None
            await asyncio.sleep(PROBE_INTERVAL_S)
        log.warning("worker %s is dead: ending KV transfers with its engine %s", info.id, engine_id)
        self._known.pop(engine_id, None)
        self._missing.pop(engine_id, None)
        await self._on_dead(info)

    async def close(self) -> None:
        tasks = list(self._missing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def probe(host: str, port: int) -> bool | None:
    """True: something listens there. False: refused, so nothing does. None: no answer, which proves nothing yet."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        return None
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def listening(address: str) -> bool | None:
    """`probe` of a tcp:// address."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return await probe(host.strip("[]"), int(port))
