"""The mesh's sockets: addressing, corrupt bytes, reconnection, and a peer that is gone or cut off."""

import asyncio
import contextlib
import ctypes
import fcntl
import itertools
import os
import random
import re
import socket
import struct
import termios
import time

import msgspec
import pytest
import zmq
import zmq.asyncio
from support_doors import Doors
from support_fuzz import nested
from support_wait import DEADLINE_S, until

from orchestrator.process.tasks import cancelled
from orchestrator.types import PrefixEvents, WorkerLoad
from orchestrator.wire import sockets
from orchestrator.wire.addresses import AddressError, Listening
from orchestrator.wire.curve import KeyPair, use_as_client
from orchestrator.wire.messages import Abort, Hello, Rejected, Welcome
from orchestrator.wire.transport import Disconnected, FrontendTransport, Unreadable, WorkerTransport

SO_ATTACH_FILTER = 26  # asm-generic/socket.h
NOTHING = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # struct sock_filter: drop each packet


class Link:
    """A network between a frontend and a port, which may be cut: nothing passes, and nobody is told."""

    def __init__(self):
        self.passes = asyncio.Event()
        self.passes.set()
        self.tasks = set()
        self.accepted = []
        self.said = {"frontend": bytearray(), "worker": bytearray()}

    async def to(self, address):
        """Opens a port that leads to `address`. Returns its own address."""
        host, port = address.removeprefix("tcp://").split(":")

        async def relay(who, reader, writer):
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    self.said[who] += data
                    await self.passes.wait()
                    writer.write(data)
            writer.close()

        async def accepted(reader, writer):
            self.accepted.append(writer.get_extra_info("socket"))
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
            for pipe in (("frontend", reader, there_writer), ("worker", there_reader, writer)):
                task = asyncio.create_task(relay(*pipe))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

        self.server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def cut(self):
        """As a switch does it: packets are lost both ways, and nothing is acknowledged."""
        self.passes.clear()
        for end in self.accepted:
            while struct.unpack("i", fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4)))[0]:
                await asyncio.sleep(0.01)  # what was not acknowledged would be sent again
            end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(NOTHING)))

    async def close(self):
        self.server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Mesh:
    """Both ends as a fleet makes them; who may connect is in `registered`."""

    def __init__(self, encrypted=True):
        self.encrypted = encrypted
        self.registered = {}  # public key -> frontend id
        self.made = []

    async def find(self, keys):
        return {key: self.registered[key] for key in keys if key in self.registered}

    def frontend(self, name, register=True):
        keys = KeyPair.new() if self.encrypted else None
        if keys is not None and register:
            self.registered[keys.public] = name
        self.made.append(FrontendTransport(name, keys=keys))
        return self.made[-1]

    def worker(self):
        keys = KeyPair.new() if self.encrypted else None
        worker = WorkerTransport(Listening("127.0.0.1"), keys=keys, find_frontends=self.find)
        worker.key = keys.public if keys else ""
        self.made.append(worker)
        return worker


def connect(frontend, worker, name="w", request_address=None):
    frontend.connect(name, request_address or worker.request_address, worker.load_address, worker.key)


@pytest.fixture(params=["curve", "none"])
async def mesh(request):
    mesh = Mesh(request.param == "curve")
    yield mesh
    for end in mesh.made:
        end.close()


@pytest.fixture
async def link():
    link = Link()
    yield link
    await link.close()


@pytest.fixture
async def doors():
    doors = Doors()
    doors.open_all()
    yield doors
    await doors.close()


@pytest.fixture
async def pair(mesh):
    worker, frontend = mesh.worker(), mesh.frontend("frontend-1")
    connect(frontend, worker)
    identity, hello, _ = await asyncio.wait_for(worker.receive(), DEADLINE_S)
    assert (identity, hello) == ("frontend-1", Hello())
    return worker, frontend


async def test_messages_with_payload_go_both_ways(pair):
    worker, frontend = pair
    assert frontend.send("w", Abort("r", 1), [b"a", b"b" * 1000])
    assert await asyncio.wait_for(worker.receive(), DEADLINE_S) == ("frontend-1", Abort("r", 1), [b"a", b"b" * 1000])
    assert worker.send("frontend-1", Welcome(), [b"x"])
    assert await asyncio.wait_for(frontend.receive(), DEADLINE_S) == ("w", Welcome(), [b"x"])


