"""Who is let into the mesh, as whom, and what it costs to try without a key."""

import asyncio
import contextlib
import itertools
import os
import socket
import time
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from support_relay import Relay
from support_wait import DEADLINE_S, until

from orchestrator.wire import curve, messages
from orchestrator.wire.addresses import AddressError, Listening
from orchestrator.wire.curve import KeyPair, use_as_client
from orchestrator.wire.messages import Abort, Call, Hello, Welcome
from orchestrator.wire.sockets import MAX_FRAME_BYTES, frames_of
from orchestrator.wire.transport import FrontendTransport, WorkerTransport

SILENCE_S = 0.5
# ZMTP 3.1 up to the first command: signature, version, mechanism, as-server, filler (RFC 37).
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01%s" + bytes(32)


class Fleet:
    """One worker, and a registry of frontends."""

    def __init__(self):
        self.registered, self.away = {}, False
        self.finds, self.find_s = 0, 0.0
        self.keys = KeyPair.new()
        self.worker = WorkerTransport(Listening("127.0.0.1"), keys=self.keys, find_frontends=self._find)
        self.context = zmq.asyncio.Context()
        self.frontends = []

    async def _find(self, keys):
        self.finds += 1
        await asyncio.sleep(self.find_s)
        if self.away:
            raise ConnectionError("Redis is away")
        return {key: self.registered[key] for key in keys if key in self.registered}

    def frontend(self, name, register=True, worker_key=""):
        keys = KeyPair.new()
        if register:
            self.registered[keys.public] = name
        frontend = FrontendTransport(name, keys=keys)
        frontend.keys = keys
        self.frontends.append(frontend)
        frontend.connect("w", self.worker.request_address, self.worker.load_address, worker_key or self.keys.public)
        return frontend

    def raw(self, kind, address, keys=None, identity=b""):
        """A peer that does what a frontend would not."""
        peer = self.context.socket(kind)
        if keys is not None:
            use_as_client(peer, keys)
            peer.setsockopt(zmq.CURVE_SERVERKEY, self.keys.public.encode())
        if identity:
            peer.setsockopt(zmq.IDENTITY, identity)
        if kind == zmq.SUB:
            peer.setsockopt(zmq.SUBSCRIBE, b"")
        peer.connect(address)
        return peer

    def close(self):
        self.context.destroy(linger=0)
        for frontend in self.frontends:
            frontend.close()
        self.worker.close()


@pytest.fixture
async def fleet():
    fleet = Fleet()
    yield fleet
    fleet.close()


async def received(waiting):
    return await asyncio.wait_for(waiting, DEADLINE_S)


async def silent(waiting):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting, SILENCE_S)


async def greeted(fleet, name):
    while True:
        frontend_id, message, _ = await received(fleet.worker.receive())
        assert (frontend_id, message) == (name, Hello())
        return


async def settled_descriptors():
    """How many are open when half a second changed nothing: the connection for load follows the one for requests."""
    seen = []
    while len(seen) < 10 or len(set(seen[-10:])) > 1:
        seen.append(len(os.listdir("/proc/self/fd")))
        await asyncio.sleep(0.05)
    return seen[-1]


def host_and_port(address):
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def framed(message):
    (frame,) = frames_of([messages.encode(message)])
    return frame


@pytest.mark.parametrize("wrong", ["no key", "an unregistered key", "a wrong key of the worker"])
async def test_strangers_send_and_receive_nothing(fleet, wrong):
    if wrong == "a wrong key of the worker":
        keys = KeyPair.new()
        fleet.registered[keys.public] = "intruder"
        worker_key, fleet.keys = fleet.keys, KeyPair.new()
    else:
        keys = KeyPair.new() if wrong == "an unregistered key" else None
    requests = fleet.raw(zmq.DEALER, fleet.worker.request_address, keys)
    loads = fleet.raw(zmq.SUB, fleet.worker.load_address, keys)
    requests.send(framed(Call(1, "reset_prefix_cache")))

    async def publish():
        while True:
            fleet.worker.publish(messages.PrefixEvents("w", 1))
            await asyncio.sleep(0.01)

    publishing = asyncio.create_task(publish())
    await silent(fleet.worker.receive())
    await silent(loads.recv_multipart())
    await silent(requests.recv_multipart())
    publishing.cancel()
    if wrong == "a wrong key of the worker":
        fleet.keys = KeyPair(worker_key.public, "")
    fleet.frontend("member")
    await greeted(fleet, "member")


