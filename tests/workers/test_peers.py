"""When a peer counts as dead: proof by its ports, not by what Redis says of it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from support_workers import until

from orchestrator.store.client import RedisAway
from orchestrator.store.events import Joined, Left, Resync
from orchestrator.types import Peer, Role, WorkerState
from workers import peers as peers_module
from workers.peers import Frontends, Peers, listening, probe


class Listener:
    """A port that accepts, until closed."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]


class FakeRegistry:
    """Answers `peers()`, and counts how often; may be away."""

    def __init__(self, *registered: Peer) -> None:
        self.registered, self.away, self.reads = list(registered), False, 0

    async def peers(self) -> list[Peer]:
        self.reads += 1
        if self.away:
            raise RedisAway("gone")
        return list(self.registered)


def peer_of(name: str, request_port: int, kv_port: int, engine_id: str = "") -> Peer:
    requests = f"tcp://127.0.0.1:{request_port}"
    return Peer(name, engine_id or f"engine-{name}", requests, "127.0.0.1", kv_port, Role.DECODE, WorkerState.READY, 0)


class Watched:
    def __init__(self, registry: FakeRegistry, timeout_s: float = 60.0) -> None:
        self.registry, self.dead = registry, list[str]()
        self.peers = Peers("me", registry, timeout_s, self._died)  # type: ignore[arg-type]

    async def _died(self, engine: Peer) -> None:
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


async def test_missing_but_listening_is_alive_until_both_ports_are_gone(alive: tuple[Listener, Listener]) -> None:
    agent, engine = alive
    watched = Watched(FakeRegistry(peer_of("a", agent.port, engine.port)))
    await watched.peers.compare()
    watched.registry.registered.clear()
    await watched.peers.compare()
    agent.socket.close()
    # Its agent is gone; its engine still listens, so it could still write.
    await until(lambda: asyncio.all_tasks())
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert watched.dead == []
    engine.socket.close()
    await until(lambda: watched.dead == ["engine-a"])
    await watched.peers.compare()
    assert watched.dead == ["engine-a"]
    await watched.peers.close()


async def test_one_that_comes_back_is_not_probed_any_more(alive: tuple[Listener, Listener]) -> None:
    agent, engine = alive
    info = peer_of("a", agent.port, engine.port)
    watched = Watched(FakeRegistry(info))
    await watched.peers.compare()
    watched.registry.registered = []
    await watched.peers.compare()
    watched.registry.registered = [info]
    await watched.peers.compare()
    agent.socket.close()
    engine.socket.close()
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert watched.dead == []
    await watched.peers.close()


async def test_a_successor_of_the_same_id_does_not_hide_the_dead(alive: tuple[Listener, Listener]) -> None:
    agent, engine = alive
    gone = Listener()
    gone.socket.close()
    watched = Watched(FakeRegistry(peer_of("a", gone.port, gone.port, "old")))
    await watched.peers.compare()
    watched.registry.registered = [peer_of("a", agent.port, engine.port, "new")]
    await watched.peers.compare()
    await until(lambda: watched.dead == ["old"])
    await watched.peers.close()


async def test_events_are_followed_without_asking_redis(alive: tuple[Listener, Listener]) -> None:
    agent, engine = alive
    gone = Listener()
    gone.socket.close()
    a, b = peer_of("a", agent.port, engine.port), peer_of("b", gone.port, gone.port)
    watched = Watched(FakeRegistry(a))
    following = asyncio.create_task(watched.peers.run())
    me, frontend = Joined("me", peer=peer_of("me", 1, 1)), Joined("f", "frontend")
    for event in (Resync(), Joined("b", peer=b), me, frontend):
        watched.peers.heard(event)
    await until(lambda: len(watched.peers) == 2)
    watched.registry.away = True
    watched.peers.heard(Resync())  # Redis does not answer: nobody is dead for that
    watched.peers.heard(Left("a"))  # it left, but listens
    watched.peers.heard(Left("b"))
    await until(lambda: watched.dead == ["engine-b"])
    assert watched.peers.suspects == {"engine-a"} and len(watched.peers) == 1
    watched.peers.heard(Joined("a", peer=a))
    await until(lambda: not watched.peers.suspects)
    assert watched.registry.reads == 2 and watched.dead == ["engine-b"]
    following.cancel()
    await watched.peers.close()