async def test_messages_stay_whole_while_connections_end(mesh):
    """libzmq mixes up the frames of different senders, or aborts, if messages have several: see `sockets`."""
    frontend, random_ = mesh.frontend("f"), random.Random(0)
    workers = {f"w{number}": mesh.worker() for number in range(40)}
    corrupt = []
    frontend._on_corrupt = lambda: corrupt.append(1)
    for _ in range(12):
        for name, worker in workers.items():
            connect(frontend, worker, name)
        for worker in workers.values():
            await worker.receive()
        for name, worker in workers.items():
            for _ in range(30):
                worker.send("f", Welcome(), [name.encode()] * 4)
        await asyncio.sleep(0.1)  # all of it arrives
        ending = random_.sample(sorted(workers), 30)
        for turn in range(600):
            name, message, payload = await frontend.receive()
            assert message == Disconnected(name) or (message, payload) == (Welcome(), [name.encode()] * 4)
            if turn % 20 == 0:
                frontend.disconnect(ending.pop())
        for name in workers:
            frontend.disconnect(name)
    assert not corrupt


async def test_send_to_unknown_peer_is_refused(pair):
    worker, frontend = pair
    assert not worker.send("nobody", Welcome())
    assert not frontend.send("nobody", Abort("r", 1))


async def test_corrupt_bytes_are_counted_and_skipped(mesh, pair):
    worker, frontend = pair
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    if mesh.encrypted:
        keys = KeyPair.new()
        mesh.registered[keys.public] = "another"
        use_as_client(stranger, keys)
        stranger.setsockopt(zmq.CURVE_SERVERKEY, worker.key.encode())
    stranger.connect(worker.request_address)
    stranger.send_multipart([b"\xff not msgpack"])
    stranger.send_multipart([b""])
    stranger.send_multipart([nested()])
    stranger.send_multipart([msgspec.msgpack.encode([nested("call")])])
    frontend.send("w", Abort("after", 1))
    received = (await asyncio.wait_for(worker.receive(), DEADLINE_S))[1]
    assert received == Abort("after", 1)
    while worker.corrupt < 4:  # the stranger's connection may be slower than the frontend's
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(worker.receive(), 0.2)
    context.destroy(linger=0)


async def test_a_frontend_counts_what_it_cannot_read():
    context = zmq.asyncio.Context()
    requests, published = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (requests, published)]
    counted = []
    frontend = FrontendTransport("frontend-1", lambda: counted.append(1), keys=None)
    frontend.connect("vandal", *(f"tcp://127.0.0.1:{port}" for port in ports), "")
    said, reports = (asyncio.create_task(read()) for read in (frontend.receive, frontend.receive_published))
    try:
        await requests.recv_multipart()  # its greeting
        await requests.send_multipart([b"frontend-1", b"\xff not msgpack"])
        assert await said == ("vandal", Unreadable("vandal"), [])  # it may have been tokens of an answer
        assert len(counted) == 1
        while len(counted) < 2:  # a subscription is effective some time after connecting
            await published.send_multipart([b"\xff"])
            await asyncio.sleep(0.01)
        assert not reports.done()
    finally:
        said.cancel()
        reports.cancel()
        frontend.close()
        context.destroy(linger=0)


async def test_a_dead_worker_is_noticed_and_a_new_one_greeted(mesh, pair):
    worker, frontend = pair
    worker.close()
    assert await asyncio.wait_for(frontend.receive(), DEADLINE_S) == ("w", Disconnected("w"), [])
    assert not frontend.send("w", Abort("r", 1))
    again = mesh.worker()
    connect(frontend, again)
    assert (await asyncio.wait_for(again.receive(), DEADLINE_S))[1] == Hello()
    assert again.send("frontend-1", Rejected("r", 1, "draining"))


@pytest.mark.slow
async def test_a_welcome_of_a_broken_connection_is_not_one_of_the_next(doors, mesh):
    """What a worker said last may be read after the news that its connection broke."""
    worker, frontend = mesh.worker(), mesh.frontend("f")
    connect(frontend, worker, request_address=await doors.to(worker.request_address))
    await worker.receive()
    assert worker.send("f", Welcome())
    assert await frontend.receive() == ("w", Welcome(), [])
    assert worker.send("f", Welcome())
    assert worker.send("f", Rejected("r", 1, "the last word"))
    await until(lambda: frontend._requests.getsockopt(zmq.EVENTS) & zmq.POLLIN)
    await asyncio.sleep(0.1)  # for the second one
    doors.break_all()
    await until(lambda: not frontend.send("w", Abort("r", 1)))
    assert await frontend.receive() == ("w", Disconnected("w"), [])
    _, message, _ = await frontend.receive()
    assert message == Rejected("r", 1, "the last word"), "what is fenced otherwise is not lost"
    doors.open_all()
    while (await worker.receive())[1] != Hello():
        pass
    assert worker.send("f", Welcome())
    assert await frontend.receive() == ("w", Welcome(), [])


