"""The frontends and engines that a worker talks to, and which of them are gone.

A frontend is gone when it cannot be reached for a while. An engine must be proven dead before KV transfers with it are
ended. A missing registry entry is no proof: a worker that Redis lost may still write into this engine's memory. The
proof is that both its agent and its engine refuse connections, or that its host stays unreachable. A stopped process
does neither: its host drops packets once its queue is full. A worker probes only engines that it exchanges KV with, so
that a fleet that loses many workers does not probe each from everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from orchestrator.process.parent import has_ended
from orchestrator.process.tasks import cancelled, until_told
from orchestrator.store.client import RedisAway
from orchestrator.store.fields import Departed, Heartbeat
from orchestrator.store.registry import Registry
from orchestrator.types import WorkerInfo
from orchestrator.wire.messages import PROTOCOL_VERSION, Hello, Rejected, ToFrontend, Welcome
from orchestrator.wire.sockets import Sent
from workers.attempts import Attempts
from workers.engine import Engine, Refusal

log = logging.getLogger("pd.peers")

# A frontend whose connection stays broken for half a second, or was made again, starts new attempts on other workers
# (`fleet/membership.py`). So its requests here can be ended after a second.
FRONTENDS_CHECK_S, FRONTEND_GONE_S = 0.25, 1.0
FRONTEND_AWAY_S = 10.0  # after that it may be there: its `Hello` is waited for once more
# A frontend without requests here only has to be forgotten some time. A shorter interval would cost a large fleet a
# message from each worker to each frontend.
IDLE_FRONTENDS_CHECK_S = 5.0
PROBE_TIMEOUT_S = 1.0
PROBE_INTERVAL_S = 0.5
MEET_MOST_WORKERS = 64  # of a fleet in which all that may exchange KV are connected
NOBODYS_PORT = 9  # nothing listens there: a live host refuses the connection


class IdInUse(RuntimeError):
    """Another living worker has this id. One line."""


async def refuse_duplicate_id(other: WorkerInfo | None) -> None:
    """Raises IdInUse if `other`, which is registered under this worker's id, is alive. The entry of a dead predecessor
    expires within seconds; a living twin would overwrite the entry for ever.
    """
    if other is not None and not has_ended(other.process) and await probe_address(other.request_address):
        raise IdInUse(f"worker id {other.id!r} is in use by process {other.pid} on {other.host}; choose another --id")


class Frontends:
    """The frontends that are connected to this worker.

    What cannot be sent is lost, and need not be remembered: a frontend starts all its requests here again when its
    connection was made again (`fleet/membership.py`).
    """

    def __init__(self, send: Callable[[str, ToFrontend, Sequence[bytes]], Sent]) -> None:
        """`send` never waits."""
        self._send = send
        self._greetings: dict[str, set[asyncio.Event]] = {}  # of those who wait for one
        self.greeted: set[str] = set()  # those who have, until one is found to be unreachable
        self._reached: set[str] = set()  # their last message was sent; since the last call of `gone`
        self._unreachable_since: dict[str, float] = {}
        self._away: dict[str, float] = {}  # monotonic seconds

    def send(self, frontend_id: str, message: ToFrontend, payload: Sequence[bytes] = ()) -> Sent:
        sent = self._send(frontend_id, message, payload)
        if sent in (Sent.YES, Sent.TOO_LARGE):
            self._reached.add(frontend_id)
            self._unreachable_since.pop(frontend_id, None)
        else:
            self._reached.discard(frontend_id)
        if sent is Sent.UNREACHABLE:
            self.greeted.discard(frontend_id)
        return sent

    def away(self, now: float) -> list[str]:
        """The frontends that were waited for lately, or are gone, and have not greeted since."""
        self._away = {name: since for name, since in self._away.items() if now - since < FRONTEND_AWAY_S}
        return list(self._away)

    def reachable(self, frontend_id: str) -> bool:
        return bool(self.send(frontend_id, Welcome()))

    def reject(self, frontend_id: str, request_id: str, number: int, refusal: Refusal) -> None:
        """Give an attempt back to its frontend."""
        level = logging.DEBUG if refusal.why == "draining" else logging.WARNING
        log.log(level, "rejected %s#%d: %s", request_id, number, refusal.why)
        rejected = Rejected(request_id, number, refusal.why, refusal.final, refusal.leaving, refusal.late)
        self.send(frontend_id, rejected)

    def on_hello(self, frontend_id: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            # It sends no request before it has an answer.
            log.error(
                "frontend %s speaks protocol %d, this worker %d; run the same version everywhere",
                frontend_id,
                hello.protocol,
                PROTOCOL_VERSION,
            )
            return
        self.greeted.add(frontend_id)
        self.send(frontend_id, Welcome())
        self._unreachable_since.pop(frontend_id, None)
        self._away.pop(frontend_id, None)
        for event in self._greetings.get(frontend_id, ()):
            event.set()

    async def wait_for_hello(self, frontend_id: str, timeout_s: float) -> bool:
        """Wait for the next `Hello` of that frontend. False at the time-out."""
        self._away[frontend_id] = time.monotonic()
        event, waiting = asyncio.Event(), self._greetings.setdefault(frontend_id, set())
        waiting.add(event)
        try:
            return await until_told(event, timeout_s)
        finally:
            waiting.discard(event)
            if not waiting:
                self._greetings.pop(frontend_id, None)

    def gone(self, known: set[str], timeout_s: float, now: float, late_s: float = 0.0) -> list[str]:
        """The frontends among `known` that could not be reached for `timeout_s`. `late_s`: how much of the time since
        the last call this process did not run, which does not count."""
        gone = []
        for frontend_id in known:
            if frontend_id in self._reached or self.reachable(frontend_id):
                continue
            if frontend_id in self._unreachable_since:
                self._unreachable_since[frontend_id] += late_s
            if now - self._unreachable_since.setdefault(frontend_id, now) > timeout_s:
                gone.append(frontend_id)
        self._reached.clear()
        self._unreachable_since = {
            name: since
            for name, since in self._unreachable_since.items()
            if name in known or now - since < FRONTEND_AWAY_S  # in some calls `known` has only those with requests here
        }
        return gone

    def forget(self, frontend_id: str, now: float) -> None:
        """It is gone."""
        self._unreachable_since.pop(frontend_id, None)
        self.away(now)  # forgets those of long ago
        self._away[frontend_id] = now


class Peers:
    """Calls `on_dead` once for each departed worker that matters here and is proven dead."""

    def __init__(
        self,
        worker_id: str,
        registry: Registry,
        attempts: Attempts,
        timeout_s: float,
        claims: Callable[[], bool],
        on_dead: Callable[[Departed], Awaitable[None]],
    ) -> None:
        """`timeout_s`: how long a host may be unreachable before its engines count as dead. `claims`: whether this
        worker takes prefill jobs now, also those that others leave behind."""
        self._worker_id, self._registry, self._attempts = worker_id, registry, attempts
        self._timeout_s, self._claims, self._on_dead = timeout_s, claims, on_dead
        self._probes: dict[str, asyncio.Task[None]] = {}

    @property
    def suspects(self) -> set[str]:
        """Engine ids that are probed: alive or dead is not known yet."""
        return set(self._probes)

    @property
    def concerned(self) -> bool:
        """Some departures may matter here."""
        return bool(self._attempts.sources) or self._attempts.pushes or self._claims()

    def note(self, departed: Iterable[Departed], idle: bool) -> None:
        """Take note of workers that left or were lost. `idle`: this engine holds no KV, so it exchanges none."""
        if idle:
            self._attempts.exchanges_none()
        for worker in departed:
            # Only the engine knows to which engines it pushes.
            exchanges = worker.engine_id in self._attempts.sources or self._attempts.pushes
            if worker.worker_id != self._worker_id and (exchanges or (worker.claims and self._claims())):
                self.suspect(worker)

    def suspect(self, departed: Departed) -> None:
        """Probe it until it is registered again or proven dead."""
        if departed.engine_id not in self._probes:
            probing = asyncio.create_task(self._confirm_death(departed), name=f"probe-{departed.worker_id}")
            self._probes[departed.engine_id] = probing

    async def _confirm_death(self, departed: Departed) -> None:
        unreachable_s, there = 0.0, None
        while True:
            began = time.monotonic()
            agent, engine, host = await _listening(departed, there)
            if agent or engine:
                unreachable_s, there = 0.0, await self._registered(departed.worker_id)
                if there is not None and there.engine_id == departed.engine_id:  # it is back
                    del self._probes[departed.engine_id]
                    return
            elif agent is engine is False:
                break
            elif host is not None:
                unreachable_s = 0.0
            elif unreachable_s > self._timeout_s:
                break
            await asyncio.sleep(PROBE_INTERVAL_S)
            # If it took longer, this process did not run, which proves nothing.
            unreachable_s += min(time.monotonic() - began, 2 * PROBE_TIMEOUT_S + PROBE_INTERVAL_S)
        log.warning("worker %s is dead: ending KV transfers with its engine %s", departed.worker_id, departed.engine_id)
        self._attempts.sources.discard(departed.engine_id)
        await self._on_dead(departed)
        del self._probes[departed.engine_id]

    async def _registered(self, worker_id: str) -> Departed | None:
        """Who has this id now; None where nobody has, or Redis is away."""
        try:
            return await self._registry.endpoints(worker_id)
        except RedisAway:
            return None

    async def close(self) -> None:
        await cancelled(*self._probes.values())


class Meetings:
    """Connects the engine with those of the other role before the first KV, so that no request waits for handshakes.

    In a large fleet most pairs of engines exchange no KV for long: there the first transfer of a pair connects them.
    """

    def __init__(self, registry: Registry, engine: Engine) -> None:
        self._registry, self._engine = registry, engine
        self._met: set[str] = set()  # engine ids
        self._seen: tuple[object, ...] = ()
        self._meeting: asyncio.Task[None] | None = None

    def note(self, told: Heartbeat, mine: WorkerInfo) -> None:
        """After each heartbeat: looks for engines when a worker has come or gone, or this one's role has changed."""
        seen = (told.workers, told.last_departure, mine.role)
        if seen != self._seen and told.workers <= MEET_MOST_WORKERS and (self._meeting is None or self._meeting.done()):
            self._seen = seen
            # A task: an engine answers only between two steps, and heartbeats must not wait.
            self._meeting = asyncio.create_task(self._meet(mine), name="meet-engines")

    async def _meet(self, mine: WorkerInfo) -> None:
        try:
            others = [other.kv for other in (await self._registry.workers()).values() if _may_exchange(mine, other)]
            self._met.intersection_update(other.engine_id for other in others)
            for other in others:
                if other.engine_id not in self._met:
                    await self._engine.meet(other)
                    self._met.add(other.engine_id)
        except RedisAway as error:
            self._seen = ()
            log.debug("looking for other engines: %s", error)
        except RuntimeError as error:  # this engine may be dead
            log.info("the engine did not meet the others: %s", error)

    def close(self) -> None:
        if self._meeting is not None:
            self._meeting.cancel()


def _may_exchange(one: WorkerInfo, other: WorkerInfo) -> bool:
    return one.role is not other.role and one.domain == other.domain


async def _listening(departed: Departed, there: Departed | None) -> tuple[bool | None, bool | None, bool | None]:
    """`probe` of its agent, its engine, and a port of its host where nobody listens. `there`: who has its id now. A
    successor that has a port of it, as one that is configured, is the proof that it has not."""
    agent: bool | None = False
    if there is None or there.request_address != departed.request_address:
        agent = await probe_address(departed.request_address)
    if agent:
        return agent, None, None
    taken = there is not None and (there.kv_host, there.kv_port) == (departed.kv_host, departed.kv_port)
    engine, host = await asyncio.gather(*(probe(departed.kv_host, port) for port in (departed.kv_port, NOBODYS_PORT)))
    return agent, False if taken else engine, host


async def probe(host: str, port: int) -> bool | None:
    """True: a process listens there. False: the connection was refused, so none does. None: no answer, or no valid
    address, which proves nothing."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError, ValueError, OverflowError):
        return None
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def probe_address(address: str) -> bool | None:
    """`probe` of a tcp:// address."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return await probe(host.strip("[]"), int(port)) if port.isdecimal() else None
