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
from orchestrator.store.events import Changed, Joined, Left, RegistryEvent, Resync
from orchestrator.store.registry import Registry
from orchestrator.types import Peer, Role, WorkerInfo, WorkerState
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
    """Calls `on_dead` once for each engine proven dead."""

    def __init__(
        self, worker_id: str, registry: Registry, timeout_s: float, on_dead: Callable[[Peer], Awaitable[None]]
    ) -> None:
        """`timeout_s`: how long a host may be unreachable before its engines count as dead."""
        self._worker_id, self._registry = worker_id, registry
        self._timeout_s, self._on_dead = timeout_s, on_dead
        # By worker id, then by engine id: a worker has one engine, and those of its predecessors until they are proven
        # dead.
        self._known: dict[str, dict[str, Peer]] = {}
        self._missing: dict[str, asyncio.Task[None]] = {}
        self._events: asyncio.Queue[RegistryEvent] = asyncio.Queue()

    def __len__(self) -> int:
        """How many other workers are known."""
        return len(self._known)

    def decodes(self, generation: int) -> bool:
        """Whether KV of this generation could pass to a decode worker. Asked while several generations are there."""
        peers = [peer for engines in self._known.values() for peer in engines.values()]
        if all(peer.generation == generation for peer in peers):
            return True  # nobody is left out; what is not known here may be there
        ready = (peer for peer in peers if peer.state is WorkerState.READY and peer.engine_id not in self._missing)
        return any(peer.role is Role.DECODE and peer.generation == generation for peer in ready)

    @property
    def suspects(self) -> set[str]:
        """Engine ids that are probed: alive or dead is not known yet."""
        return set(self._missing)

    def heard(self, event: RegistryEvent) -> None:
        """Membership changed. Acted upon by `run`."""
        self._events.put_nowait(event)

    async def run(self) -> None:
        """Runs until cancelled. Reads nothing but after a Resync: a fleet of a thousand that starts makes a thousand
        events, and each of them reaches a thousand workers."""
        while True:
            event = await self._events.get()
            if isinstance(event, Left):
                self._expect(event.id, None)
            elif isinstance(event, Joined | Changed) and event.peer is not None:
                self._expect(event.id, event.peer)
            elif isinstance(event, Resync):
                try:
                    await self.compare()
                except RedisAway as error:
                    log.debug("membership not read: %s", error)  # once it is back, a Resync comes

    async def compare(self) -> None:
        """With all of the registry. Raises RedisAway."""
        registered = {engine.worker_id: engine for engine in await self._registry.peers()}
        for worker_id in self._known.keys() | registered.keys():
            self._expect(worker_id, registered.get(worker_id))

    def _expect(self, worker_id: str, registered: Peer | None) -> None:
        """`registered` is what has this id now, None for nothing. Any other engine that was known by it is probed until
        it is back or proven dead."""
        if worker_id == self._worker_id:
            return
        if registered is not None:
            self._known.setdefault(worker_id, {})[registered.engine_id] = registered
            if task := self._missing.pop(registered.engine_id, None):
                task.cancel()
        for engine_id, engine in self._known.get(worker_id, {}).items():
            if engine is not registered and engine_id not in self._missing:
                self._missing[engine_id] = asyncio.create_task(self._prove(engine), name=f"probe-{worker_id}")

    async def _prove(self, engine: Peer) -> None:
        """Runs until the engine is proven dead, or cancelled because it is back."""
        unreachable_s = 0.0
        while True:
            began = time.monotonic()
            answers = [await listening(engine.request_address), await probe(engine.kv_host, engine.kv_port)]
            if any(answer is True for answer in answers):
                unreachable_s = 0.0
            elif all(answer is False for answer in answers) or unreachable_s > self._timeout_s:
                break
            await asyncio.sleep(PROBE_INTERVAL_S)
            # If this took longer, it was this process that did not run, which proves nothing.
            unreachable_s += min(time.monotonic() - began, 2 * PROBE_TIMEOUT_S + PROBE_INTERVAL_S)
        log.warning("worker %s is dead: ending KV transfers with its engine %s", engine.worker_id, engine.engine_id)
        engines = self._known[engine.worker_id]
        del engines[engine.engine_id]
        if not engines:
            del self._known[engine.worker_id]
        self._missing.pop(engine.engine_id, None)
        await self._on_dead(engine)

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
