"""When a peer counts as dead: proof by its ports, not by what Redis says of it."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest
from support_wait import DEADLINE_S, until

from orchestrator.store.client import RedisAway
from orchestrator.store.fields import Departed
from orchestrator.wire.messages import PROTOCOL_VERSION, Hello
from orchestrator.wire.sockets import Sent
from workers import peers as peers_module
from workers.attempts import Attempt, Attempts
from workers.engine import Phase
from workers.peers import FRONTEND_AWAY_S, Frontends, Peers, probe, probe_address


class Listener:
    """A port that accepts, until closed; that `backlog` is of connections that nobody takes."""

    def __init__(self, backlog: int | None = None) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        self.port = self.socket.getsockname()[1]


class FakeRegistry:
    """Knows where some workers listen; may be away."""

    def __init__(self) -> None:
        self.there, self.away = dict[str, Departed](), False

    async def endpoints(self, worker_id: str) -> Departed | None:
        if self.away:
            raise RedisAway("gone")
        return self.there.get(worker_id)


def departed(name: str, request_port: int, kv_port: int, claims: bool = False) -> Departed:
    return Departed(name, f"engine-{name}", f"tcp://127.0.0.1:{request_port}", "127.0.0.1", kv_port, claims)


class Watched:
    """Peers of a worker that receives KV from the engines that its tests name."""

    def __init__(self, *sources: str, timeout_s: float = 60.0) -> None:
        self.registry, self.dead, self.attempts, self.claims = FakeRegistry(), list[str](), Attempts(), False
        self.peers = Peers(
            "me",
            self.registry,  # type: ignore[arg-type]
            self.attempts,
            timeout_s,
            lambda: self.claims,
            self._died,
        )
        self.attempts.sources.update(sources)

    async def _died(self, engine: Departed) -> None:
        self.dead.append(engine.engine_id)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "PROBE_INTERVAL_S", 0.01)


@pytest.fixture
async def alive() -> AsyncIterator[tuple[Listener, Listener]]:
    ports = Listener(), Listener()
    yield ports
    for port in ports:
        port.socket.close()


async def test_departed_but_listening_is_alive_until_both_ports_are_gone(alive: tuple[Listener, Listener]) -> None:
    agent, engine = alive
    watched = Watched("engine-a")
    watched.peers.note([departed("a", agent.port, engine.port)], idle=False)
    agent.socket.close()
    # Its agent is gone; its engine still listens, so it could still write.
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert watched.dead == [] and watched.peers.suspects == {"engine-a"}
    engine.socket.close()
    await until(lambda: watched.dead == ["engine-a"])
    await until(lambda: not watched.peers.suspects)
    assert not watched.attempts.sources
    await watched.peers.close()


async def test_returned_worker_is_not_probed(alive: tuple[Listener, Listener]) -> None:
    agent, engine = alive
    watched = Watched("engine-a")
    watched.registry.away = True  # which says nothing
    watched.peers.note([departed("a", agent.port, engine.port)] * 2, idle=False)
    for _ in range(10):
        await asyncio.sleep(0.005)
    assert watched.peers.suspects == {"engine-a"}
    watched.registry.away, watched.registry.there["a"] = False, departed("successor", 1, 1)
    for _ in range(10):
        await asyncio.sleep(0.005)
    assert watched.peers.suspects == {"engine-a"}
    watched.registry.there["a"] = departed("a", agent.port, engine.port)
    await until(lambda: not watched.peers.suspects)
    assert watched.dead == [] and watched.attempts.sources == {"engine-a"}
    await watched.peers.close()


async def test_a_port_that_its_successor_has_is_not_its_own_any_more(alive: tuple[Listener, Listener]) -> None:
    """Ports may be configured, and taken anew by the process that is started in place of a dead one."""
    agent, engine = alive
    watched = Watched("engine-a")
    watched.peers.note([departed("a", agent.port, engine.port)], idle=False)
    elsewhere = Listener()
    watched.registry.there["a"] = departed("successor", agent.port, elsewhere.port)
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert watched.dead == [], "its engine may still write"
    watched.registry.there["a"] = departed("successor", agent.port, engine.port)
    await until(lambda: watched.dead == ["engine-a"])
    await until(lambda: not watched.peers.suspects)
    elsewhere.socket.close()
    await watched.peers.close()


async def test_only_departures_that_matter_here_are_probed() -> None:
    ended, claimed = departed("a", 1, 1), departed("b", 1, 1, claims=True)
    watched = Watched()
    assert not watched.peers.concerned
    watched.peers.note([ended, claimed, departed("me", 1, 1, claims=True)], idle=False)
    assert not watched.peers.suspects
    watched.claims = True  # it takes what they leave behind
    assert watched.peers.concerned
    watched.peers.note([ended, claimed, departed("me", 1, 1, claims=True)], idle=False)
    assert watched.peers.suspects == {"engine-b"}
    watched.claims = False
    # It pushes to an engine that the agent does not know: any may be it, until it has ended.
    watched.attempts.note_pushing(Attempt("k", "r", 1, "f", Phase.PREFILL, 10, 0.0))
    assert watched.peers.concerned
    watched.peers.note([ended], idle=False)
    assert watched.peers.suspects == {"engine-a", "engine-b"}
    watched.attempts.sources.add("engine-c")
    watched.peers.note([departed("c", 1, 1)], idle=True)
    assert watched.peers.suspects == {"engine-a", "engine-b"} and not watched.peers.concerned
    await watched.peers.close()


async def test_departures_matter_to_a_worker_that_lends_prefixes() -> None:
    watched = Watched()
    watched.attempts.lends = True
    assert watched.peers.concerned
    watched.peers.note([departed("a", 1, 1)], idle=False)
    assert watched.peers.suspects == {"engine-a"}
    watched.peers.note([], idle=True)
    assert not watched.peers.concerned
    await watched.peers.close()


async def test_a_stopped_process_is_not_dead_though_its_host_drops_further_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may go on, and with it its WRITEs. What its peers ask meanwhile fills the queues of its sockets."""
    monkeypatch.setattr(peers_module, "PROBE_TIMEOUT_S", 0.05)
    ports = Listener(backlog=0), Listener(backlog=0)
    agent, engine = (port.port for port in ports)
    watched = Watched("engine-a", timeout_s=0.1)
    watched.peers.note([departed("a", agent, engine)], idle=False)

    async def answers_nobody() -> bool:
        return not (await probe("127.0.0.1", agent) or await probe("127.0.0.1", engine))

    await until(answers_nobody, "its queues are full")
    await asyncio.sleep(1.0)
    assert watched.dead == [] and watched.peers.suspects == {"engine-a"}
    for port in ports:
        port.socket.close()
    await until(lambda: watched.dead == ["engine-a"])
    await watched.peers.close()