async def test_redis_away_proves_nothing() -> None:
    watched = Watched(FakeRegistry(peer_of("a", 1, 1)))
    await watched.peers.compare()
    watched.registry.away = True
    with pytest.raises(RedisAway):
        await watched.peers.compare()
    assert watched.dead == [] and not watched.peers.suspects
    await watched.peers.close()


async def test_an_unreachable_host_is_dead_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_answer(host: str, port: int) -> None:
        return None

    monkeypatch.setattr(peers_module, "probe", no_answer)
    watched = Watched(FakeRegistry(peer_of("a", 1, 1)), timeout_s=0.1)
    await watched.peers.compare()
    watched.registry.registered = []
    await watched.peers.compare()
    await asyncio.sleep(0)
    assert watched.dead == []
    await until(lambda: watched.dead == ["engine-a"])
    await watched.peers.close()


async def test_a_pause_of_the_judge_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
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
    watched = Watched(FakeRegistry(peer_of("a", 1, 1)), timeout_s=0.3)
    await watched.peers.compare()
    watched.registry.registered = []
    await watched.peers.compare()
    await until(lambda: probes > 6)
    assert watched.dead == []
    await watched.peers.close()


def test_a_frontend_is_gone_when_it_was_out_of_reach_while_this_process_ran() -> None:
    connected = {"a", "b"}
    frontends = Frontends("w", lambda frontend_id, message, payload: frontend_id in connected)
    assert frontends.gone({"a", "b"}, 4.0, now=0.0) == []
    connected.clear()
    assert frontends.gone({"a", "b"}, 4.0, now=1.0) == []
    assert frontends.gone({"a", "b"}, 4.0, now=7.0, late_s=5.0) == []  # after a pause nobody has connected again yet
    connected.add("b")
    assert frontends.gone({"a", "b"}, 4.0, now=9.9) == []
    connected.clear()
    assert frontends.gone({"a", "b"}, 4.0, now=10.1) == ["a"]


async def test_itself_is_no_peer() -> None:
    watched = Watched(FakeRegistry(peer_of("me", 1, 1)))
    await watched.peers.compare()
    watched.registry.registered = []
    await watched.peers.compare()
    assert not watched.peers.suspects
    await watched.peers.close()


async def test_probe(alive: tuple[Listener, Listener]) -> None:
    port = alive[0].port
    assert await probe("127.0.0.1", port) is True
    assert await listening(f"tcp://127.0.0.1:{port}") is True
    alive[0].socket.close()
    assert await probe("127.0.0.1", port) is False
    assert await probe("no-such-host.invalid", 1) is None


async def test_a_prefill_worker_claims_only_for_decode_workers_of_its_generation() -> None:
    old, new = peer_of("d0", 1, 1), msgspec.structs.replace(peer_of("d1", 1, 1), generation=1)
    watched = Watched(FakeRegistry())
    assert watched.peers.decodes(0) and watched.peers.decodes(1), "nobody is known yet"
    watched.registry.registered = [old]
    await watched.peers.compare()
    assert watched.peers.decodes(0) and not watched.peers.decodes(1)
    watched.registry.registered.append(new)
    await watched.peers.compare()
    assert watched.peers.decodes(0) and watched.peers.decodes(1)
    for changes in ({"role": Role.PREFILL}, {"state": WorkerState.DRAINING}):
        watched.registry.registered = [old, msgspec.structs.replace(new, **changes)]  # type: ignore[arg-type]
        await watched.peers.compare()
        assert watched.peers.decodes(0) and not watched.peers.decodes(1), changes
    await watched.peers.close()
