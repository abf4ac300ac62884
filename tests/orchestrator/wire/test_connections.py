"""How many connections a frontend makes at a time, to workers that are slow, silent or cut off."""

import asyncio
import contextlib
import socket

import pytest
import zmq
from support_doors import Doors
from support_wait import until

from orchestrator.wire import connections
from orchestrator.wire.addresses import AddressError, Listening
from orchestrator.wire.messages import Hello
from orchestrator.wire.transport import FrontendTransport, WorkerTransport

WORKERS, MOST = 24, 4


@pytest.fixture
async def fleet(monkeypatch):
    monkeypatch.setattr(connections, "MOST_UNDER_WAY", MOST)
    fleet = Fleet()
    yield fleet
    await fleet.close()


class Fleet:
    """Workers behind doors, and a frontend that is made when it is first used."""

    def __init__(self):
        self.doors, self.workers, self.tasks, self.greeted = Doors(), [], [], set()

    async def add(self, count):
        for number in range(len(self.workers), len(self.workers) + count):
            worker = WorkerTransport(Listening("127.0.0.1"), keys=None)
            self.workers.append(worker)
            self.tasks.append(asyncio.create_task(self._receive(number, worker)))
            door = await self.doors.to(worker.request_address)
            self.frontend.connect(f"w{number}", door, worker.load_address, "")

    async def _receive(self, number, worker):
        while True:
            if (await worker.receive())[1] == Hello():
                self.greeted.add(number)

    @property
    def frontend(self):
        if not hasattr(self, "_frontend"):
            self._frontend = FrontendTransport("f", keys=None)
        return self._frontend

    async def close(self):
        for task in self.tasks:
            task.cancel()
        self.frontend.close()
        await self.doors.close()
        for worker in self.workers:
            worker.close()


async def test_the_next_connection_is_made_when_another_is_up(fleet):
    await fleet.add(WORKERS)
    for up in range(WORKERS):
        behind = min(MOST, WORKERS - up)
        await until(lambda behind=behind: len(fleet.doors.shut) == behind)
        await asyncio.sleep(2 * connections.ACCEPT_S if not up else 0.01)  # no more come
        assert len(fleet.doors.shut) == behind and len(fleet.greeted) <= up
        fleet.doors.shut[0].open()
        await until(lambda up=up: len(fleet.greeted) == up + 1)
    assert fleet.doors.tries == WORKERS  # each once


async def test_handshakes_that_fail_are_tried_again_a_few_at_a_time(fleet, monkeypatch):
    monkeypatch.setattr("orchestrator.wire.sockets.HANDSHAKE_TIMEOUT_MS", 200)
    await fleet.add(WORKERS)
    await until(lambda: fleet.doors.tries >= 2 * WORKERS)
    assert fleet.doors.most_shut <= 2 * MOST  # the end of one may be seen after the beginning of the next
    fleet.doors.open_all()
    await until(lambda: len(fleet.greeted) == WORKERS)


async def test_a_worker_whose_handshake_fails_for_hours_takes_nobody_the_news_of_others(fleet):
    """As where something else answers at its address."""
    tries = list[None]()

    async def refuse(_, writer):
        tries.append(writer.close())

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        fleet.frontend.connect("other", address, "tcp://127.0.0.1:1", "")
        fleet.frontend._connections.by_worker["other"].failures = 5000
        await until(lambda: len(tries) > 2)
        fleet.doors.open_all()
        await fleet.add(2)
        await until(lambda: len(fleet.greeted) == 2)


async def test_news_of_one_connection_that_cannot_be_handled_leave_those_of_others(fleet, monkeypatch, caplog):
    fleet.doors.open_all()
    changed = connections.Connections._requests_changed

    def trip(them, connection, happened):
        changed(them, connection, happened if connection.worker_id != "w0" else 1 // 0)

    monkeypatch.setattr(connections.Connections, "_requests_changed", trip)
    await fleet.add(3)
    await until(lambda: fleet.greeted == {1, 2})
    assert "could not handle news of the connection to" in caplog.text and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("socket_name", ["_requests", "_published"])
async def test_a_connection_that_zmq_refuses_is_forgotten_and_keeps_none_waiting(fleet, monkeypatch, socket_name):
    """Neither is it known as one that has been made, nor do those that are made after it fail for it."""
    refused, connect = list[str](), connections.connect
    fleet.doors.open_all()
    own = getattr(fleet.frontend, socket_name)

    def refuse(socket, address):
        if socket is own and len(refused) < 2 * MOST:
            refused.append(address)
            raise zmq.ZMQError(zmq.EINVAL)
        connect(socket, address)

    monkeypatch.setattr(connections, "connect", refuse)
    for number in range(2 * MOST):
        worker = WorkerTransport(Listening("127.0.0.1"), keys=None)
        fleet.workers.append(worker)
        fleet.tasks.append(asyncio.create_task(fleet._receive(number, worker)))
        told = (
            pytest.raises(AddressError, match="Invalid argument")
            if socket_name == "_requests"
            else contextlib.nullcontext()
        )
        with told:
            fleet.frontend.connect(f"w{number}", worker.request_address, worker.load_address, "")
    them = fleet.frontend._connections
    await until(lambda: len(refused) == 2 * MOST and not them.by_worker)
    assert not them.by_route and not them._by_address and not them._under_way and not fleet.greeted
    for number, worker in enumerate(fleet.workers):
        fleet.frontend.connect(f"w{number}", worker.request_address, worker.load_address, "")
    await until(lambda: len(fleet.greeted) == 2 * MOST)


async def test_workers_that_are_cut_off_keep_none_waiting(fleet):
    with contextlib.ExitStack() as stack:
        for number in range(2 * MOST):
            full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            address = full.getsockname()
            stack.enter_context(socket.create_connection(address))  # the kernel accepts no other
            port = address[1]
            fleet.frontend.connect(f"cut-{number}", f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.2:{port}", "")
        fleet.doors.open_all()
        await fleet.add(2)
        await until(lambda: len(fleet.greeted) == 2)


async def test_a_connection_that_is_given_up_lets_the_next_begin(fleet):
    await fleet.add(2 * MOST)
    await until(lambda: len(fleet.doors.shut) == MOST)
    for number in range(2 * MOST - 1):
        fleet.frontend.disconnect(f"w{number}")
    assert not fleet.frontend.is_coming("w0")
    fleet.doors.open_all()
    await until(lambda: fleet.greeted == {2 * MOST - 1})