@pytest.mark.slow
async def test_no_message_comes_twice_or_late_and_none_is_missing_without_news(doors, mesh):
    """Outputs have no sequence number: what a router takes for the next tokens of an attempt is that, because they come
    in order, once, and after a gap only behind a `Disconnected`, on which every attempt there is started again."""
    worker, frontend = mesh.worker(), mesh.frontend("f")
    connect(frontend, worker, request_address=await doors.to(worker.request_address))
    sent = itertools.count()

    async def greet():
        while True:
            await worker.receive()

    async def say():
        while True:
            if not worker.send("f", Rejected(str(next(sent)), 1, ""), [os.urandom(20_000)]):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)

    async def tear():
        while True:
            await asyncio.sleep(random.uniform(0.05, 0.25))
            doors.break_all()  # in the middle of a message, most times
            doors.open_all()

    tasks = [asyncio.create_task(work()) for work in (greet, say, tear)]
    try:
        last, gaps, breaks = -1, 0, 0
        while breaks < 20:
            _, message, _ = await frontend.receive()
            if isinstance(message, Disconnected):
                breaks += 1
                continue
            number = int(message.request_id)
            assert number > last, "twice, or late"
            gaps += 0 <= last < number - 1
            assert gaps <= breaks, "one was lost, and nobody said so"
            last = number
        assert gaps > 5, "nothing was lost: the test tears too little"
    finally:
        await cancelled(*tasks)


async def test_cut_off_host_is_noticed_and_reconnected(link, mesh):
    worker, frontend = mesh.worker(), mesh.frontend("f")
    connect(frontend, worker, request_address=await link.to(worker.request_address))
    await worker.receive()
    said = len(link.said["worker"])
    # Its first question, from which on the frontend expects others.
    await until(lambda: len(link.said["worker"]) > said)
    link.passes.clear()
    cut_at = time.monotonic()
    assert await frontend.receive() == ("w", Disconnected("w"), [])
    await until(lambda: not worker.send("f", Welcome()))
    assert not frontend.send("w", Abort("r", 1))
    assert time.monotonic() - cut_at > 2  # not for a hiccup
    link.passes.set()
    while (await worker.receive())[1] != Hello():
        pass
    assert worker.send("f", Welcome())


@pytest.mark.slow
@pytest.mark.parametrize("asked", [True, False], ids=["with a request", "idle"])
async def test_frontend_notices_link_cut_before_first_heartbeat(link, mesh, asked):
    worker, frontend = mesh.worker(), mesh.frontend("f")
    connect(frontend, worker, request_address=await link.to(worker.request_address))
    await worker.receive()
    assert worker.send("f", Welcome())
    await frontend.receive()
    await link.cut()
    if asked:
        assert frontend.send("w", Abort("r", 1))
    assert await frontend.receive() == ("w", Disconnected("w"), [])
    assert not frontend.send("w", Abort("r", 1))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["none"], indirect=True)
async def test_only_workers_send_heartbeats(link, mesh):
    """With a thousand workers the timers of a frontend's own questions were most of what its ZMQ thread did."""
    worker, frontend = mesh.worker(), mesh.frontend("f")
    frontend.connect("w", await link.to(worker.request_address), await link.to(worker.load_address), worker.key)
    await worker.receive()
    await until(lambda: link.said["frontend"].count(b"\4PONG") >= 3, "pongs on both connections")
    assert link.said["worker"].count(b"\4PING") >= 3
    assert b"\4PING" not in link.said["frontend"]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


async def test_connections_come_and_go_without_a_trace(mesh):
    frontend = mesh.frontend("f")
    before = 0
    for turn in range(150):
        worker = mesh.worker()
        connect(frontend, worker)
        await worker.receive()
        if turn % 2:
            frontend.disconnect("w")  # every other one is replaced while it is connected
        worker.close()
        if turn == 5:
            before = descriptors()
    await until(lambda: descriptors() <= before + 5)