@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1", "tcp://127.0.0.1:many", "tcp://127.0.0.1:99999"])
async def test_invalid_address_proves_nothing(address: str) -> None:
    """Whoever wrote Redis may have damaged it: a probe that ends by it would never be made again."""
    assert await probe_address(address) is None
    assert await probe("a..b", 1) is None


async def test_an_unreachable_host_is_dead_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_answer(host: str, port: int) -> None:
        return None

    monkeypatch.setattr(peers_module, "probe", no_answer)
    watched = Watched("engine-a", timeout_s=0.1)
    watched.peers.note([departed("a", 1, 1)], idle=False)
    await asyncio.sleep(0)
    assert watched.dead == []
    await until(lambda: watched.dead == ["engine-a"])
    await watched.peers.close()


async def test_one_port_that_refuses_proves_nothing_while_the_other_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused_or_silent(host: str, port: int) -> bool | None:
        return False if port == 1 else None

    monkeypatch.setattr(peers_module, "probe", refused_or_silent)
    for ports in ((1, 2), (2, 1)):
        watched = Watched("engine-a")
        watched.peers.note([departed("a", *ports)], idle=False)
        for _ in range(10):
            await asyncio.sleep(0.005)
        assert watched.dead == [] and watched.peers.suspects
        await watched.peers.close()


