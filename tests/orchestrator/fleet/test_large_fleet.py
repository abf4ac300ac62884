"""One frontend and 1,200 workers, on real sockets: all are held, and each costs two descriptors.

Run as a program it is the workers.
"""

import asyncio
import json
import os
import resource
import subprocess
import sys

import pytest
import zmq

from orchestrator.fleet.membership import Membership
from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import PrefixView
from orchestrator.process.tasks import cancelled
from orchestrator.types import EngineIdentity, KVEndpoint, Role, WorkerInfo, WorkerLoad, WorkerState
from orchestrator.wire.messages import Abort, Rejected, Welcome, decode_to_worker, encode
from orchestrator.wire.sockets import Assembler, frames_of
from orchestrator.wire.transport import Disconnected, FrontendTransport

WORKERS = 1200
DEADLINE_S = 60
IDENTITY = EngineIdentity("m", "float32", "auto", 16, 4096, "sim", "1", 1)


def serve_many(count):
    """The sockets of many workers. Prints their addresses, answers each message, and publishes loads, until killed."""
    context, poller, by_socket = zmq.Context(), zmq.Poller(), {}
    context.set(zmq.MAX_SOCKETS, 2 * count + 10)
    for number in range(count):
        requests, load = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        for socket in (requests, load):
            socket.bind("tcp://127.0.0.1:*")
        poller.register(requests, zmq.POLLIN)
        by_socket[requests] = f"d{number}", load
    ends = ((name, requests, load) for requests, (name, load) in by_socket.items())
    print(json.dumps({name: [s.getsockopt(zmq.LAST_ENDPOINT).decode() for s in pair] for name, *pair in ends}))
    sys.stdout.flush()
    sequence = 0
    while True:
        for socket, _ in poller.poll(200):
            name, _ = by_socket[socket]
            route, frame = socket.recv_multipart()
            message = decode_to_worker(Assembler().take([frame])[0])
            answer = Rejected("r", 1, "test") if isinstance(message, Abort) else Welcome()
            socket.send_multipart([route, *frames_of([encode(answer)])])
        sequence += 1
        for name, load in by_socket.values():
            load.send(*frames_of([encode(WorkerLoad(name, sequence, 100, 50, 0, 0, 0, 1.0))]))


class FullRegistry:
    def __init__(self, addresses):
        self.infos = {
            name: WorkerInfo(
                name, Role.DECODE, WorkerState.READY, "h", 1, *pair, IDENTITY, KVEndpoint(f"e-{name}", "h", 1),
                100, 8, 64, 1,
            )
            for name, pair in addresses.items()
        }  # fmt: skip

    async def workers(self):
        return self.infos

    async def watch(self):
        yield
        await asyncio.Event().wait()


@pytest.fixture
def addresses():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    workers = subprocess.Popen([sys.executable, __file__, str(WORKERS)], stdout=subprocess.PIPE, text=True)
    yield json.loads(workers.stdout.readline())
    workers.kill()
    workers.wait()
    workers.stdout.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
async def test_a_frontend_holds_1200_workers(addresses):
    fleet, transport, lost, answered = Fleet("f"), FrontendTransport("f", keys=None), [], set()
    prefixes = PrefixView(transport.send)

    def tell(*ids):
        lost.extend(ids)

    membership = Membership(FullRegistry(addresses), fleet, transport, prefixes, 10.0, tell, tell, tell)
    before = descriptors()

    async def receive():
        while True:
            worker_id, message, _ = await transport.receive()
            if isinstance(message, Disconnected):
                membership.disconnected(worker_id)
            elif isinstance(message, Rejected):
                answered.add(worker_id)
            else:
                membership.on_welcome(worker_id)

    tasks = [asyncio.create_task(membership.run()), asyncio.create_task(receive())]
    async with asyncio.timeout(DEADLINE_S):
        while fleet.ready(Role.DECODE) < WORKERS or any(view.load is None for view in fleet.workers.values()):
            await asyncio.sleep(0.05)
        assert descriptors() - before <= 2 * WORKERS + 10
        for name in addresses:
            assert transport.send(name, Abort("r", 1))
        while len(answered) < WORKERS:
            await asyncio.sleep(0.05)
    assert lost == []
    await cancelled(*tasks)
    transport.close()


if __name__ == "__main__":
    serve_many(int(sys.argv[1]))