async def test_a_frontend_cannot_take_the_identity_of_another(fleet):
    honest = fleet.frontend("honest")
    await greeted(fleet, "honest")
    keys = KeyPair.new()
    fleet.registered[keys.public] = "thief"
    route = fleet.worker._routes["honest"]
    for identity in (b"honest", route):  # the name, and what ZMQ knows the connection by
        thief = fleet.raw(zmq.DEALER, fleet.worker.request_address, keys, identity)
        thief.send(framed(Hello()))
        thief.send(framed(Abort("request-of-honest", 1)))
        with contextlib.suppress(TimeoutError):
            while True:
                name, _, _ = await asyncio.wait_for(fleet.worker.receive(), SILENCE_S)
                assert name == "thief"
        assert fleet.worker.send("honest", Welcome(), [b"tokens"])
        assert (await received(honest.receive()))[1:] == (Welcome(), [b"tokens"])
        await silent(thief.recv_multipart())


async def test_a_recorded_conversation_can_not_be_replayed(fleet):
    """Every byte that a member has sent is sent again: the worker answers with new keys, which the bytes do not fit."""
    recorded = bytearray()
    host, port = host_and_port(fleet.worker.request_address)

    def record(data, forth):
        recorded.extend(data if forth else b"")
        return data

    async with Relay(host, port, record).listening() as relayed:
        keys = KeyPair.new()
        fleet.registered[keys.public] = "member"
        member = fleet.raw(zmq.DEALER, f"tcp://127.0.0.1:{relayed}", keys)
        member.send(framed(Hello()))
        member.send(framed(Abort("r", 1)))
        assert [(await received(fleet.worker.receive()))[1] for _ in range(2)] == [Hello(), Abort("r", 1)]
        assert len(recorded) > 100 and b"abort" not in recorded  # nor can it be read
        _, writer = await asyncio.open_connection(host, port)
        writer.write(recorded)
        await silent(fleet.worker.receive())
        writer.close()


async def test_a_changed_byte_ends_the_connection_and_is_not_taken(fleet):
    forging = False

    def forge(data, forth):
        return data[:-1] + bytes([data[-1] ^ 1]) if forging and forth else data

    async with Relay(*host_and_port(fleet.worker.request_address), forge).listening() as relayed:
        keys = KeyPair.new()
        fleet.registered[keys.public] = "member"
        member = fleet.raw(zmq.DEALER, f"tcp://127.0.0.1:{relayed}", keys)
        member.send(framed(Hello()))
        await greeted(fleet, "member")
        forging = True
        member.send(framed(Abort("r", 1)))
        await silent(fleet.worker.receive())


async def test_a_frame_above_the_limit_ends_its_connection_and_no_other(fleet):
    honest = fleet.frontend("honest")
    await greeted(fleet, "honest")
    keys = KeyPair.new()
    fleet.registered[keys.public] = "large"
    large = fleet.raw(zmq.DEALER, fleet.worker.request_address, keys)
    large.send(bytes(MAX_FRAME_BYTES + 1024))
    await silent(fleet.worker.receive())
    assert honest.send("w", Abort("r", 1), [b"payload"])
    assert await received(fleet.worker.receive()) == ("honest", Abort("r", 1), [b"payload"])


async def test_large_messages_travel_in_pieces_both_ways(fleet):
    frontend = fleet.frontend("f")
    await greeted(fleet, "f")
    payload = [os.urandom(3 * MAX_FRAME_BYTES + 5), b"", b"small"]
    assert frontend.send("w", Abort("r", 1), payload)
    assert await received(fleet.worker.receive()) == ("f", Abort("r", 1), payload)
    assert fleet.worker.send("f", Welcome(), payload)
    assert await received(frontend.receive()) == ("w", Welcome(), payload)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("port", ["requests", "loads"])
@pytest.mark.parametrize("opening", [b"", GREETING % b"NULL", GREETING % b"CURVE", b"GET / HTTP/1.1\r\n\r\n"])
async def test_connections_without_key_leave_nothing(fleet, monkeypatch, port, opening):
    """Frames of 256 MiB are announced, and a part is sent: neither descriptors nor memory stay behind."""
    fleet.worker.close()
    monkeypatch.setattr("orchestrator.wire.sockets.HANDSHAKE_TIMEOUT_MS", 500)
    fleet.worker = WorkerTransport(Listening("127.0.0.1"), keys=fleet.keys, find_frontends=fleet._find)
    address = fleet.worker.request_address if port == "requests" else fleet.worker.load_address
    fleet.frontend("member")
    await greeted(fleet, "member")
    descriptors, memory = await settled_descriptors(), resident_bytes()
    strangers = [socket.create_connection(host_and_port(address)) for _ in range(100)]
    for stranger in strangers:
        stranger.setblocking(False)
        with contextlib.suppress(OSError):
            stranger.send(opening + b"\x06" + (256 << 20).to_bytes(8, "big") + bytes(1 << 16))
    for stranger in strangers:  # each is closed by the worker
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while await loop.sock_recv(stranger, 65536):
                pass
        stranger.close()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    assert resident_bytes() - memory < 64 << 20
    fleet.frontend("another")
    await greeted(fleet, "another")


