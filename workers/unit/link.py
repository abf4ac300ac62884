"""The ranks of a data-parallel group as one, on whichever hosts: they find each other before their engines start, and
once one of them has gone, all end.

The first rank listens, and tells by Redis where, with a token of this attempt. The others connect to it. Once all have
come it tells them where their engines meet. From then on the ranks at both ends of a connection end when that breaks or
is silent. A rank comes to one attempt only, and an attempt has each rank once: old and new ones are never mixed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.metadata
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping

from orchestrator.config.settings import Config, ConfigError
from orchestrator.process.tasks import cancelled, first_of, ticks
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.fields import Rendezvous
from orchestrator.store.registry import Registry
from orchestrator.types import PauseState
from orchestrator.wire.addresses import Listening, hold_port, in_url
from orchestrator.wire.messages import PROTOCOL_VERSION
from workers.engine import Engine, EngineDead, EngineInfo, EngineStartFailed, Group, started
from workers.load.board import announce, withdraw
from workers.unit.messages import Beat, Come, Died, Message, Met, Paused, Peer, Refused, decode

log = logging.getLogger("pd.worker")

_BEAT_S = 1.0
_ANSWER_S = 5.0  # for a connection, and its first message
_VERDICT_S = 1.0  # on which engine of the group has died first
_TOLD_S = 5.0  # for so long Redis keeps where to meet; it is told again at each beat
# A connection without a beat for so many times workers.timeout_s, or beats, has no rank at its other end: its host is
# frozen, or no packet reaches it. A rank that has ended is noticed at once.
_SILENT_TIMEOUTS = 4.0
_ONE_HOST = "127.0.0.1"


class GroupLink:
    """`start` the engine, then `watch` for as long as it serves. A worker that is alone meets nobody."""

    def __init__(
        self, config: Config, redis: Redis, worker_id: str, ranks: tuple[str, ...], at: Listening, generation: int
    ) -> None:
        """`redis`: closed when all have met. `ranks`: the workers of the unit in their order; none: it is alone."""
        self.ranks, self._id, self.leads = ranks, worker_id, not ranks or worker_id == ranks[0]
        self._config, self._redis, self._at, self._generation = config, redis, at, generation
        self._registry = Registry(redis, config.namespace)
        self._token = secrets.token_hex(16)
        self._silence_s = _SILENT_TIMEOUTS * max(config.workers.timeout_s, _BEAT_S)
        self.pauses: asyncio.Queue[PauseState] = asyncio.Queue()  # that other ranks tell
        self._peers: dict[str, Peer] = {}  # the first rank has all others, they have it
        self._complete, self._outdated = asyncio.Event(), False
        self._met = self._judges = False
        self._engine: Engine | None = None
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # done once a rank has gone
        self._blamed = asyncio.Event()  # of all engines this one has died first
        self._server: asyncio.Server | None = None
        self._held: contextlib.ExitStack | None = None  # the port where engines meet
        self._tasks: list[asyncio.Task[None]] = []

    # ---- meeting -----------------------------------------------------------------------------------------------

    async def start(self, engine: Engine, limit_s: float, stopped: asyncio.Event) -> EngineInfo | None:
        """Wait for all ranks, and start the engine. None if `stopped` was set meanwhile. Raises ConfigError,
        EngineStartFailed, OSError."""
        began, self._engine = time.monotonic(), engine
        if (group := await self._meet(limit_s, stopped)) is None:
            return None
        return await started(engine, limit_s, stopped, group, self._broken, time.monotonic() - began)

    async def _meet(self, limit_s: float, stopped: asyncio.Event) -> Group | None:
        """Ranks of one host share a board."""
        if len(self.ranks) < 2:
            return Group()
        self._tasks.append(asyncio.create_task(self._beat(), name="ranks-beat"))
        meeting = self._gather() if self.leads else self._join()
        async with first_of(meeting, stopped.wait(), within_s=limit_s) as met:
            if not met.done():
                if stopped.is_set():
                    return None
                raise EngineStartFailed(f"{self._missing()} not there within workers.start_timeout_s ({limit_s:g} s)")
            told = met.result()
        await self._redis.aclose()  # a forked engine process would inherit the connection
        group = Group(told.rank, len(self.ranks), told.host, told.port)
        if told.one_host:
            name = f"{self._config.namespace}-{self.ranks[0]}-{told.port}"
            announce(name, group.rank, group.size, self._config.routing.ranks == "adp")
        elif group.rank == 0:
            log.info("the ranks are on several hosts: they are not levelled, and their balance is not measured")
        return group

    async def _gather(self) -> Met:
        """The first rank's part. Raises ConfigError, EngineStartFailed, OSError."""
        held, port = hold_port(self._at.bind, self._at.ports)
        with held:
            self._server = await asyncio.start_server(self._welcome, self._at.bind, port)
        place, said = Rendezvous(self._at.reached_at, port, self._token, release_here()), ""
        while not self._complete.is_set():
            if self._outdated:
                raise EngineStartFailed("another rank has a newer configuration: start again with that")
            if (missing := self._missing()) != said:
                log.info("%s not there yet: the ranks meet at %s:%d", missing, in_url(place.host), port)
                said = missing
            with contextlib.suppress(RedisAway):
                await self._registry.tell_rendezvous(self.ranks[0], place, _TOLD_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    await self._complete.wait()
        # Without a pause from here to the end, so that nobody leaves between.
        hosts = {name: self._peers[name].host if name in self._peers else place.host for name in self.ranks}
        if why := refusal(self._config, hosts.values()):
            self.tell(Refused(why, final=True))
            raise ConfigError(why)
        one_host = len(set(hosts.values())) == 1
        where = _ONE_HOST if one_host else place.host
        try:
            self._held, engines_port = hold_port(where, None if one_host else self._at.ports)
        except OSError as error:
            why = f"the first rank cannot listen at {where} ({error}): see its workers.advertise and workers.ports"
            self.tell(Refused(why))
            raise EngineStartFailed(why) from error
        self._met = True
        mets = {name: Met(where, engines_port, one_host, rank) for rank, name in enumerate(side_by_side(hosts))}
        for name, peer in self._peers.items():
            peer.send(mets[name])
        return mets[self._id]

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody has connected to the first rank."""
        with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError, ValueError, RecursionError):
            async with asyncio.timeout(_ANSWER_S):
                come = decode(await reader.readline())
            if not isinstance(come, Come) or not hmac.compare_digest(come.token.encode(), self._token.encode()):
                return
            peer = Peer(writer, come.host)
            if (come.ranks, come.generation) != (self.ranks, self._generation) or come.worker_id not in self.ranks[1:]:
                why = (
                    f"{come.worker_id} was started with --ranks {','.join(come.ranks)} and configuration "
                    f"{come.generation}, the first rank with --ranks {','.join(self.ranks)} and {self._generation}: "
                    "start both with the same"
                )
                log.warning("%s", why)
                peer.send(Refused(why))
                self._outdated |= come.ranks == self.ranks and come.generation > self._generation
            elif self._met:
                self._break(f"{come.worker_id} has started again")
            else:
                if (before := self._peers.get(come.worker_id)) is not None:
                    before.close()
                self._peers[come.worker_id] = peer
                if len(self._peers) == len(self.ranks) - 1:
                    self._complete.set()
                await self._follow(come.worker_id, reader, peer)

    async def _join(self) -> Met:
        """The other ranks' part. Raises ConfigError, EngineStartFailed."""
        first, said = self.ranks[0], ""
        while True:
            place = None
            with contextlib.suppress(RedisAway):
                place = await self._registry.rendezvous(first)
            answer = await self._ask(first, place) if place is not None else "it has not told where yet"
            match answer:
                case Met():
                    return answer
                case Refused(why, final):
                    raise ConfigError(why) if final else EngineStartFailed(why)
            if answer != said:
                log.info("waits for %s, the first rank of its group: %s", first, answer)
                said = answer
            await asyncio.sleep(_BEAT_S)

    async def _ask(self, first: str, place: Rendezvous) -> Met | Refused | str:
        """Come to this attempt, and wait for its other ranks. Returns a text where it came to nothing. Who runs another
        release is refused here, not by the first rank: what they say to each other is what may differ."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection(place.host, place.port)
        except (OSError, ValueError, OverflowError) as error:  # the last two: it has named no address
            return f"{in_url(place.host)}:{place.port} is not reached ({str(error) or 'no answer'}); see workers.ports"
        peer, ended = Peer(writer), "it has ended"
        if why := other_release(first, place.release, self._id, release_here()):
            peer.close()
            return Refused(why)
        self._peers[first] = peer
        peer.send(Come(place.token, self._id, self.ranks, self._generation, self._at.reached_at))
        try:
            while line := await self._line(reader):
                match decode(line):
                    case Refused() as refused:
                        return refused
                    case Met() as met:
                        self._met = True
                        self._tasks.append(asyncio.create_task(self._follow(first, reader, peer), name="ranks"))
                        return met
        except (ValueError, RecursionError):
            ended = "its answer cannot be read"
        except (OSError, TimeoutError):
            pass
        del self._peers[first]
        writer.close()
        return ended

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        """Empty at its end. Raises TimeoutError where the first rank is silent, OSError, ValueError."""
        async with asyncio.timeout(self._silence_s):
            return await reader.readline()

    def _missing(self) -> str:
        if not self.leads:  # it knows of the first one only
            return "the other ranks are"
        absent = [name for name in self.ranks if name != self._id and name not in self._peers]
        return f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'}"

    # ---- staying together --------------------------------------------------------------------------------------

    async def watch(self, leaving: Callable[[], bool], end: Callable[[], None]) -> None:
        """Run until a rank has gone. Raises EngineDead then; calls `end` and goes on where this one is leaving, as the
        others are in order. Whichever way it ends, the others notice."""
        self._judges = True
        try:
            why = await self._broken
            if not leaving():
                raise EngineDead(f"cannot go on: {why}")
            end()
            await asyncio.Event().wait()
        finally:
            await self.close()

    async def died(self) -> bool:
        """The engine here has died by itself. Whether it may be the first of its unit to do so, by the order in which
        the first rank hears of it: one that steps with the others dies of their end too. Where that rank does not
        answer, nobody knows, and each counts as the first. So does one whose process ended without a word, which is
        noticed later than what the others die of by it: those say so first."""
        if self.leads and not self._broken.done():
            self._break(f"{self._id} has ended")
            self._blamed.set()
        elif not self._broken.done():
            self.tell(Died())
            async with first_of(self._blamed.wait(), asyncio.shield(self._broken), within_s=_VERDICT_S):
                pass
        if self._blamed.is_set() or not self._broken.done():
            return True
        return self._engine is not None and await self._engine.ended_suddenly()

    async def _follow(self, name: str, reader: asyncio.StreamReader, peer: Peer) -> None:
        """Returns when the connection has ended."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            while line := await reader.readline():
                peer.missed = 0
                match decode(line):
                    case Paused(state):
                        self.pauses.put_nowait(state)
                    case Died() if not self.leads:
                        self._blamed.set()
                    case Died() if not self._broken.done():
                        peer.send(Died())
                        self._broken.set_result(f"{name} has ended")  # `watch` ends: it is sent before all is closed
        peer.close()
        if self._peers.get(name) is not peer:
            return  # it has connected again
        if self._met:
            self._break(f"{name} has ended")
        else:
            del self._peers[name]
            self._complete.clear()

    async def _beat(self) -> None:
        async for late_s in ticks(_BEAT_S):
            self.tell(Beat())
            for name, peer in self._peers.items():
                peer.missed = peer.missed + 1 if late_s < _BEAT_S else 0
                if self._judges and peer.missed * _BEAT_S > self._silence_s:
                    self._break(f"{name} has been silent for {self._silence_s:g} s")

    def _break(self, why: str) -> None:
        """Tell this rank, and the others by closing their connections."""
        if not self._broken.done():
            self._broken.set_result(why)
        for peer in self._peers.values():
            peer.close()

    def tell(self, message: Message) -> None:
        """The first rank tells all others, and they tell it."""
        for peer in self._peers.values():
            peer.send(message)

    async def close(self) -> None:
        """The other ranks notice at once. Idempotent."""
        await cancelled(*self._tasks)
        for peer in self._peers.values():
            peer.close()
        if self._server is not None:
            self._server.close()
        if self._held is not None:
            self._held.close()
            withdraw()


def release_here() -> str:
    """The same for all ranks of a group: they read what others of it write."""
    try:
        engine = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        engine = "none"
    return f"protocol {PROTOCOL_VERSION} with vLLM {engine}"


def other_release(first: str, runs: str, here: str, release: str) -> str | None:
    """Why `here` cannot be in a group whose first rank `runs` this release; None if both have one."""
    if runs == release:
        return None
    return (
        f"{first} runs {runs}, {here} {release}: start all ranks of a group with one release; after an upgrade of one "
        "host, upgrade the others and start their ranks again"
    )


def side_by_side(hosts: Mapping[str, str]) -> list[str]:
    """In this order ranks become engines: those of one host follow each other, since DeepEP takes eight engines in a
    row for those of a host. `hosts`: of all ranks in the order of their ids; the first stays so."""
    in_order = list(hosts.values())
    return sorted(hosts, key=lambda name: in_order.index(hosts[name]))


def refusal(config: Config, hosts: Collection[str]) -> str | None:
    """Why ranks at these addresses cannot be one group; None if they can."""
    hosts = sorted(set(hosts))
    if len(hosts) > 1 and any(":" in host for host in hosts):
        return f"workers.advertise: vLLM's ranks meet over IPv4 only, and these are at {', '.join(hosts)}"
    if len(hosts) > 1 and not config.security.trust_network:
        return (
            f"security.trust_network: the ranks of this group are on several hosts ({', '.join(hosts)}), and whoever "
            "reaches vLLM's ports between them can run programs there; set it to true where nobody else is on that "
            "network"
        )
    return None
