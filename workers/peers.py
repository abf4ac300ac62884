"""The processes that a worker talks to, frontends and other engines, and which of them are gone.

A frontend is gone when it cannot be reached for a while. An engine has to be proven dead, so that KV transfers with
it can be ended safely. Leaving the registry is a hint, not a proof: a worker that Redis lost may still be writing into
our memory. Proof is that neither its agent nor its engine accepts a connection any more, or that its host stays
unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from orchestrator.parent import has_ended
from orchestrator.store.client import RedisAway
from orchestrator.store.registry import Changed, Joined, Left, Registry, RegistryEvent, Resync
from orchestrator.types import Role, WorkerInfo, WorkerState
from orchestrator.wire.messages import PROTOCOL_VERSION, Hello, Rejected, ToFrontend, Welcome
from workers.engine import Refusal

log = logging.getLogger("pd.peers")

# A frontend whose connection stays broken for half a second begins its requests anew elsewhere, and one that connects
# again begins them anew too (`fleet/membership.py`): what it had here is nobody's.
FRONTENDS_CHECK_S, FRONTEND_GONE_S = 0.25, 1.0
PROBE_TIMEOUT_S = 1.0
PROBE_INTERVAL_S = 0.5
MAX_LOST = 10_000  # attempts of one frontend that it is told of when it is connected again


class IdInUse(RuntimeError):
    """Another living worker has this id. One line."""


async def refuse_twin(other: WorkerInfo | None) -> None:
    """`other` is registered under our id. A predecessor's entry outlives it by seconds, but a living twin would fight
    over the entry for ever. Raises IdInUse.
    """
    if other is not None and not has_ended(other.process) and await listening(other.request_address):
        raise IdInUse(f"worker id {other.id!r} is in use by process {other.pid} on {other.host}; choose another --id")


class Frontends:
    """The frontends that know this worker, and which of their requests' outputs were lost on the way to them."""

    def __init__(self, worker_id: str, send: Callable[[str, ToFrontend, Sequence[bytes]], bool]) -> None:
        """`send` never waits; False means that the frontend is not connected."""
        self._worker_id, self._send = worker_id, send
        self._greetings: dict[str, asyncio.Event] = {}
        self._unreachable_since: dict[str, float] = {}
        self._lost: dict[str, list[tuple[str, int]]] = {}

    def send(self, frontend_id: str, message: ToFrontend, payload: Sequence[bytes] = ()) -> bool:
        """False: it is not connected."""
        return self._send(frontend_id, message, payload)

    def reachable(self, frontend_id: str) -> bool:
        return self.send(frontend_id, Welcome(self._worker_id))

    def reject(self, frontend_id: str, request_id: str, number: int, refusal: Refusal) -> None:
        """Give an attempt back, now or when the frontend is connected again."""
        level = logging.DEBUG if refusal.why == "draining" else logging.WARNING
        log.log(level, "rejected %s#%d: %s", request_id, number, refusal.why)
        if not self.send(frontend_id, Rejected(request_id, number, self._worker_id, refusal.why, refusal.final)):
            self.lost(frontend_id, request_id, number)

    def lost(self, frontend_id: str, request_id: str, number: int) -> None:
        """Something about this attempt could not be sent."""
        lost = self._lost.setdefault(frontend_id, [])
        if len(lost) < MAX_LOST:
            lost.append((request_id, number))

    def greet(self, frontend_id: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            # Unanswered it never sends a request, which beats misunderstanding each other.
            log.error(
                "frontend %s speaks protocol %d, this worker %d; run the same version everywhere",
                frontend_id,
                hello.protocol,
                PROTOCOL_VERSION,
            )
            return
        self.send(frontend_id, Welcome(self._worker_id))
        self._unreachable_since.pop(frontend_id, None)
        if event := self._greetings.pop(frontend_id, None):
            event.set()
        for request_id, number in self._lost.pop(frontend_id, []):
            self.reject(frontend_id, request_id, number, Refusal("its outputs were lost with the connection"))

    async def greeted(self, frontend_id: str, timeout_s: float) -> bool:
        """Wait until that frontend says hello, next time."""
        event = self._greetings.setdefault(frontend_id, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True

    def gone(self, known: set[str], timeout_s: float, now: float, late_s: float = 0.0) -> list[str]:
        """Which of those that `known` names, or that something could not be told to, could not be reached for
        `timeout_s`. `late_s`: of the time since the last call, in which this process did not run; it is not counted."""
        gone = []
        for frontend_id in known | self._lost.keys():
            if self.reachable(frontend_id):
                self._unreachable_since.pop(frontend_id, None)
                continue
            if frontend_id in self._unreachable_since:
                self._unreachable_since[frontend_id] += late_s
            if now - self._unreachable_since.setdefault(frontend_id, now) > timeout_s:
                gone.append(frontend_id)
        return gone

    def forget(self, frontend_id: str) -> None:
        for known in (self._greetings, self._unreachable_since, self._lost):
            known.pop(frontend_id, None)


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

    def decodes(self, generation: int) -> bool:
        """Whether KV of this generation could pass to a decode worker. Asked while several generations are there."""
        infos = self._known.values()
        if all(info.generation == generation for info in infos):
            return True  # nobody is left out; what is not known here may be there
        ready = (info for info in infos if info.state is WorkerState.READY and info.kv.engine_id not in self._missing)
        return any(info.role is Role.DECODE and info.generation == generation for info in ready)

    @property
    def suspects(self) -> set[str]:
        """Engine ids that are probed: alive or dead is not known yet."""
        return set(self._missing)

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
                    await self.compare()
            except RedisAway as error:
                log.debug("membership not read: %s", error)  # once it is back, a Resync comes

    async def compare(self) -> None:
        """With all of the registry. Raises RedisAway."""
        workers = await self._registry.workers()
        for worker_id in {info.id for info in self._known.values()} | workers.keys():
            self._expect(worker_id, workers.get(worker_id))

    def _expect(self, worker_id: str, info: WorkerInfo | None) -> None:
        """`info` is what is registered under this id now, None for nothing. Any other engine that was known by it is
        probed until it is back or proven dead."""
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
        unreachable_s = 0.0
        while True:
            began = time.monotonic()
            answers = [await listening(info.request_address), await probe(info.kv.host, info.kv.port)]
            if any(answer is True for answer in answers):
                unreachable_s = 0.0
            elif all(answer is False for answer in answers) or unreachable_s > self._timeout_s:
                break
            await asyncio.sleep(PROBE_INTERVAL_S)
            # If this took longer, it was this process that did not run, which proves nothing.
            unreachable_s += min(time.monotonic() - began, 2 * PROBE_TIMEOUT_S + PROBE_INTERVAL_S)
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