async def test_a_wrong_key_is_logged_once_on_both_sides_with_what_to_do(fleet, caplog):
    fleet.frontend("stranger", register=False)
    fleet.frontend("mistaken", worker_key=KeyPair.new().public)
    await until(lambda: caplog.text.count("do not accept each other's keys") >= 2)
    await asyncio.sleep(SILENCE_S)
    assert caplog.text.count("do not accept each other's keys") == 2  # one of each frontend, however often it tries
    assert caplog.text.count(f"refused a connection to {fleet.worker.request_address}") == 1
    assert caplog.text.count("same Redis, namespace and security.mesh") >= 3
    assert fleet.keys.secret not in caplog.text


async def test_a_frontend_that_registers_late_is_let_in_when_it_tries_again(fleet):
    late = fleet.frontend("late", register=False)
    await silent(fleet.worker.receive())
    fleet.registered[late.keys.public] = "late"
    await greeted(fleet, "late")
    fleet.worker.send("late", Welcome())
    assert (await received(late.receive()))[1] == Welcome()


@contextlib.asynccontextmanager
async def strangers(fleet, count, keys=None):
    """They connect again and again, each time with a new key, or with `keys`."""

    async def knock():
        while True:
            peer = fleet.raw(zmq.DEALER, fleet.worker.request_address, keys or KeyPair.new())
            await asyncio.sleep(0.1)
            peer.close(linger=0)

    knocking = [asyncio.create_task(knock()) for _ in range(count)]
    yield
    for each in knocking:
        each.cancel()
    await asyncio.gather(*knocking, return_exceptions=True)


async def test_strangers_neither_hold_up_frontends_nor_ask_redis_as_often_as_they_like(fleet):
    fleet.find_s = 0.02
    async with strangers(fleet, 100):
        await until(lambda: fleet.finds > 3)
        fleet.finds, began = 0, time.monotonic()
        for number in range(5):
            fleet.frontend(f"real-{number}")
            await greeted(fleet, f"real-{number}")
            await asyncio.sleep(0.2)
        assert 3 < fleet.finds <= (time.monotonic() - began) / curve._LOOK_EVERY_S + 2


async def test_strangers_hold_up_no_frontend_while_redis_is_away(fleet):
    known = fleet.frontend("known")
    await greeted(fleet, "known")
    fleet.away, fleet.find_s = True, 0.5
    fleet.frontend("unknown")
    async with strangers(fleet, 100):
        await until(lambda: fleet.finds > 3)
        known.disconnect("w")
        known.connect("w", fleet.worker.request_address, fleet.worker.load_address, fleet.keys.public)
        await greeted(fleet, "known")  # and not the unknown one, until Redis is back
        fleet.away, fleet.find_s = False, 0.0
        await greeted(fleet, "unknown")


async def test_a_refused_key_is_looked_up_now_and_then_only_and_forgotten(fleet):
    asked = []
    find, gate, keys = fleet._find, fleet.worker._gate, KeyPair.new()

    async def noted(wanted):
        asked.extend((key, time.monotonic()) for key in wanted)
        return await find(wanted)

    gate._find = noted
    async with strangers(fleet, 5, keys):
        await until(lambda: len(asked) >= 3)
        assert {public for public, _ in asked} == {keys.public}
        assert all(later - earlier >= curve._REFUSED_S for (_, earlier), (_, later) in itertools.pairwise(asked))
        fleet.registered[keys.public] = "late"
        await until(lambda: keys.public in gate._names)
    await asyncio.sleep(curve._REFUSED_S)
    fleet.frontend("another")
    await until(lambda: "another" in gate._names.values())
    assert not gate._refused


async def test_encrypted_and_open_processes_do_not_talk(fleet):
    for keys, key, error in ((None, fleet.keys.public, ""), (KeyPair.new(), "", "is not encrypted.*")):
        frontend = FrontendTransport("f", keys=keys)
        fleet.frontends.append(frontend)
        with pytest.raises(AddressError, match=f"{error}same security.mesh"):
            frontend.connect("w", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", key)


def test_secrets_are_in_no_repr():
    keys = KeyPair.new()
    assert keys.secret not in f"{keys} {keys!r}" and keys.public in repr(keys)