async def test_an_address_has_one_process(pair):
    worker, frontend = pair
    connect(frontend, worker, "newer")
    assert await frontend.receive() == ("w", Disconnected("w"), [])
    assert (await worker.receive())[1] == Hello()
    assert frontend.send("newer", Abort("r", 1)) and not frontend.send("w", Abort("r", 1))


async def test_a_frontend_of_another_protocol_is_not_kept(pair):
    worker, frontend = pair
    worker._routes.clear()
    assert frontend.send("w", Hello(protocol=99))
    assert (await worker.receive())[1].protocol == 99
    assert not worker._routes


@pytest.mark.parametrize(
    "address",
    [
        *("tcp://nonsense", "tcp://a-name:5000", "127.0.0.1:5000", "tcp://127.0.0.1:0", ""),
        *("tcp://127.0.0.1: 5000", "tcp://127.0.0.1:5_000", "tcp://127.0.0.1:-5", "tcp://127.0.0.1:٥٠٠٠"),
    ],
)
async def test_an_address_that_cannot_be_connected_to_is_named(pair, address):
    worker, frontend = pair
    with pytest.raises(AddressError, match=re.escape(repr(address))):
        frontend.connect("x", address, worker.load_address, worker.key)
    with pytest.raises(AddressError, match=re.escape(repr(address))):
        frontend.connect("x", "tcp://127.0.0.1:5000", address, worker.key)
    assert frontend.send("w", Abort("r", 1))


@pytest.mark.parametrize(
    "key",
    ["x" * 39, "0" * 45, "~" * 40, "\ufffd" * 40, "#" * 40],
    ids=["short", "long", "other characters", "no ASCII", "groups above 32 bits"],
)
async def test_what_is_no_key_is_named(key):
    frontend = FrontendTransport("f", keys=KeyPair.new())
    try:
        with pytest.raises(AddressError, match="tcp://127.0.0.1:1 has .* in place of a public key"):
            frontend.connect("x", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", key)
    finally:
        frontend.close()


def publish_while_the_loop_is_blocked(worker, loads):
    for load in loads:
        worker.publish(load)
    time.sleep(0.5)  # all has come


async def subscribed(worker, frontend):
    """Publishes a report until the frontend reads it, and returns it."""
    load = WorkerLoad("w", 1, blocks_total=10, blocks_free=4, running=1, waiting=2, waiting_tokens=30, step_ms=1.5)
    reading = asyncio.create_task(frontend.receive_published())
    while not reading.done():
        worker.publish(load)
        await asyncio.sleep(0.01)
    return load


async def test_reports_can_be_read_some_time_after_they_came(pair):
    """None is lost, they stay in order, and afterwards each is read as it comes again."""
    worker, frontend = pair
    load = await subscribed(worker, frontend)
    for pause_s in (0.005, 0.0, 0.005, 0.0):
        numbers = list(range(2, 12))
        reading = asyncio.create_task(frontend.receive_published(pause_s))
        await asyncio.sleep(0)  # it waits
        for number in numbers:
            worker.publish(msgspec.structs.replace(load, sequence=number))
        read = await reading
        while read[-1].sequence != numbers[-1]:
            read += await frontend.receive_published(pause_s)
        assert [report.sequence for report in read if report.sequence > 1] == numbers


async def test_reports_in_pieces_and_torn_ones_are_read_with_the_others(pair, monkeypatch):
    worker, frontend = pair
    load = await subscribed(worker, frontend)
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 100)  # of which a report is some
    long = PrefixEvents("w", 3, stored=list(range(1 << 40, (1 << 40) + 200)))
    publish_while_the_loop_is_blocked(worker, [msgspec.structs.replace(load, sequence=2), long])
    worker._published.send_multipart([b"\xff"])
    worker.publish(msgspec.structs.replace(load, sequence=4))
    read = []
    while not read or read[-1].sequence != 4:
        read += await frontend.receive_published()
    assert [message.sequence for message in read if message.sequence > 1] == [2, 3, 4] and long in read


async def test_reading_backlog_yields_to_other_tasks(pair):
    worker, frontend = pair
    load = await subscribed(worker, frontend)
    publish_while_the_loop_is_blocked(worker, [load] * 5000 + [msgspec.structs.replace(load, sequence=2)])
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    while (await frontend.receive_published())[-1].sequence != 2:
        pass
    task.cancel()
    assert turns > 15
