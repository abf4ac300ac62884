"""One frontend and 1,200 workers, on real sockets: all are held, and each costs two descriptors."""

import asyncio
import os
import resource
import threading

import pytest
import zmq

from orchestrator.fleet.membership import Membership
from orchestrator.fleet.prefixes import PrefixView
from orchestrator.fleet.view import Fleet
from orchestrator.store.registry import Resync
from orchestrator.types import EngineIdentity, KVEndpoint, Role, WorkerInfo, WorkerLoad, WorkerState
from orchestrator.wire.messages import Abort, Welcome, decode_to_worker, encode
from orchestrator.wire.transport import Disconnected, FrontendTransport

WORKERS = 1200
DEADLINE_S = 60
IDENTITY = EngineIdentity("m", "float32", "auto", 16, 4096, "sim", "1", 1)


class ManyWorkers:
    """The sockets of many workers, served by a thread: each message is answered by `Welcome` and a load report."""

    def __init__(self, count):
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 2 * count + 10)
        self.poller, self.by_socket, self.infos, self.aborts = zmq.Poller(), {}, {}, set()
        for number in range(count):
            requests, load = self.context.socket(zmq.ROUTER), self.context.socket(zmq.PUB)
            for socket in (requests, load):
                socket.bind("tcp://127.0.0.1:*")
            self.poller.register(requests, zmq.POLLIN)
            name = f"d{number}"
            addresses = (socket.getsockopt(zmq.LAST_ENDPOINT).decode() for socket in (requests, load))
            self.infos[name] = WorkerInfo(
                name, Role.DECODE, WorkerState.READY, "h", 1, *addresses, IDENTITY, KVEndpoint(f"e-{name}", "h", 1),
                100, 8, 64, 1, 1.0,
            )  # fmt: skip
            self.by_socket[requests] = name, load
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self):
        sequence = 0
        while not self.ending.is_set():
            for socket, _ in self.poller.poll(200):
                name, _ = self.by_socket[socket]
                route, frame = socket.recv_multipart()
                socket.send_multipart([route, encode(Welcome(name))])
                if isinstance(decode_to_worker(frame), Abort):
                    self.aborts.add(name)
            sequence += 1
            for name, load in self.by_socket.values():
                load.send(encode(WorkerLoad(name, sequence, 100, 50, 0, 0, 0, 1.0)))

    def close(self):
        self.ending.set()
        self.thread.join()
        self.context.destroy(linger=0)


class FullRegistry:
    def __init__(self, infos):
        self.infos = infos

    async def workers(self):
        return self.infos

    async def watch(self):
        yield Resync()
        await asyncio.Event().wait()


@pytest.fixture
def many():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    workers = ManyWorkers(WORKERS)
    yield workers
    workers.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


async def test_a_frontend_holds_1200_workers(many):
    fleet, transport, lost = Fleet("f"), FrontendTransport("f"), []
    prefixes = PrefixView(transport.send)
    membership = Membership(FullRegistry(many.infos), fleet, transport, prefixes, 10.0, lost.append)
    before = descriptors()

    async def receive():
        while True:
            worker_id, message, _ = await transport.receive()
            if isinstance(message, Disconnected):
                membership.disconnected(worker_id)
            else:
                membership.welcomed(worker_id)

    tasks = [asyncio.create_task(membership.run()), asyncio.create_task(receive())]
    async with asyncio.timeout(DEADLINE_S):
        while fleet.ready(Role.DECODE) < WORKERS or any(view.load is None for view in fleet.workers.values()):
            await asyncio.sleep(0.05)
        # The workers are in this process too, and have one descriptor more for each connection.
        assert descriptors() - before < 4 * WORKERS + 50
        for name in many.infos:
            assert transport.send(name, Abort("r", 1))
        while len(many.aborts) < WORKERS:
            await asyncio.sleep(0.05)
    assert lost == []
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    transport.close()