async def test_stall_of_prober_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = 0

    async def no_answer_while_paused(host: str, port: int) -> bool | None:
        nonlocal probes
        probes += 1
        if probes > 4:
            return True
        if probes == 2:
            time.sleep(0.5)  # noqa: ASYNC251 - this process does not run
        return None

    monkeypatch.setattr(peers_module, "probe", no_answer_while_paused)
    monkeypatch.setattr(peers_module, "PROBE_TIMEOUT_S", 0.05)
    watched = Watched("engine-a", timeout_s=0.3)
    watched.peers.note([departed("a", 1, 1)], idle=False)
    await until(lambda: probes > 6)
    assert watched.dead == []
    await watched.peers.close()


def test_unreachable_frontend_is_gone_after_running_time() -> None:
    connected = {"a", "b"}
    frontends = Frontends(lambda frontend_id, *message: Sent.YES if frontend_id in connected else Sent.UNREACHABLE)
    assert frontends.gone({"a", "b"}, 4.0, now=0.0) == []
    connected.clear()
    assert frontends.gone({"a", "b"}, 4.0, now=1.0) == []
    assert frontends.gone({"a", "b"}, 4.0, now=7.0, late_s=5.0) == []  # after a pause nobody has connected again yet
    connected.add("b")
    assert frontends.gone({"a", "b"}, 4.0, now=9.9) == []
    connected.clear()
    assert frontends.gone({"a", "b"}, 4.0, now=10.1) == ["a"]


def test_frontend_that_was_out_of_reach_long_ago_is_not_gone_at_once() -> None:
    sent = Sent.NOT_READ
    frontends = Frontends(lambda *message: sent)
    assert frontends.gone({"a", "b"}, 1.0, now=0.0) == []
    sent = Sent.YES
    frontends.reachable("a")
    assert frontends.gone(set(), 1.0, now=1.0) == []
    sent = Sent.NOT_READ
    assert frontends.gone({"a"}, 1.0, now=2.0) == []
    assert frontends.gone({"a"}, 1.0, now=100.0) == ["a"]
    frontends.forget("a", now=100.0)
    assert not frontends._unreachable_since, "nor is one that has no requests here remembered for ever"


async def test_hello_that_never_comes_leaves_nothing() -> None:
    frontends = Frontends(lambda *message: Sent.YES)
    assert not await frontends.wait_for_hello("dead", 0.01)
    assert not frontends._greetings
    first = asyncio.create_task(frontends.wait_for_hello("late", 0.05))
    await asyncio.sleep(0)
    second = asyncio.create_task(frontends.wait_for_hello("late", 5.0))
    assert not await first  # the other one still waits
    frontends.on_hello("late", Hello(PROTOCOL_VERSION))
    assert await second
    assert not frontends._greetings


async def test_frontend_that_was_waited_for_is_away_until_it_greets() -> None:
    frontends, now = Frontends(lambda *message: Sent.UNREACHABLE), time.monotonic()
    waiting = asyncio.create_task(frontends.wait_for_hello("late", DEADLINE_S))
    await until(lambda: frontends.away(time.monotonic()) == ["late"], "its jobs are left, also while it is waited for")
    frontends.on_hello("late", Hello(PROTOCOL_VERSION))
    assert await waiting and frontends.away(now) == []
    frontends.forget("gone", now)
    assert frontends.away(now) == ["gone"]
    frontends.forget("gone later", now + FRONTEND_AWAY_S)
    assert [*frontends._away] == ["gone later"], "also where nobody asks, as on decode workers"
    assert frontends.away(now + 2 * FRONTEND_AWAY_S) == []
    assert not frontends._away


async def test_probe(alive: tuple[Listener, Listener]) -> None:
    port = alive[0].port
    assert await probe("127.0.0.1", port) is True
    assert await probe_address(f"tcp://127.0.0.1:{port}") is True
    alive[0].socket.close()
    assert await probe("127.0.0.1", port) is False
    assert await probe("no-such-host.invalid", 1) is None
