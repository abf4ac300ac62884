"""The mesh's sockets: addressing, corrupt bytes, reconnection, and a peer that is gone."""

import asyncio

import pytest
import zmq

from orchestrator.types import WorkerLoad
from orchestrator.wire.messages import Abort, Hello, Rejected, Welcome
from orchestrator.wire.transport import Disconnected, FrontendTransport, WorkerTransport

DEADLINE_S = 10


@pytest.fixture
async def pair():
    worker, frontend = WorkerTransport("127.0.0.1"), FrontendTransport("frontend-1")
    frontend.connect("w", worker.request_address, worker.load_address)
    identity, hello, _ = await asyncio.wait_for(worker.receive(), DEADLINE_S)
    assert (identity, hello) == ("frontend-1", Hello())
    yield worker, frontend
    frontend.close()
    worker.close()


async def test_messages_with_payload_go_both_ways(pair):
    worker, frontend = pair
    assert frontend.send("w", Abort("r", 1), [b"a", b"b" * 1000])
    assert await asyncio.wait_for(worker.receive(), DEADLINE_S) == ("frontend-1", Abort("r", 1), [b"a", b"b" * 1000])
    assert worker.send("frontend-1", Welcome("w"), [b"x"])
    assert await asyncio.wait_for(frontend.receive(), DEADLINE_S) == ("w", Welcome("w"), [b"x"])


async def test_sending_to_the_unknown_is_refused_at_once(pair):
    worker, frontend = pair
    assert not worker.send("nobody", Welcome("w"))
    assert not frontend.send("nobody", Abort("r", 1))


async def test_corrupt_bytes_are_counted_and_skipped(pair):
    worker, frontend = pair
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(worker.request_address)
    stranger.send_multipart([b"\xff not msgpack"])
    stranger.send_multipart([b""])
    frontend.send("w", Abort("after", 1))
    received = (await asyncio.wait_for(worker.receive(), DEADLINE_S))[1]
    assert received == Abort("after", 1)
    while worker.corrupt < 2:  # the stranger's connection may be slower than the frontend's
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(worker.receive(), 0.2)
    context.destroy(linger=0)


async def test_load_reports_arrive(pair):
    worker, frontend = pair
    load = WorkerLoad("w", 1, blocks_total=10, blocks_free=4, running=1, waiting=2, waiting_tokens=30, step_ms=1.5)
    reading = asyncio.create_task(frontend.receive_published())
    for _ in range(200):  # a subscription is effective some time after connecting
        worker.publish(load)
        done, _ = await asyncio.wait([reading], timeout=0.05)
        if done:
            break
    assert await asyncio.wait_for(reading, DEADLINE_S) == load


async def test_a_dead_worker_is_noticed_and_a_new_one_greeted(pair):
    worker, frontend = pair
    worker.close()
    assert await asyncio.wait_for(frontend.receive(), DEADLINE_S) == ("w", Disconnected("w"), [])
    assert not frontend.send("w", Abort("r", 1))
    again = WorkerTransport("127.0.0.1")
    frontend.connect("w", again.request_address, again.load_address)
    assert (await asyncio.wait_for(again.receive(), DEADLINE_S))[1] == Hello()
    assert again.send("frontend-1", Rejected("r", 1, "w", "draining"))
    again.close()
